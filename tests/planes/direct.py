"""A reader of a slots file by the rule of I2 alone: look at the words, read, look again; computed with the kernel."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence

import torch
from slotcar.shm import slots
from slotcar.v1 import model_pb2
from slotcar_kernels.buffers import DTYPES
from slotcar_kernels.cpu import lora_forward
from slotcar_kernels.plan import plan_rows
from slotcar_kernels.sites import SiteSlots

from tests.planes.connection import Connection


class DirectReader:
    """The slots of a connection, mapped for reading."""

    def __init__(self, connection: Connection, model: model_pb2.ModelSpec) -> None:
        self._connection = connection
        self._memory = mmap.mmap(connection.descriptors[3], connection.opened.slots_bytes, prot=mmap.PROT_READ)
        view = memoryview(self._memory)
        # The header says how many slots of which rank and dtype; the sites are the model's.
        count, _, max_rank, dtype = (int.from_bytes(view[at : at + 4], "little") for at in (12, 16, 20, 24))
        features = [slots.LeafShape(site.in_features, site.out_features) for site in model.sites]
        self._geometry = slots.SlotsGeometry(count, max_rank, slots.DTYPES[dtype], features)
        self._geometry.check(view, connection.epoch)
        self._view = view
        self._features = features

    @property
    def generation(self) -> int:
        return self._word(slots.GENERATION_OFFSET)

    def is_right(self, generation: int, places: Iterable[int | None]) -> bool:
        """Whether nothing that was read since the last look has begun to change."""
        if self._connection.is_over or self._word(slots.CLOSED_OFFSET):
            return False
        return all(self._word(self._geometry.mod_offset(slot)) <= generation for slot in places if slot is not None)

    def compute(
        self,
        generation: int,
        entries: Sequence[tuple[int | None, int]],
        site: int,
        tensors: tuple[str, bytes, bytes | None],
    ) -> bytes | None:
        """base + delta, or the delta, at one site; None when what it would read has begun to change.

        `tensors` are the dtype, x, and the base.
        """
        if not self.is_right(generation, (slot for slot, _ in entries)):
            return None
        dtype, x_bytes, base_bytes = tensors
        rows, (in_features, out_features) = sum(count for _, count in entries), self._features[site][:2]
        x = _tensor(dtype, rows, in_features, x_bytes)
        base = None if base_bytes is None else _tensor(dtype, rows, out_features, base_bytes)
        out = torch.empty(rows, out_features, dtype=x.dtype)
        parts = [
            slots.PART.unpack_from(self._view, self._geometry.part_offset(slot, site))
            for slot in range(self._geometry.slots)
        ]
        ranks, scales = [rank for rank, _, _ in parts], [scale for _, scale, _ in parts]
        a, b = (
            self._array(offsets[site], features)
            for offsets, features in zip(
                (self._geometry.a_offsets, self._geometry.b_offsets), self._features[site][:2], strict=True
            )
        )
        lora_forward(plan_rows(entries), x, [SiteSlots(a, b, ranks, scales)], [out], [base])
        return out.view(torch.uint8).numpy().tobytes() if rows else b""

    def _word(self, offset: int) -> int:
        (word,) = slots.WORD.unpack_from(self._view, offset)
        return int(word)

    def _array(self, offset: int, features: int) -> torch.Tensor:
        geometry = self._geometry
        dtype = DTYPES[geometry.dtype]
        flat = torch.frombuffer(self._memory, dtype=dtype, offset=geometry.weights_offset)
        stride = geometry.slot_bytes // dtype.itemsize
        return flat.as_strided(
            (geometry.slots, geometry.max_rank, features), (stride, features, 1), offset // dtype.itemsize
        )


def _tensor(dtype: str, rows: int, columns: int, data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(rows, columns, dtype=DTYPES[dtype])
    return torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]).reshape(rows, columns)
