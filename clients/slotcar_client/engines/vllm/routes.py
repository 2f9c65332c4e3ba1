"""The OpenAI server with slotcar: its models are the sidecar's adapters, its routes for adapters the sidecar's verbs.

Invariant: `lora_requests`, where the server looks a request's model up, has for a name what the sidecar had under it
when the latest request for that name came; its answers have the name as the request has it.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, ModelCard, ModelList, ModelPermission
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.lora.request import LoRARequest

from slotcar_client import verbs
from slotcar_client.engines.vllm.failures import slotcar_error
from slotcar_client.engines.vllm.front import Front, refusal
from slotcar_client.engines.vllm.hooks import Method, wrap
from slotcar_client.engines.vllm.requests import SCHEME, named_request, version_ref
from slotcar_client.errors import AdapterNotFound, RequestInvalid, SlotcarError

_log = logging.getLogger(__name__)
# vLLM wants an id in each LoRARequest; the front end makes the engine's from the version.
_ANY_ID = 1


def install(front: Front) -> None:
    """Takes hold of the server's routes, in this process."""
    for serving in (BaseServing, PoolingBaseServing):
        wrap(serving, "_check_model", partial(_check_model, front))
    wrap(OpenAIServingModels, "load_lora_adapter", partial(_load_lora_adapter, front))
    wrap(OpenAIServingModels, "unload_lora_adapter", partial(_unload_lora_adapter, front))
    wrap(OpenAIServingModels, "show_available_models", partial(_show_available_models, front))


def _check_model(front: Front, original: Method) -> Method:
    """Each request with an adapter as its model is admitted here, before anything is sent to its client."""

    async def check_model(self: BaseServing | PoolingBaseServing, request: Any) -> Any:
        name, models = request.model, self.models
        if name and not models.is_base_model(name) and _served(front, models):
            await _look_up(front, models, name)
        return await original(self, request)

    return check_model


async def _look_up(front: Front, models: OpenAIServingModels, name: str) -> None:
    """`lora_requests[name]` becomes the version that the name has now. Raises AdapterRefused.

    A name that no adapter has or can have is left to vLLM, which does not know it either.
    """
    try:
        admitted = await front.admitted(models.engine_client, LoRARequest(name, _ANY_ID, SCHEME + name))
    except Exception as error:
        if not isinstance(slotcar_error(error), AdapterNotFound | RequestInvalid):
            raise refusal(error) from error
        models.lora_requests.pop(name, None)
    else:
        models.lora_requests[name] = named_request(name, admitted.lora_name)


def _load_lora_adapter(front: Front, original: Method) -> Method:
    """LoadAdapter: idempotent, and REPLACE with `load_inplace`. `slotcar:` as path asks for what is there."""

    async def load_lora_adapter(
        self: OpenAIServingModels, request: LoadLoRAAdapterRequest, base_model_name: str | None = None
    ) -> ErrorResponse | str:
        if not _served(front, self):
            return await original(self, request, base_model_name)
        # vLLM's own checks, but for the one that refuses a name which is there: the sidecar compares the bytes.
        checked = request.model_copy(update={"load_inplace": True})
        refused: ErrorResponse | None = await self._check_load_lora_adapter_request(checked)
        if refused is not None:
            return refused
        name = request.lora_name
        asked = LoRARequest(name, _ANY_ID, request.lora_path, load_inplace=request.load_inplace)
        try:
            admitted = await front.admitted(self.engine_client, asked, anew=True)
        except Exception as error:
            return create_error_response(refusal(error))
        self.lora_requests[name] = named_request(name, admitted.lora_name)
        return f"Success: LoRA adapter '{name}' added successfully."

    return load_lora_adapter


def _unload_lora_adapter(front: Front, original: Method) -> Method:
    """UnloadAdapter: requests that have the adapter go on with it, new ones do not get it, on any engine."""

    async def unload_lora_adapter(self: OpenAIServingModels, request: UnloadLoRAAdapterRequest) -> ErrorResponse | str:
        if not _served(front, self):
            return await original(self, request)
        name = request.lora_name
        try:
            await front.calls.perform(verbs.unload(name, False))
        except SlotcarError as error:
            return create_error_response(refusal(error))
        self.lora_requests.pop(name, None)
        return f"Success: LoRA adapter '{name}' removed successfully."

    return unload_lora_adapter


def _show_available_models(front: Front, original: Method) -> Method:
    """The base models, and every adapter that the sidecar has at this moment; `root` says which version it is.

    While the sidecar is away there are only the base models to be had, and only they are listed.
    """

    async def show_available_models(self: OpenAIServingModels) -> ModelList:
        if not _served(front, self):
            return await original(self)
        models: ModelList = await self.registry.show_available_models()
        try:
            snapshot = await front.calls.perform(verbs.snapshot())
        except SlotcarError as error:
            _log.warning("the adapters are not listed: %s", error)
            return models
        for adapter in snapshot.adapters:
            root = SCHEME + version_ref(adapter.name, adapter.digest)
            base = self.base_model_paths[0].name
            models.data.append(ModelCard(id=adapter.name, root=root, parent=base, permission=[ModelPermission()]))
        return models

    return show_available_models


def _served(front: Front, models: Any) -> bool:
    """A server without an engine has a registry in the place of its models."""
    return front.serves(getattr(models, "engine_client", None))
