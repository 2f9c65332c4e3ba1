"""The engine's front end with slotcar: requests get the version of their adapter, their clients its failures.

Invariant: no LoRARequest gets past an engine whose workers are slotcar's, other than one that names a version which the
workers hold.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import cache, partial
from http import HTTPStatus
from inspect import BoundArguments
from typing import Any, TypeAlias

from vllm.exceptions import GracefulHTTPError
from vllm.lora.request import LoRARequest
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import OutputProcessor

from slotcar_client.engines.vllm import failures
from slotcar_client.engines.vllm.admission import TRIES, Admission, Hold, Perform
from slotcar_client.engines.vllm.calls import Calls, run_blocking
from slotcar_client.engines.vllm.hooks import Method, wrap
from slotcar_client.engines.vllm.requests import SCHEME, asked_by, plain_name, version_request
from slotcar_client.errors import SlotcarError

_WORKER_MODULE = "slotcar_client.engines.vllm.worker"
Engine: TypeAlias = AsyncLLM | LLMEngine


class AdapterRefused(GracefulHTTPError):
    """A request that cannot have its adapter; vLLM gives its client this message and status."""

    def __init__(self, error: SlotcarError) -> None:
        super().__init__(failures.as_text(error), failures.http_status(error))


class Front:
    """The admissions of this process's engines."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self._admissions: weakref.WeakKeyDictionary[Engine, Admission] = weakref.WeakKeyDictionary()

    def serves(self, engine: object) -> bool:
        """The engine computes with slotcar's workers, or with a user's that are made from them."""
        config = getattr(engine, "vllm_config", None)
        if config is None or config.lora_config is None:
            return False
        worker: str = config.parallel_config.worker_cls
        return worker.startswith(f"{_WORKER_MODULE}.") or _is_made_from_ours(worker)

    def admission(self, engine: Engine) -> Admission:
        """The engine's, made at its first request."""
        found = self._admissions.get(engine)
        if found is None:
            perform, hold = _faces(engine, self.calls)
            found = self._admissions[engine] = Admission(perform, hold, _held_versions(engine))
        return found

    async def admitted(self, engine: Engine, request: LoRARequest, *, anew: bool = False) -> LoRARequest:
        """The request for the version that this one gets. Raises SlotcarError, or what the engine does."""
        admission = self.admission(engine)
        version = await admission.admit(asked_by(request), anew=anew)
        admission.remember_id(request.lora_int_id, version)
        return version_request(version)

    async def admitted_or_refused(self, engine: AsyncLLM, request: LoRARequest, *, anew: bool = False) -> LoRARequest:
        """The same for a client of the server. Raises AdapterRefused, or what has nothing to do with slotcar."""
        try:
            return await self.admitted(engine, request, anew=anew)
        except Exception as error:
            raise refusal(error) from error

    async def newer(self, engine: AsyncLLM, request: LoRARequest, refused: AdapterRefused) -> LoRARequest | None:
        """What the name of a request whose version is gone has now; None if it asked for that version alone."""
        asked = asked_by(request)
        if not asked.by_name or refused.http_status != HTTPStatus.NOT_FOUND:
            return None
        now = LoRARequest(asked.name, request.lora_int_id, SCHEME + asked.name)
        return await self.admitted_or_refused(engine, now, anew=True)


def refusal(error: Exception) -> Exception:
    """What the server's client is told of a failure; one of vLLM's own is left as it is."""
    found = failures.slotcar_error(error)
    return error if found is None else AdapterRefused(found)


def install(front: Front) -> None:
    """Takes hold of the engines' front ends, in this process."""
    wrap(AsyncLLM, "add_request", partial(_async_add_request, front))
    for stream in ("generate", "encode"):
        wrap(AsyncLLM, stream, partial(_admitted_again, front))
    wrap(AsyncLLM, "add_lora", partial(_async_add_lora, front))
    wrap(LLMEngine, "add_request", partial(_blocking_add_request, front))
    wrap(LLMEngine, "add_lora", partial(_blocking_add_lora, front))
    for engine in (AsyncLLM, LLMEngine):
        wrap(engine, "remove_lora", partial(_by_id, front))
        wrap(engine, "pin_lora", partial(_by_id, front))
    wrap(OutputProcessor, "add_request", _counted_by_name)
    wrap(OutputProcessor, "process_outputs", _failures_raised)


@cache
def _is_made_from_ours(worker: str) -> bool:
    return any(base.__module__ == _WORKER_MODULE for base in resolve_obj_by_qualname(worker).__mro__)


def _faces(engine: Engine, calls: Calls) -> tuple[Perform, Hold]:
    """How an engine's admission calls the sidecar and the workers: what vLLM's own `add_lora` does for the latter."""
    add_lora = inspect.unwrap(type(engine).add_lora)
    if isinstance(engine, AsyncLLM):

        async def hold(version: str) -> None:
            await add_lora(engine, version_request(version))

        return calls.perform, hold

    async def hold_blocking(version: str) -> None:
        add_lora(engine, version_request(version))

    return calls.perform_blocking, hold_blocking


