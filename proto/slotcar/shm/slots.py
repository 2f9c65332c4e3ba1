"""The slots file: the words that say what changes, then the weights of every slot. One file for each epoch.

The sidecar writes it; clients of the direct plane map it for reading. It never changes its size.

    offset          bytes    what
    0               8        b"SLOTCARS"
    8               4        VERSION
    12              4        S, number of slots
    16              4        N, number of sites
    20              4        R, largest rank
    24              4        element type of the slots: the index in DTYPES
    28              4        0
    32              16       epoch, as ASCII
    64              8        closed: 0 while the server serves
    72              8        generation of the newest layout
    128             8·S      mod_generation of each slot
    parts_offset    8·S·N    of each slot, of each site: rank, then scale as float32; rank 0: no weights
    weights_offset  S times slot_bytes; in each, for every site at a_offsets[site] A [R, in], and at b_offsets[site]
                             B transposed [R, out], both row after row without gaps

Words of 8 bytes are written by one store, through a memoryview cast to "Q", and read by one load: half of a new
mod_generation beside half of an old one could pass for one that a reader may take.

Invariant (I2): mod_generation is set to the generation at which a slot begins to change, and only then do the slot's
parts and weights change. Who reads them compares mod_generation before and after.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

MAGIC = b"SLOTCARS"
VERSION = 1
DTYPES = ("float32", "float16", "bfloat16")
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
EPOCH_BYTES = 16

EPOCH_OFFSET = 32
CLOSED_OFFSET = 64
GENERATION_OFFSET = 72
MODS_OFFSET = 128
WORD = struct.Struct("<Q")
PART = struct.Struct("<If")

_HEADER = struct.Struct("<8s6I16s")
_FIELDS = ("magic", "version", "slots", "sites", "max_rank", "dtype", "reserved", "epoch")
_ARRAY_ALIGNMENT = 128  # so that vector loads of each array start alike in each slot
_PAGE = 4096


class BadSlotsFile(Exception):
    """The bytes are not the header of a slots file that was expected; the message says what was found and wanted."""


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


@dataclass(frozen=True)
class SlotsGeometry:
    """Where everything is. `sites` has (in_features, out_features) of each, in the order of the ModelSpec."""

    slots: int
    max_rank: int
    dtype: str
    sites: Sequence[tuple[int, int]]
    a_offsets: tuple[int, ...] = field(init=False)
    b_offsets: tuple[int, ...] = field(init=False)
    slot_bytes: int = field(init=False)
    parts_offset: int = field(init=False)
    weights_offset: int = field(init=False)
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        a_offsets, b_offsets, end, row = [], [], 0, self.max_rank * ITEM_BYTES[self.dtype]
        for in_features, out_features in self.sites:
            for offsets, features in ((a_offsets, in_features), (b_offsets, out_features)):
                offsets.append(end)
                end = _aligned(end + row * features, _ARRAY_ALIGNMENT)
        parts_offset = _aligned(MODS_OFFSET + WORD.size * self.slots, _ARRAY_ALIGNMENT)
        weights_offset = _aligned(parts_offset + PART.size * self.slots * len(self.sites), _PAGE)
        slot_bytes = _aligned(end, _PAGE)
        for name, value in (
            ("a_offsets", tuple(a_offsets)),
            ("b_offsets", tuple(b_offsets)),
            ("slot_bytes", slot_bytes),
            ("parts_offset", parts_offset),
            ("weights_offset", weights_offset),
            ("total_bytes", weights_offset + self.slots * slot_bytes),
        ):
            object.__setattr__(self, name, value)

    def mod_offset(self, slot: int) -> int:
        return MODS_OFFSET + WORD.size * slot

    def slot_offset(self, slot: int) -> int:
        return self.weights_offset + self.slot_bytes * slot

    def part_offset(self, slot: int, site: int) -> int:
        return self.parts_offset + PART.size * (slot * len(self.sites) + site)

    def header(self, epoch: str) -> bytes:
        """The first bytes of the file."""
        return _HEADER.pack(
            MAGIC,
            VERSION,
            self.slots,
            len(self.sites),
            self.max_rank,
            DTYPES.index(self.dtype),
            0,
            epoch.encode("ascii"),
        )

    def check(self, data: memoryview, epoch: str) -> None:
        """Raises BadSlotsFile unless `data` is a slots file of this geometry and epoch."""
        size = len(data)
        if size >= _HEADER.size:
            headers = _HEADER.unpack_from(data), _HEADER.unpack(self.header(epoch))
            for name, found, wanted in zip(_FIELDS, *headers, strict=True):
                if found != wanted:
                    raise BadSlotsFile(f"the slots file has {name} {found!r}, wanted {wanted!r}")
        if size != self.total_bytes:
            raise BadSlotsFile(f"the slots file has {size} bytes, wanted {self.total_bytes}")
