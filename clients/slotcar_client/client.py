"""The operator's and the engine's way in: one channel to one sidecar."""

from __future__ import annotations

import os
import weakref
from types import TracebackType
from typing import Self

from slotcar.v1 import adapter_service_pb2, model_pb2

from slotcar_client import convert
from slotcar_client.config import default_target, grpc_target
from slotcar_client.errors import RequestInvalid, Unavailable
from slotcar_client.events import EventStream
from slotcar_client.rpc import Rpc
from slotcar_client.session import Session
from slotcar_client.values import AdapterInfo, Estimate, LoadReport, Snapshot, UnloadReport

DEFAULT_TIMEOUT_SECONDS = 60.0
_PAGE_SIZE = 1000


def connect(target: str | None = None, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> Client:
    """A client of the sidecar at `target`: unix:///path, tcp://host:port or host:port; by default $SLOTCAR_TARGET.

    timeout_seconds: the deadline of each call. Nothing is sent before the first call. Raises RequestInvalid.
    """
    if timeout_seconds <= 0:
        raise RequestInvalid(
            f"timeout_seconds is {timeout_seconds}", field="timeout_seconds", found=timeout_seconds, wanted="above 0"
        )
    return Client(target if target is not None else default_target(), timeout_seconds)


class Client:
    """Made by `connect`; a context that closes the channel and the sessions. Every method raises SlotcarError."""

    def __init__(self, target: str, timeout_seconds: float) -> None:
        self.target = target
        self._rpc = Rpc(grpc_target(target), timeout_seconds)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._closed = False

    # Adapters

    def load(
        self,
        name: str,
        source: str | os.PathLike[str] | None = None,
        *,
        replace: bool = False,
        keep: bool = False,
        digest: str | None = None,
    ) -> LoadReport:
        """Makes the adapter at `source` resident under `name`; returns when it can be mapped. Idempotent.

        source: as the server sees it; by default the one that the name was loaded from. replace: the name may move to
        other bytes. keep: it stays resident. digest: refuse bytes that have another one.
        """
        request = adapter_service_pb2.LoadAdapterRequest(
            ref=f"{name}@{digest}" if digest is not None else name,
            source=os.fspath(source) if source is not None else "",
            on_conflict=(adapter_service_pb2.ON_CONFLICT_REPLACE if replace else adapter_service_pb2.ON_CONFLICT_FAIL),
            keep=keep,
        )
        return convert.load_report(self._open().call(self._rpc.adapters.LoadAdapter, request))

    def unload(self, ref: str, *, force: bool = False) -> UnloadReport:
        """Takes the name and its keep away; its slot drains while pinned, or is freed at once with `force`."""
        request = adapter_service_pb2.UnloadAdapterRequest(ref=ref, force=force)
        return convert.unload_report(self._open().call(self._rpc.adapters.UnloadAdapter, request))

    def keep(self, ref: str) -> AdapterInfo:
        """Asks for a resident adapter to stay resident. Idempotent."""
        request = adapter_service_pb2.KeepAdapterRequest(ref=ref)
        return convert.adapter(self._open().call(self._rpc.adapters.KeepAdapter, request).adapter)

    def release_keep(self, ref: str) -> AdapterInfo:
        """Ends a keep. Idempotent."""
        request = adapter_service_pb2.ReleaseKeepRequest(ref=ref)
        return convert.adapter(self._open().call(self._rpc.adapters.ReleaseKeep, request).adapter)

    def get(self, ref: str) -> AdapterInfo:
        """One adapter, with its sites."""
        request = adapter_service_pb2.GetAdapterRequest(ref=ref)
        return convert.adapter(self._open().call(self._rpc.adapters.GetAdapter, request).adapter)

    def list(self) -> tuple[AdapterInfo, ...]:
        """All adapters, in order of their names, from one consistent snapshot."""
        return self.snapshot().adapters

    def snapshot(self) -> Snapshot:
        """All adapters with the layout at the same moment."""
        adapters: list[AdapterInfo] = []
        request = adapter_service_pb2.ListAdaptersRequest(page_size=_PAGE_SIZE)
        while True:
            page = self._open().call(self._rpc.adapters.ListAdapters, request)
            adapters.extend(convert.adapter(adapter) for adapter in page.adapters)
            if not page.next_page_token:
                return Snapshot(tuple(adapters), convert.layout(page.layout))
            request.page_token = page.next_page_token

    def estimate(self, source: str | os.PathLike[str]) -> Estimate:
        """What a load of `source` would take, and whether it would be accepted. Has no effect."""
        request = adapter_service_pb2.EstimateAdapterRequest(source=os.fspath(source))
        return convert.estimate(self._open().call(self._rpc.adapters.EstimateAdapter, request))

    def events(self, replay: int = 0) -> EventStream:
        """Everything that happens from this call on, after up to `replay` events of the past; close it to stop."""
        return EventStream(self._open(), replay)

    # Engines

    def session(
        self,
        name: str = "python",
        *,
        model_spec: model_pb2.ModelSpec | None = None,
        grace_seconds: float = 30.0,
        transport: str = "auto",
    ) -> Session:
        """Opens a session.

        name: for people. model_spec: the engine's model; the first that the server sees shapes its slots.
        grace_seconds: how long the session outlives a broken connection. transport: "auto", "stream" or "unary".
        """
        session = Session(self._open(), name, model_spec, grace_seconds, transport)
        self._sessions.add(session)
        return session

    # The end

    def close(self) -> None:
        """Closes the sessions, then the channel. Idempotent."""
        self._closed = True
        for session in tuple(self._sessions):
            session.close()
        self._rpc.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> Rpc:
        if self._closed:
            raise Unavailable("the client is closed")
        return self._rpc