def _held_versions(engine: Engine) -> int:
    """The front ends of one engine share the versions that its workers hold beside those in use."""
    config = engine.vllm_config
    return max(1, config.lora_config.max_cpu_loras // config.parallel_config._api_process_count)


def _lora_request(call: BoundArguments) -> LoRARequest | None:
    """The one of an `add_request`, which may be inside a prompt that was processed before."""
    found = call.arguments.get("lora_request")
    prompt = call.arguments["prompt"]
    if found is None and isinstance(prompt, EngineCoreRequest):
        found = prompt.lora_request
    return found if isinstance(found, LoRARequest) else None


def _put_lora_request(call: BoundArguments, request: LoRARequest) -> None:
    prompt = call.arguments["prompt"]
    if isinstance(prompt, EngineCoreRequest):
        prompt.lora_request = request
    else:
        call.arguments["lora_request"] = request


def _async_add_request(front: Front, original: Method) -> Method:
    signature = inspect.signature(original)

    async def add_request(self: AsyncLLM, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs)
        asked = _lora_request(call)
        if asked is not None and front.serves(self):
            _put_lora_request(call, await front.admitted_or_refused(self, asked))
        return await original(*call.args, **call.kwargs)

    return add_request


def _admitted_again(front: Front, original: Method) -> Method:
    """A request whose version goes while it waits for its first step gets the newer one, if it asked for a name."""
    signature = inspect.signature(original)

    def outputs(self: AsyncLLM, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        call = signature.bind(self, *args, **kwargs)
        asked = call.arguments.get("lora_request")
        # A prompt that comes in pieces can be read once.
        if asked is None or isinstance(call.arguments["prompt"], AsyncIterator) or not front.serves(self):
            found: AsyncIterator[Any] = original(*call.args, **call.kwargs)
            return found
        return until_begun(call, asked)

    async def until_begun(call: BoundArguments, asked: LoRARequest) -> AsyncIterator[Any]:
        engine = call.arguments["self"]
        admitted = await front.admitted_or_refused(engine, asked)
        for again in reversed(range(TRIES)):
            call.arguments["lora_request"] = admitted
            begun = False
            try:
                async with aclosing(original(*call.args, **call.kwargs)) as found:
                    async for output in found:
                        begun = True
                        yield output
                return
            except AdapterRefused as refused:
                newer = await front.newer(engine, asked, refused) if again and not begun else None
                if newer is None:
                    raise
                admitted = newer

    return outputs


def _blocking_add_request(front: Front, original: Method) -> Method:
    signature = inspect.signature(original)

    def add_request(self: LLMEngine, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs)
        asked = _lora_request(call)
        if asked is not None and front.serves(self):
            _put_lora_request(call, run_blocking(front.admitted(self, asked)))
        return original(*call.args, **call.kwargs)

    return add_request


def _async_add_lora(front: Front, original: Method) -> Method:
    async def add_lora(self: AsyncLLM, lora_request: LoRARequest) -> Any:
        if not front.serves(self):
            return await original(self, lora_request)
        await front.admitted_or_refused(self, lora_request, anew=True)
        return True

    return add_lora


def _blocking_add_lora(front: Front, original: Method) -> Method:
    def add_lora(self: LLMEngine, lora_request: LoRARequest) -> Any:
        if not front.serves(self):
            return original(self, lora_request)
        run_blocking(front.admitted(self, lora_request, anew=True))
        return True

    return add_lora


def _by_id(front: Front, original: Method) -> Method:
    """`remove_lora` and `pin_lora` of either engine: what they return is what the caller may have to await."""

    def with_engine_id(self: Engine, lora_id: int) -> Any:
        if not front.serves(self):
            return original(self, lora_id)
        admission = front.admission(self)
        number = admission.engine_id(lora_id)
        if original.__name__ == "remove_lora":
            admission.forget(number)
        return original(self, number)

    return with_engine_id


def _counted_by_name(original: Method) -> Method:
    """vLLM's metrics count requests by the adapter's name alone: routers that read them know of no digest."""

    def add_request(self: OutputProcessor, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        original(self, request, *args, **kwargs)
        lora = request.lora_request
        if lora is not None and lora.lora_path.startswith(SCHEME):
            self.request_states[request.request_id].lora_name = plain_name(lora.lora_name)

    return add_request


def _failures_raised(original: Method) -> Method:
    """Who awaits a request that slotcar ended gets the reason, in the place of an output that says "error"."""

    def process_outputs(self: OutputProcessor, engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        failed = []
        for output in engine_core_outputs:
            if output.finish_reason == FinishReason.ERROR and isinstance(output.stop_reason, str):
                state = self.request_states.get(output.request_id)
                error = failures.from_text(output.stop_reason)
                if error is not None and state is not None and state.queue is not None:
                    failed.append((state.queue, error))
        processed = original(self, engine_core_outputs, *args, **kwargs)
        for queue, error in failed:
            queue.put(AdapterRefused(error))
        return processed

    return process_outputs
