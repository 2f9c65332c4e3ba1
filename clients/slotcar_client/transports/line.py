"""The line to a sidecar on a plane: the cells of the session of now, over a connection that is made when it is needed.

Invariant: the cells belong to the session and the epoch that `use` named last.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
from slotcar.shm.region import Kind
from slotcar.v1 import engine_service_pb2, plane_pb2

from slotcar_client.effects import Call
from slotcar_client.errors import AuditFailed, SessionClosed
from slotcar_client.rpc import Rpc
from slotcar_client.transports.cells import Cells, ConnectionLost
from slotcar_client.transports.connection import Connect

T = TypeVar("T")

_KINDS: dict[type[Message], tuple[Kind, type[Message]]] = {
    engine_service_pb2.SetMappingRequest: (Kind.SET_MAPPING, engine_service_pb2.SetMappingResponse),
    engine_service_pb2.ReleaseMappingRequest: (Kind.RELEASE_MAPPING, engine_service_pb2.ReleaseMappingResponse),
    engine_service_pb2.FenceRequest: (Kind.FENCE, engine_service_pb2.FenceResponse),
}
# Of one digest with its slot in the answer to a SetMapping, and of the rest of it.
_ENTRY_BYTES = 96
_REST_BYTES = 256


class Line:
    """`plane` is the one that the connection is asked for; calls that it does not carry go over `rpc`."""

    def __init__(self, connect: Connect, rpc: Rpc, plane: plane_pb2.Plane.ValueType) -> None:
        self.timeout_seconds = rpc.timeout_seconds
        self._connect = connect
        self._rpc = rpc
        self._plane = plane
        self._opened: engine_service_pb2.SessionOpened | None = None
        self._cells: Cells | None = None
        self._closed = False

    @property
    def cells(self) -> Cells:
        """Over a connection that did not end as far as is known. Raises SlotcarError when there is no new one."""
        cells = self._cells
        if cells is None or cells.connection.ended:
            cells = self._connected()
        return cells

    @property
    def opened(self) -> engine_service_pb2.SessionOpened:
        assert self._opened is not None
        return self._opened

    def use(self, opened: engine_service_pb2.SessionOpened) -> None:
        """The session is this one from now on. Raises SlotcarError when it cannot be connected to."""
        before, self._opened = self._opened, opened
        if before is not None and _key(before) != _key(opened):
            self.drop()
        if self._cells is None or not self._cells.connection.is_alive():
            self._connected()

    def repeated(self, attempt: Callable[[Cells], T]) -> T:
        """The result of an attempt; of another over a new connection, if the one that it used ends meanwhile.

        What travels on a plane may be repeated. What ends an attempt and is no Exception may have ended it between any
        two steps, so its connection is of no more use.
        """
        try:
            try:
                return attempt(self.cells)
            except ConnectionLost:
                self.drop()
                return attempt(self.cells)
        except Exception:
            raise
        except BaseException:
            self.drop()
            raise

    def call(self, call: Call) -> Any:
        """The response to one RPC. Raises SlotcarError."""
        kind, response = _KINDS.get(type(call.request), (None, None))
        if kind is None or response is None or call.wait_seconds:
            return self._rpc.call(call)
        payload = call.request.SerializeToString()
        if max(len(payload), _answer_bytes(call.request)) > self.cells.payload_bytes:
            return self._rpc.call(call)
        answer = self.repeated(partial(_ask, kind, payload, self._rpc.deadline_seconds(call)))
        try:
            return response.FromString(answer)
        except DecodeError as error:
            raise AuditFailed(f"the answer to {kind.name} is no {response.__name__}", found=answer[:64]) from error

    def drop(self) -> None:
        """Ends the connection; the next use makes another."""
        if self._cells is not None:
            self._cells.close()
            self._cells = None

    def close(self) -> None:
        """Ends the connection for good. Idempotent."""
        self._closed = True
        self.drop()

    def _connected(self) -> Cells:
        self.drop()
        if self._closed:
            raise SessionClosed("the session is closed")
        self._cells = Cells(self._connect(self.opened, self._plane))
        return self._cells


def _key(opened: engine_service_pb2.SessionOpened) -> tuple[str, str]:
    return opened.session, opened.layout.version.epoch


def _answer_bytes(request: Message) -> int:
    if isinstance(request, engine_service_pb2.SetMappingRequest):
        return _REST_BYTES + _ENTRY_BYTES * (len(request.targets) or len(request.entries))
    return 0


def _ask(kind: Kind, payload: bytes, timeout_seconds: float, cells: Cells) -> bytes:
    asked = cells.take(0, timeout_seconds)
    try:
        cells.submit(asked, kind, payload)
        cells.wait(asked, timeout_seconds)
        return cells.payload(asked)
    finally:
        cells.give_back(asked)
