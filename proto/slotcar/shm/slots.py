"""The slots file: the words that say what changes, then the weights of every slot. One file for each epoch.

The sidecar writes it; clients of the direct plane map it for reading. It never changes its size.

    offset          bytes    what
    0               8        b"SLOTCARS"
    8               4        VERSION, or GPU_VERSION where the weights are in a GPU's memory
    12              4        S, number of slots
    16              4        N, number of leaves
    20              4        R, largest rank
    24              4        element type of the slots: the index in DTYPES
    28              4        P, number of parts: one for each leaf, or for each of its experts
    32              16       epoch, as ASCII
    64              8        closed: 0 while the server serves
    72              8        generation of the newest layout
    80              16       GPU_VERSION: UUID of the GPU
    96              8        GPU_VERSION: bytes of its memory that the weights are in, some of them behind the weights
    128             8·S      mod_generation of each slot
    parts_offset    12·S·P   of each slot, of each leaf, of each of its experts: rank; scale as float32; flags
    weights_offset  S times slot_bytes; in each, for every leaf, row after row without gaps:
                             at a_offsets[leaf] A [E, R, in]; of an embedding transposed, [in, R]
                             at b_offsets[leaf] B transposed [E, R, out]
                             at v_offsets[leaf] vectors [2, out] in float32, gain and then bias; none for experts

With GPU_VERSION the file ends at weights_offset, and the weights are at the start of memory that has its own descriptor
in the hand-shake of the direct plane (CUDA's, for cuMemImportFromShareableHandle). All else is the same.

A leaf is one part of a site of the ModelSpec: the leaves are in the order of its sites, and those of one site in the
order of its parts, or it is the one leaf of a site without parts. It has all experts of the site, otherwise E is 1. The
slots have the whole adapter for all ranks; what a rank computes with is `shard` of it.

Only what a part's rank and flags say has a meaning. Rank 0: no A and no B here. Flag GAIN or BIAS: the vector is there.

    delta = scale · (x A[:rank]ᵀ) B[:rank] + gain ⊙ y_base + bias

Words of 8 bytes are written by one store, through a memoryview cast to "Q", and read by one load: half of a new
mod_generation beside half of an old one could pass for one that a reader may take.

Invariant (I2): mod_generation is set to the generation at which a slot begins to change, and only then do the slot's
parts and weights change. Who reads them compares mod_generation before and after.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

MAGIC = b"SLOTCARS"
VERSION = 2
GPU_VERSION = 3
DTYPES = ("float32", "float16", "bfloat16")
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
EPOCH_BYTES = 16

EPOCH_OFFSET = 32
CLOSED_OFFSET = 64
GENERATION_OFFSET = 72
UUID_OFFSET = 80
GPU_BYTES_OFFSET = 96
MODS_OFFSET = 128
UUID_BYTES = 16
WORD = struct.Struct("<Q")
PART = struct.Struct("<IfI")
GAIN, BIAS = 1, 2

_HEADER = struct.Struct("<8s6I16s")
_FIELDS = ("magic", "version", "slots", "leaves", "max_rank", "dtype", "parts", "epoch")
_ARRAY_ALIGNMENT = 128  # so that vector loads of each array start alike in each slot
_PAGE = 4096


class BadSlotsFile(Exception):
    """The bytes are not the header of a slots file that was expected; the message says what was found and wanted."""


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


class LeafShape(NamedTuple):
    """What one leaf has arrays for; `experts` is 0 where its site is none of experts."""

    in_features: int
    out_features: int
    experts: int = 0
    embedding: bool = False

    @property
    def parts(self) -> int:
        return self.experts or 1

    @property
    def vectors_bytes(self) -> int:
        return 0 if self.experts else 2 * 4 * self.out_features


def shard(features: int, rank: int, ranks: int, copies: int = 1) -> tuple[int, int]:
    """Where a rank's features begin and end, when `copies` neighbouring ranks have the same ones."""
    width = features * copies // ranks
    start = rank // copies * width
    return start, start + width


