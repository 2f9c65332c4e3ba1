"""What an engine's own session and a rank of it have in common: a stream, a transport, mappings and Forwards.

One lock orders the calls of a session. It is free while a call only waits: for the server to be back, for slots, or for
`on_stale`; so `close` is never behind such a call, and ends it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Mapping as ReadOnlyDict
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc
from slotcar.v1 import engine_service_pb2, model_pb2

from slotcar_client import convert
from slotcar_client.effects import Advance, Call, Effect, Forward, Open, Plan, Stale, Use, Wait, performed, run
from slotcar_client.entries import Entry
from slotcar_client.errors import SessionClosed, SlotcarError, from_rpc_error
from slotcar_client.options import SessionOptions
from slotcar_client.pending import Ahead, PendingForward
from slotcar_client.rpc import Rpc
from slotcar_client.session_state import DEFAULT_MAPPING_ID, SessionState
from slotcar_client.session_stream import SessionStream
from slotcar_client.transports.choice import Choice
from slotcar_client.values import Layout, Mapping, ServerInfo

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class MappedSession:
    """Safe to use from threads, one call at a time; a context that closes it."""

    def __init__(self, rpc: Rpc, options: SessionOptions, socket_path: str | None = None) -> None:
        """Opens or joins the session; `socket_path` is the server's, if it is at a unix socket. Raises SlotcarError."""
        self._rpc = rpc
        self._state = SessionState(options, time.monotonic)
        # Reentrant for a signal handler that closes the session in the middle of a call of the same thread.
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._queued: set[grpc.Future[Any]] = set()
        self._choice = Choice(rpc, options, socket_path)
        self._stream: SessionStream | None = None
        try:
            self._run(self._state.open())
        except BaseException:
            self.close()
            raise

    # What is known

    @property
    def session_id(self) -> str:
        """A secret that names the session, also to its other ranks; another one after the session was opened anew."""
        return self._state.session_id

    @property
    def server(self) -> ServerInfo:
        """What the server is and accepts."""
        return self._state.server

    @property
    def model_spec(self) -> model_pb2.ModelSpec | None:
        """The model that shapes the slots, as the server said when the session was opened; None if it knew none."""
        return self._state.model_spec

    @property
    def ranks(self) -> int:
        """How many processes compute for the session."""
        return self._state.opened.ranks

    @property
    def reserved_slots(self) -> int:
        """Slots that are the session's own."""
        return self._state.opened.reserved_slots

    @property
    def layout(self) -> Layout:
        """The newest layout that the server sent."""
        return self._stream.layout if self._stream is not None else convert.layout(self._state.opened.layout)

    @property
    def transport(self) -> str:
        """The transport in use: "direct", "ring", "stream" or "unary"."""
        return self._choice.transport.name

    @property
    def transport_reason(self) -> str:
        """Why it is no faster one: what each of those lacks, or that it was asked for; empty for the fastest."""
        return self._choice.reason

    @property
    def recoveries(self) -> dict[str, int]:
        """How often the session went on after a fault, by cause; "HOLD" counts the holds that were taken again."""
        return dict(self._state.recoveries)

    @property
    def mapping(self) -> Mapping | None:
        """The mapping that `forward` uses by default."""
        return self._state.mapping

    # Mappings

    def set_mapping(
        self,
        entries: Iterable[Entry],
        *,
        mapping_id: int = DEFAULT_MAPPING_ID,
        load: bool = False,
        wait_seconds: float = 0.0,
    ) -> Mapping:
        """Resolves `entries` and pins their slots, all or nothing; the mapping of the same id is replaced.

        An entry is a name, "name@digest" or BASE, alone or as (entry, row count); in a session of several ranks
        "name@digest" or BASE. load: adapters that are in no slot are made resident, all of them or none.
        wait_seconds: how long to queue for slots, 0 to 3600; other calls go on meanwhile.
        A mapping that became stale is set again by its digests; adapters that lost their slots are made resident then
        only if it was set with `load`, and without waiting.
        Raises SlotcarError; then `forward` has no default mapping, so that no rows go to the adapters before.
        """
        return self._run(self._state.set_mapping(entries, mapping_id, load, wait_seconds))

    def release_mapping(self, mapping: Mapping | None = None) -> None:
        """Ends a mapping, by default the last one, and its pins. Idempotent."""
        with contextlib.suppress(SessionClosed):
            self._run(self._state.release_mapping(mapping))

    def forward(
        self,
        inputs: ReadOnlyDict[str, torch.Tensor],
        row_counts: Sequence[int] | None = None,
        base: ReadOnlyDict[str, torch.Tensor] | None = None,
        *,
        aux: ReadOnlyDict[str, torch.Tensor] | None = None,
        mapping: Mapping | None = None,
    ) -> dict[str, torch.Tensor]:
        """{site: the delta of each row's adapter}, or base + that, for the rows of a mapping.

        delta = scale · (x Aᵀ) Bᵀ, and what DoRA and biases add to it. Features are those of this rank.
        inputs: {site: x [rows, in_features]}, float32, float16 or bfloat16; sites with the very same x send it once.
        row_counts: rows per entry, in order; by default the mapping's own counts.
        base: {site: y [rows, out_features]} of the same dtype; rows of BASE come back bit for bit.
        aux: int32 or int64 [rows] at embeddings, the ids of tokens, in place of x, and at experts, the expert of each
        row; at other sites the base model's output, which DoRA needs where there is no `base`.
        mapping: by default the last one that was set.
        The outputs are [rows, out_features] with the dtype and device of x; at an embedding of the base, or without one
        with the model's dtype. Raises SlotcarError.
        """
        with self._lock:
            self._check_open()
            first, failed = self._state.first_forward(inputs, row_counts, base, mapping, aux), None
            if self._state.is_settled:
                try:
                    return self._choice.transport.forward(first)
                except SlotcarError as error:
                    failed = error
        return self._run(self._state.go_on(first, failed))

    def forward_async(
        self,
        inputs: ReadOnlyDict[str, torch.Tensor],
        row_counts: Sequence[int] | None = None,
        base: ReadOnlyDict[str, torch.Tensor] | None = None,
        *,
        aux: ReadOnlyDict[str, torch.Tensor] | None = None,
        mapping: Mapping | None = None,
    ) -> PendingForward:
        """`forward`, whose result, or failure, its handle gives when it is wanted: several may be under way, in order.

        On the ring it returns when the tensors are in shared memory; when there is no room for them, it waits for the
        oldest. On another plane it computes at once. Do not change the tensors before the result is there: a
        call that has to be repeated, as after a re-map, reads them again. Closing the session ends what is under way
        with SessionClosed.
        """
        return PendingForward(partial(self._send, inputs, row_counts, base, mapping, aux), self._collect, self._is_done)

    def _send(
        self,
        inputs: ReadOnlyDict[str, torch.Tensor],
        row_counts: Sequence[int] | None,
        base: ReadOnlyDict[str, torch.Tensor] | None,
        mapping: Mapping | None,
        aux: ReadOnlyDict[str, torch.Tensor] | None,
    ) -> Ahead | dict[str, torch.Tensor]:
        """Sends a Forward ahead; where that cannot be, its outputs."""
        with self._lock:
            self._check_open()
            first, failed = self._state.first_forward(inputs, row_counts, base, mapping, aux), None
            if self._state.is_settled:
                try:
                    sent = self._choice.transport.send(first)
                    return Ahead(first, sent) if sent is not None else self._choice.transport.forward(first)
                except SlotcarError as error:
                    failed = error
        return self._run(self._state.go_on(first, failed))

    def _collect(self, ahead: Ahead) -> dict[str, torch.Tensor]:
        """The outputs of a Forward that was sent ahead."""
        failed = None
        with self._lock:
            self._check_open()
            try:
                outputs = ahead.sent.collect(self._rpc.timeout_seconds)
                if outputs is not None:
                    return outputs
            except SlotcarError as error:
                failed = error
        return self._run(self._state.go_on(ahead.first, failed))

    def _is_done(self, ahead: Ahead) -> bool:
        """Whether `_collect` would not wait for an answer."""
        with self._lock:
            return self._closed.is_set() or ahead.sent.done()

    # The end

    def close(self) -> None:
        """Ends the session and all that it owns, and every call that waits; a rank only leaves. Idempotent.

        When the server is away, the session's grace ends it.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        for future in tuple(self._queued):
            future.cancel()
        with self._lock:
            self._choice.close()
            run(self._state.close(), self._rpc.perform)
            stream = self._stream
            if stream is not None:
                stream.cancel()
        if stream is not None:
            stream.join(timeout_seconds=1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # How plans are run

    def _run(self, plan: Plan[T]) -> T:
        advance: Advance = partial(next, plan)
        try:
            while True:
                with self._lock:
                    self._check_open()
                    while not (effect := advance()).lends:
                        advance = performed(plan, self._perform, effect)
                advance = performed(plan, self._perform, effect)
        except StopIteration as end:
            result: T = end.value
            return result

    def _perform(self, effect: Effect) -> Any:
        return _PERFORM[type(effect)](self, effect)

    def _wait(self, wait: Wait) -> None:
        if self._closed.wait(wait.seconds):
            raise SessionClosed("the session was closed while a call waited for the server")

    def _tell_stale(self, stale: Stale) -> None:
        if self._state.options.on_stale is not None:
            self._state.options.on_stale(stale.mapping, stale.error)

    def _call(self, call: Call) -> Any:
        if call.lends:
            return self._rpc.identified(lambda: self._queue(call))
        return self._choice.transport.call(call)

    def _queue(self, call: Call) -> Any:
        """A call that the server may queue, which `close` cancels."""
        future = self._rpc.begin(call)
        self._queued.add(future)
        try:
            if self._closed.is_set():
                future.cancel()
            return future.result()
        except grpc.FutureCancelledError as error:
            raise SessionClosed("the session was closed while a call waited for slots") from error
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            future.cancel()
            self._queued.discard(future)

    def _open(self, effect: Open) -> engine_service_pb2.SessionOpened:
        stream = self._rpc.identified(lambda: SessionStream(self._rpc, effect.request, self._resume))
        if self._stream is not None:
            self._stream.cancel()
        self._stream = stream
        return stream.opened

    def _resume(self, ended: SessionStream) -> None:
        """Called in the stream's thread when it ended. A rank whose place another took does not take it back."""
        if self._stream is ended and (self._state.options.owner or ended.error is not None):
            with contextlib.suppress(SlotcarError):
                self._run(self._state.resume())

    def _check_open(self) -> None:
        self._rpc.check_usable()
        if self._closed.is_set():
            raise SessionClosed("the session is closed")


_PERFORM: dict[type[Effect], Callable[[MappedSession, Any], Any]] = {
    Forward: lambda session, forward: session._choice.transport.forward(forward),
    Call: MappedSession._call,
    Open: MappedSession._open,
    Use: lambda session, use: session._choice.use(use.opened),
    Wait: MappedSession._wait,
    Stale: MappedSession._tell_stale,
}
