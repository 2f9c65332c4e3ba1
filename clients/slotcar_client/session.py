"""A session: one engine's presence at a sidecar, which maps adapters to rows and computes their LoRA.

Invariant: a tensor that a session hands out was computed with the digests of its mapping, as the server reported
them. A mapping that became stale is set again by digest, never by name; what cannot be set again is an error.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Mapping as ReadOnlyDict
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import grpc
from slotcar.v1 import adapter_service_pb2, engine_service_pb2, model_pb2

from slotcar_client import protocol
from slotcar_client.entries import Entries, Entry, parse_entries
from slotcar_client.errors import (
    InternalError,
    MappingNotFound,
    RequestInvalid,
    SessionNotFound,
    SlotcarError,
)
from slotcar_client.recovery import MAX_STEPS, Step, next_step
from slotcar_client.rpc import Rpc
from slotcar_client.session_stream import SessionStream
from slotcar_client.transports import make_transport
from slotcar_client.values import Layout, Mapping, ServerInfo

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
RowsFollower = Callable[[Mapping | None], None]

DEFAULT_MAPPING_ID = 1
ROWS_MAPPING_ID = 2
RESUMED = "STREAM_ENDED"
_FIRST_RETRY_SECONDS = 0.05
_LAST_RETRY_SECONDS = 1.0
_CLOSE_SECONDS = 5.0
_MAX_KNOWN_ADAPTERS = 4096


class Session:
    """Made by `Client.session`; a context that ends the session. Safe to use from threads, one call at a time."""

    def __init__(
        self, rpc: Rpc, name: str, model_spec: model_pb2.ModelSpec | None, grace_seconds: float, transport: str
    ) -> None:
        """Opens the session. Raises SlotcarError."""
        self._rpc = rpc
        self._name = name
        self._own_spec = model_spec
        self._grace_seconds = grace_seconds
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._transport = make_transport(transport, rpc)
        self._mappings: dict[int, Mapping] = {}
        self._last_id: int | None = None
        self._rows: Mapping | None = None
        self._follower: RowsFollower | None = None
        self._sites: dict[str, frozenset[str]] = {}
        self._recoveries: Counter[str] = Counter()
        with self._lock:
            self._stream = self._open(resume="")

    # What is known

    @property
    def session_id(self) -> str:
        return self._stream.opened.session

    @property
    def server(self) -> ServerInfo:
        """What the server is and accepts."""
        return self._stream.server

    @property
    def model_spec(self) -> model_pb2.ModelSpec | None:
        """The model that shapes the slots, as the server said when the session was opened; None if it knew none."""
        opened = self._stream.opened
        return opened.model_spec if opened.HasField("model_spec") else None

    @property
    def layout(self) -> Layout:
        """The newest layout that the server sent."""
        return self._stream.layout

    @property
    def transport(self) -> str:
        """The transport in use: "stream" or "unary"."""
        return self._transport.name

    @property
    def recoveries(self) -> dict[str, int]:
        """How often the session went on after a fault, by cause."""
        return dict(self._recoveries)

    @property
    def mapping(self) -> Mapping | None:
        """The mapping that `forward` uses by default."""
        return self._mappings.get(self._last_id) if self._last_id is not None else None

    # Mappings

    def set_mapping(self, entries: Iterable[Entry], *, mapping_id: int = DEFAULT_MAPPING_ID) -> Mapping:
        """Resolves `entries` and pins their slots, all or nothing; the mapping of the same id is replaced.

        An entry is a name, "name@digest" or BASE, alone or as (entry, row count). Raises SlotcarError; then `forward`
        has no default mapping, so that no rows go to the adapters of the mapping before.
        """
        if mapping_id == ROWS_MAPPING_ID or not 0 <= mapping_id < 1 << 64:
            wanted = f"0 to 2^64 - 1, except {ROWS_MAPPING_ID}, which `rows` uses"
            raise RequestInvalid(f"mapping_id is {mapping_id}", field="mapping_id", found=mapping_id, wanted=wanted)
        with self._lock:
            self._last_id = None
            mapping = self._set_mapping(mapping_id, parse_entries(entries))
            self._last_id = mapping_id
            return mapping

    def release_mapping(self, mapping: Mapping | None = None) -> None:
        """Ends a mapping, by default the last one, and its pins. Idempotent."""
        with self._lock:
            mapping_id = mapping.mapping_id if mapping is not None else self._last_id
            if mapping_id is None or mapping_id not in self._mappings:
                return
            if self._last_id == mapping_id:
                self._last_id = None
            request = engine_service_pb2.ReleaseMappingRequest(session=self.session_id, mapping_id=mapping_id)
            with contextlib.suppress(SessionNotFound):
                self._rpc.call(self._rpc.engine.ReleaseMapping, request)
            del self._mappings[mapping_id]

    def forward(
        self,
        inputs: ReadOnlyDict[str, torch.Tensor],
        row_counts: Sequence[int] | None = None,
        base: ReadOnlyDict[str, torch.Tensor] | None = None,
        *,
        mapping: Mapping | None = None,
    ) -> dict[str, torch.Tensor]:
        """{site: scale · (x Aᵀ) Bᵀ} of each row's adapter, or base + that, for the rows of a mapping.

        inputs: {site: x [rows, in_features]}, float32, float16 or bfloat16; sites with the very same x send it once.
        row_counts: rows per entry, in order; by default the mapping's own counts.
        base: {site: y [rows, out_features]} of the same dtype; rows of BASE come back bit for bit.
        mapping: by default the last one that was set.
        The outputs are [rows, out_features] with the dtype and device of x. Raises SlotcarError.
        """
        from slotcar_client import torch_tensors

        with self._lock:
            current = self._current(mapping)
            outgoing = torch_tensors.to_request(inputs, protocol.counts_for(current, row_counts), base)
            protocol.check_size(outgoing.request, outgoing.tensor_bytes, self.server.max_message_bytes)
            response = self._recovered(
                lambda: self._forward(current.mapping_id, outgoing.request),
                remap=lambda: self._remap(current.mapping_id),
            )
        return torch_tensors.to_outputs(outgoing, response)

    @contextlib.contextmanager
    def rows(self, entries: Iterable[Entry] | Mapping) -> Iterator[Mapping]:
        """Says which adapter each sequence of a batch uses, for the model that `attach` connected to this session.

        entries: one per sequence, as for `set_mapping`; names become digests here, once, and the mapping is released
        at the end. Or a mapping that `set_mapping` returned, which stays. Raises SlotcarError.
        """
        with self._lock:
            if self._rows is not None:
                raise RequestInvalid(
                    "rows is in use: leave it before entering it again", field="rows", found="nested", wanted="one"
                )
            lent = isinstance(entries, Mapping)
            if isinstance(entries, Mapping):
                mapping = self._current(entries)
            else:
                mapping = self._set_mapping(ROWS_MAPPING_ID, parse_entries(entries))
            self._rows = mapping
        try:
            self._tell_follower(mapping)
            yield mapping
        finally:
            self._rows = None
            self._tell_follower(None)
            if not lent:
                # What ended the block is worth more than a server that is away now; its grace ends the pins.
                with contextlib.suppress(SlotcarError):
                    self.release_mapping(mapping)

    def follow_rows(self, follower: RowsFollower) -> None:
        """Calls `follower` with the mapping when a `rows` block begins, now if one is open, and with None at its end.

        Raises RequestInvalid when there is a follower already, and what `follower` raises.
        """
        with self._lock:
            if self._follower is not None:
                raise RequestInvalid(
                    "the session has an attached model: detach it first", field="session", found=1, wanted=0
                )
            follower(self._rows)
            self._follower = follower

    def unfollow_rows(self) -> None:
        """Ends `follow_rows`. Idempotent."""
        self._follower = None

    def sites_of(self, mapping: Mapping) -> tuple[frozenset[str], ...]:
        """The sites for which each entry's adapter has weights; none for BASE. Cached by digest."""
        with self._lock:
            return tuple(
                self._adapter_sites(entry) if isinstance(entry, str) else frozenset() for entry in mapping.entries
            )

    # The end

    def close(self) -> None:
        """Ends the session and all that it owns; when the server is away, its grace does. Idempotent."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            self._mappings.clear()
            self._last_id = None
            self._transport.close()
            request = engine_service_pb2.CloseSessionRequest(session=self.session_id)
            with contextlib.suppress(SlotcarError):
                self._rpc.call(self._rpc.engine.CloseSession, request, timeout_seconds=_CLOSE_SECONDS)
            self._stream.cancel()
        self._stream.join(timeout_seconds=1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tell_follower(self, mapping: Mapping | None) -> None:
        if self._follower is not None:
            self._follower(mapping)

    # Steps; the caller has the lock

    def _current(self, mapping: Mapping | None) -> Mapping:
        """The mapping as it is now, after re-maps. Raises MappingNotFound when it was replaced or released."""
        mapping_id = mapping.mapping_id if mapping is not None else self._last_id
        current = self._mappings.get(mapping_id) if mapping_id is not None else None
        if current is None:
            raise MappingNotFound("no mapping is set: call set_mapping first", mapping_id=mapping_id)
        if mapping is not None and (mapping.entries, mapping.row_counts) != (current.entries, current.row_counts):
            raise MappingNotFound(f"mapping {mapping_id} was replaced by another", mapping_id=mapping_id)
        return current

    def _set_mapping(self, mapping_id: int, entries: Entries) -> Mapping:
        def call() -> Mapping:
            request = protocol.mapping_request(self.session_id, mapping_id, entries.targets)
            response = self._rpc.call(self._rpc.engine.SetMapping, request)
            return protocol.read_mapping(mapping_id, entries, response)

        mapping = self._recovered(call, remap=lambda: None)
        self._mappings[mapping_id] = mapping
        return mapping

    def _remap(self, mapping_id: int) -> None:
        """Sets the mapping again by the digests last reported; its name in `digests` and its counts stay."""
        old = self._mappings[mapping_id]
        request = protocol.mapping_request(self.session_id, mapping_id, old.entries)
        response = self._rpc.call(self._rpc.engine.SetMapping, request)
        self._mappings[mapping_id] = protocol.remapped(old, response)

    def _forward(
        self, mapping_id: int, request: engine_service_pb2.ForwardRequest
    ) -> engine_service_pb2.ForwardResponse:
        mapping = self._mappings[mapping_id]
        request.session, request.mapping_id, request.generation = self.session_id, mapping_id, mapping.generation
        response = self._transport.forward(request)
        protocol.check_forward(mapping, request, response)
        return response

    def _recovered(self, call: Callable[[], T], remap: Callable[[], None]) -> T:
        """The result of `call`, which is repeated after what `next_step` says, at most MAX_STEPS times."""
        self._check_open()
        step = Step.CALL
        for _ in range(MAX_STEPS):
            try:
                if step is Step.REOPEN:
                    self._stream.cancel()
                    self._stream = self._open(resume="")
                    step = Step.REMAP
                if step is Step.REMAP:
                    remap()
                return call()
            except SlotcarError as error:
                step, last = next_step(error), error
                if step is Step.RAISE:
                    raise
                self._recoveries[error.reason] += 1
        raise last

    def _check_open(self) -> None:
        self._rpc.check_usable()
        if self._closed.is_set():
            raise SessionNotFound("the session is closed")

    def _adapter_sites(self, ref: str) -> frozenset[str]:
        digest = ref.partition("@")[2]
        if digest not in self._sites:
            response = self._rpc.call(self._rpc.adapters.GetAdapter, adapter_service_pb2.GetAdapterRequest(ref=ref))
            if response.adapter.digest != digest:
                raise InternalError(f"GetAdapter({ref}) answered {response.adapter.digest}")
            while len(self._sites) >= _MAX_KNOWN_ADAPTERS:
                del self._sites[next(iter(self._sites))]
            self._sites[digest] = frozenset(response.adapter.sites)
        return self._sites[digest]

    # The stream that keeps the session alive

    def _open(self, resume: str) -> SessionStream:
        self._check_open()
        request = protocol.open_request(self._name, resume, self._own_spec, self._grace_seconds)
        return SessionStream(self._rpc, request, self._resume)

    def _resume(self, ended: SessionStream) -> None:
        """Called in the stream's thread: tries to resume the session until its grace is over or another call did.

        A session that the server no longer knows is opened anew by the next call, which also maps again.
        """
        give_up, delay = time.monotonic() + self._grace_seconds, _FIRST_RETRY_SECONDS
        while time.monotonic() < give_up and not self._closed.wait(delay):
            delay = min(2 * delay, _LAST_RETRY_SECONDS)
            with self._lock:
                if self._closed.is_set() or self._stream is not ended:
                    return
                try:
                    self._stream = self._open(resume=ended.opened.session)
                except SlotcarError as error:
                    if error.code is grpc.StatusCode.UNAVAILABLE:
                        continue
                    return
                self._recoveries[RESUMED] += 1
                return