class GpuPlace(NamedTuple):
    """Which memory of which GPU the weights are in, as the header says."""

    uuid: bytes
    size_bytes: int

    def write(self, data: memoryview) -> None:
        data[UUID_OFFSET : UUID_OFFSET + UUID_BYTES] = self.uuid
        WORD.pack_into(data, GPU_BYTES_OFFSET, self.size_bytes)

    @classmethod
    def read(cls, data: memoryview, geometry: SlotsGeometry) -> GpuPlace:
        """Of a file that was checked. Raises BadSlotsFile for memory that has no room for the weights."""
        (size,) = WORD.unpack_from(data, GPU_BYTES_OFFSET)
        if size < geometry.weights_bytes:
            raise BadSlotsFile(f"the slots' memory has {size} bytes, wanted {geometry.weights_bytes}")
        return cls(bytes(data[UUID_OFFSET : UUID_OFFSET + UUID_BYTES]), size)


@dataclass(frozen=True)
class SlotsGeometry:
    """Where everything is. `leaves` are in the order of the ModelSpec's sites and of their parts.

    on_gpu: the weights are in memory of their own, from its start.
    """

    slots: int
    max_rank: int
    dtype: str
    leaves: Sequence[LeafShape]
    on_gpu: bool = False
    a_offsets: tuple[int, ...] = field(init=False)
    b_offsets: tuple[int, ...] = field(init=False)
    v_offsets: tuple[int, ...] = field(init=False)
    first_parts: tuple[int, ...] = field(init=False)
    parts: int = field(init=False)
    slot_bytes: int = field(init=False)
    parts_offset: int = field(init=False)
    weights_offset: int = field(init=False)
    weights_bytes: int = field(init=False)
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        row = self.max_rank * ITEM_BYTES[self.dtype]
        features = [leaf.parts * width for leaf in self.leaves for width in (leaf.in_features, leaf.out_features)]
        # The vectors behind all else: what has none there never touches their memory.
        sizes = [row * width for width in features] + [leaf.vectors_bytes for leaf in self.leaves]
        *offsets, end = accumulate((_aligned(size, _ARRAY_ALIGNMENT) for size in sizes), initial=0)
        *first_parts, parts = accumulate((leaf.parts for leaf in self.leaves), initial=0)
        parts_offset = _aligned(MODS_OFFSET + WORD.size * self.slots, _ARRAY_ALIGNMENT)
        weights_offset = _aligned(parts_offset + PART.size * self.slots * parts, _PAGE)
        slot_bytes = _aligned(end, _PAGE)
        for name, value in (
            ("a_offsets", tuple(offsets[: len(features) : 2])),
            ("b_offsets", tuple(offsets[1 : len(features) : 2])),
            ("v_offsets", tuple(offsets[len(features) :])),
            ("first_parts", tuple(first_parts)),
            ("parts", parts),
            ("slot_bytes", slot_bytes),
            ("parts_offset", parts_offset),
            ("weights_offset", weights_offset),
            ("weights_bytes", self.slots * slot_bytes),
            ("total_bytes", weights_offset + (0 if self.on_gpu else self.slots * slot_bytes)),
        ):
            object.__setattr__(self, name, value)

    def mod_offset(self, slot: int) -> int:
        return MODS_OFFSET + WORD.size * slot

    def slot_offset(self, slot: int) -> int:
        """In the file, whose weights these are."""
        return self.weights_offset + self.slot_bytes * slot

    def part_offset(self, slot: int, leaf: int, expert: int = 0) -> int:
        return self.parts_offset + PART.size * (slot * self.parts + self.first_parts[leaf] + expert)

    def header(self, epoch: str) -> bytes:
        """The first bytes of the file."""
        return _HEADER.pack(
            MAGIC,
            GPU_VERSION if self.on_gpu else VERSION,
            self.slots,
            len(self.leaves),
            self.max_rank,
            DTYPES.index(self.dtype),
            self.parts,
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
