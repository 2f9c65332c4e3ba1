"""Forward over the shared memory of a region: tensors are copied into its arena, computed there, and copied out."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from slotcar.shm.region import Kind
from slotcar.v1 import engine_service_pb2, plane_pb2

from slotcar_client.effects import Call, Forward
from slotcar_client.errors import DeadlineExceeded, SlotcarError
from slotcar_client.rpc import Rpc
from slotcar_client.transports.cells import Asked, Cells, ConnectionLost
from slotcar_client.transports.connection import Connect
from slotcar_client.transports.line import Line
from slotcar_client.transports.shapes import Devices, MixedDtypes, Place, Shape, Shapes, by_dtype

Outputs = dict[str, torch.Tensor]


class RingTransport:
    name = "ring"

    def __init__(self, connect: Connect, rpc: Rpc) -> None:
        self._line = Line(connect, rpc, plane_pb2.PLANE_RING)
        self._seconds = rpc.timeout_seconds
        self._shapes: Shapes | None = None

    def use(self, opened: engine_service_pb2.SessionOpened) -> None:
        self._line.use(opened)
        self._shapes = Shapes(opened, self._line.cells)

    def forward(self, forward: Forward) -> Outputs:
        try:
            return self._line.repeated(partial(self._forward, forward))
        except MixedDtypes:
            return {site: output for part in by_dtype(forward) for site, output in self.forward(part).items()}

    def send(self, forward: Forward) -> RingSent | None:
        try:
            return self._line.repeated(partial(self._send, forward))
        except MixedDtypes:
            return None

    def call(self, call: Call) -> Any:
        return self._line.call(call)

    def close(self) -> None:
        self._line.close()
        self._shapes = None

    def _forward(self, forward: Forward, cells: Cells) -> Outputs:
        return self._submitted(forward, cells).take(self._seconds)

    def _send(self, forward: Forward, cells: Cells) -> RingSent:
        sent = self._submitted(forward, cells)
        cells.ahead.append(sent)
        return sent

    def _submitted(self, forward: Forward, cells: Cells) -> RingSent:
        shapes = self._shapes
        if shapes is None or shapes.cells is not cells:
            shapes = self._shapes = Shapes(self._line.opened, cells)
        shape = shapes.of(forward)
        asked = cells.take(shape.bytes, self._seconds)
        try:
            place = shape.place(shapes.arena, asked.block[0])
            devices = place.fill(forward.call)
            cells.submit(asked, Kind.FORWARD, place.payload)
        except BaseException:
            cells.give_back(asked)
            raise
        return RingSent(cells, asked, shape, place, devices)


class RingSent:
    """A Forward that was submitted. Its cell is given back once, when its outcome was taken out of it."""

    __slots__ = ("_asked", "_cells", "_devices", "_error", "_outputs", "_place", "_shape")

    def __init__(self, cells: Cells, asked: Asked, shape: Shape, place: Place, devices: Devices) -> None:
        self._cells = cells
        self._asked: Asked | None = asked
        self._shape = shape
        self._place = place
        self._devices = devices
        self._outputs: Outputs | None = None
        self._error: SlotcarError | None = None

    def done(self) -> bool:
        asked = self._asked
        return asked is None or self._cells.has_answer(asked) or not self._cells.connection.is_alive()

    def collect(self, timeout_seconds: float) -> Outputs | None:
        if self._asked is not None:
            self._cells.wanted(self)
            try:
                self.settle(timeout_seconds)
            except Exception:
                raise
            except BaseException:  # as in Line.repeated
                self._cells.close()
                raise
        if self._error is not None:
            raise self._error
        return self._outputs

    def settle(self, timeout_seconds: float) -> bool:
        """As Unawaited says. Keeps the outcome for `collect`; over a connection that was lost there is none."""
        try:
            self._outputs = self.take(timeout_seconds)
        except ConnectionLost:
            return False
        except SlotcarError as error:
            self._error = error
            return not isinstance(error, DeadlineExceeded)
        return True

    def take(self, timeout_seconds: float) -> Outputs:
        """Waits for the outputs and gives the cell back. Raises SlotcarError."""
        cells, asked = self._cells, self._asked
        assert asked is not None
        self._asked = None
        try:
            self._shape.audit(cells.wait(asked, timeout_seconds))
            return self._place.outputs(self._devices)
        finally:
            cells.give_back(asked)
