"""Forward over the shared memory of a region: tensors are copied into its arena, computed there, and copied out."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from slotcar.shm.region import Kind
from slotcar.v1 import engine_service_pb2, plane_pb2

from slotcar_client.effects import Call, Forward, ForwardCall
from slotcar_client.errors import CapacityExceeded, DeadlineExceeded, SlotcarError
from slotcar_client.rpc import Rpc
from slotcar_client.transports.cells import Asked, Cells, ConnectionLost
from slotcar_client.transports.connection import Connect
from slotcar_client.transports.line import Line
from slotcar_client.transports.shapes import Devices, MixedDtypes, Shape, Shapes, by_dtype, devices

Outputs = dict[str, torch.Tensor]


class RingTransport:
    name = "ring"

    def __init__(self, connect: Connect, rpc: Rpc) -> None:
        self._line = Line(connect, rpc, plane_pb2.PLANE_RING)
        self._seconds = rpc.timeout_seconds
        self._shapes: Shapes | None = None

    def use(self, opened: engine_service_pb2.SessionOpened) -> None:
        self._shapes = Shapes(opened)
        self._line.use(opened)

    def forward(self, forward: Forward) -> Outputs:
        try:
            shape = self._shape(forward)
        except MixedDtypes:
            return {site: output for part in by_dtype(forward) for site, output in self.forward(part).items()}
        return self._line.repeated(partial(self._forward, forward.call, shape))

    def send(self, forward: Forward) -> RingSent | None:
        try:
            shape = self._shape(forward)
        except MixedDtypes:
            return None
        return self._line.repeated(partial(self._send, forward.call, shape))

    def call(self, call: Call) -> Any:
        return self._line.call(call)

    def close(self) -> None:
        self._line.close()

    def _shape(self, forward: Forward) -> Shape:
        assert self._shapes is not None
        return self._shapes.of(forward)

    def _forward(self, call: ForwardCall, shape: Shape, cells: Cells) -> Outputs:
        asked = self._submit(call, shape, cells)
        try:
            answer = cells.wait(asked, self._seconds)
            return shape.outputs(answer, cells.arena_address + asked.block[0], devices(call))
        finally:
            cells.give_back(asked)

    def _send(self, call: ForwardCall, shape: Shape, cells: Cells) -> RingSent:
        sent = RingSent(shape, devices(call), cells, self._submit(call, shape, cells))
        cells.ahead.append(sent)
        return sent

    def _submit(self, call: ForwardCall, shape: Shape, cells: Cells) -> Asked:
        asked = cells.take(shape.bytes, self._seconds)
        try:
            start = asked.block[0]
            payload = shape.payload(start)
            if len(payload) > cells.payload_bytes:
                raise CapacityExceeded(
                    f"a Forward of {len(call.row_counts)} entries has {len(payload)} bytes, a cell of the ring only "
                    f"{cells.payload_bytes}: use fewer entries, or the stream",
                    found=len(payload),
                    wanted=cells.payload_bytes,
                )
            shape.fill(call, cells.arena_address + start)
            cells.submit(asked, Kind.FORWARD, payload)
        except BaseException:
            cells.give_back(asked)
            raise
        return asked


class RingSent:
    """A Forward that was sent ahead. Its cell is given back once, when its outcome was taken out of it."""

    def __init__(self, shape: Shape, devices: Devices, cells: Cells, asked: Asked) -> None:
        self._shape = shape
        self._devices = devices
        self._cells = cells
        self._asked: Asked | None = asked
        self._outputs: Outputs | None = None
        self._error: SlotcarError | None = None

    def done(self) -> bool:
        asked = self._asked
        return asked is None or self._cells.has_answer(asked) or not self._cells.connection.is_alive()

    def collect(self, timeout_seconds: float) -> Outputs | None:
        if self._asked is not None:
            self._cells.ahead.remove(self)
            with contextlib.suppress(ConnectionLost, DeadlineExceeded):
                self.settle(timeout_seconds)
        if self._error is not None:
            raise self._error
        return self._outputs

    def settle(self, timeout_seconds: float) -> None:
        """Waits for the outcome and keeps it, whatever it is. Raises DeadlineExceeded or ConnectionLost."""
        asked, cells = self._asked, self._cells
        assert asked is not None
        try:
            answer = cells.wait(asked, timeout_seconds)
            self._outputs = self._shape.outputs(answer, cells.arena_address + asked.block[0], self._devices)
        except ConnectionLost:
            raise
        except SlotcarError as error:
            self._error = error
            if isinstance(error, DeadlineExceeded):
                raise
        finally:
            self._asked = None
            cells.give_back(asked)
