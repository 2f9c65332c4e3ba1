"""The region of one client: cells for its calls, and an arena for their tensors. One file for each connection.

    offset              bytes   who writes  what
    0                   8       sidecar     b"SLOTCARR"
    8                   4       sidecar     VERSION
    12                  4       sidecar     C, number of cells
    16                  4       sidecar     P, bytes of a payload; request and answer of each cell have one
    20                  4       sidecar     U, number of uses
    24                  8       sidecar     arena_offset
    32                  8       sidecar     arena_bytes
    40                  16      sidecar     epoch, as ASCII
    64                  8       sidecar     closed: 0 while the connection lives
    128                 8       client      submitted: how many calls it submitted so far
    192                 4·C     client      call number n is in the cell whose index is here at place n mod C
    uses_offset         32·U    client      of a mapping that it computes with by itself: its generation, and how many
                                            calls and rows it has had so far; then 0
    cells_offset        C times a request header, an answer header, a request's payload, an answer's payload
    arena_offset        arena_bytes         tensors: x, base and aux by the client, out by the sidecar

A request header is 64 bytes: sequence, kind, bytes of the payload. An answer header is 64 bytes: sequence, status,
bytes of the payload, generation of the layout, fingerprint of the digests used, nanoseconds in the queue and in the
kernels. The client chooses the sequence, never 0 and never twice the same in one connection; the cell is the sidecar's
from then on until the answer has it. The answer's sequence is written last.

The payload of a Forward; its tensors are in the arena, row after row without gaps, and of one dtype but for indices:

    offset      bytes   what
    0           8       mapping_id
    8           8       generation
    16          4       dtype of the tensors: the index in slots.DTYPES
    20          4       E, number of row counts: one for each entry of the mapping
    24          4       I, number of items
    28          4       0
    32          4·E     row counts; their sum is the rows of every tensor
    32 + 4·E    40·I    items

    of an item  bytes   what
    0           4       the site's index in the ModelSpec
    4           4       what its aux is: 0 nothing, 1 indices, int32 [rows], 2 the base model's output [rows, out]
    8           8       offset in the arena of x [rows, in], or ABSENT, for an embedding
    16          8       of the base to add to [rows, out], or ABSENT for the delta alone
    24          8       of the result [rows, out]
    32          8       of aux, or ABSENT when it is nothing

A call: fill request and arena, write the cell's index, then `submitted`, then ring the sidecar's doorbell. The sidecar
takes nothing that it reads here for granted, and reads each request once. Answers come in any order; each rings the
client's doorbell.

A word that the other side may read meanwhile is written by one store of its 8 bytes: through a memoryview cast to "Q",
not by struct, which writes zeros first. So `submitted` is never 0 again, and says nothing when it is.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

MAGIC = b"SLOTCARR"
VERSION = 2
CELLS = 32
PAYLOAD_BYTES = 64 << 10
USES = 128
MAX_ARENA_BYTES = 1 << 32
ALIGNMENT = 64  # of tensors in the arena

CLOSED_OFFSET = 64
SUBMITTED_OFFSET = 128
SUBMISSIONS_OFFSET = 192

WORD = struct.Struct("<Q")
INDEX = struct.Struct("<I")
USE = struct.Struct("<4Q")
REQUEST = struct.Struct("<QII")
ANSWER = struct.Struct("<II4Q")  # behind the sequence
HEADER_BYTES = 64

_HEADER = struct.Struct("<8s4I2Q16s")
_PAGE = 4096


class Kind(IntEnum):
    """What a request asks for: a Forward as laid out below, or the request message of the RPC of that name."""

    FORWARD = 1
    SET_MAPPING = 2
    RELEASE_MAPPING = 3
    FENCE = 4


class Status(IntEnum):
    """What an answer's payload is: the response message of the RPC (nothing for a Forward), or an Error message."""

    OK = 0
    ERROR = 1


class BadRegion(Exception):
    """The bytes do not mean what they should; the message says what was found and wanted."""


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


@dataclass(frozen=True)
class RegionGeometry:
    """Where everything is."""

    arena_bytes: int
    cells: int = CELLS
    payload_bytes: int = PAYLOAD_BYTES
    uses: int = USES
    uses_offset: int = field(init=False)
    cells_offset: int = field(init=False)
    arena_offset: int = field(init=False)
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        uses_offset = _aligned(SUBMISSIONS_OFFSET + INDEX.size * self.cells, ALIGNMENT)
        cells_offset = _aligned(uses_offset + USE.size * self.uses, ALIGNMENT)
        arena_offset = _aligned(cells_offset + self.cells * self.cell_bytes, _PAGE)
        for name, value in (
            ("uses_offset", uses_offset),
            ("cells_offset", cells_offset),
            ("arena_offset", arena_offset),
            ("total_bytes", arena_offset + _aligned(self.arena_bytes, _PAGE)),
        ):
            object.__setattr__(self, name, value)

    @property
    def cell_bytes(self) -> int:
        return 2 * HEADER_BYTES + 2 * self.payload_bytes

    def submission_offset(self, number: int) -> int:
        """Where the cell of call `number` is named."""
        return SUBMISSIONS_OFFSET + INDEX.size * (number % self.cells)

    def use_offset(self, use: int) -> int:
        return self.uses_offset + USE.size * use

    def request_offset(self, cell: int) -> int:
        """Of the request's header."""
        return self.cells_offset + cell * self.cell_bytes

    def answer_offset(self, cell: int) -> int:
        """Of the answer's header."""
        return self.request_offset(cell) + HEADER_BYTES

    def request_payload_offset(self, cell: int) -> int:
        return self.request_offset(cell) + 2 * HEADER_BYTES

    def answer_payload_offset(self, cell: int) -> int:
        return self.request_payload_offset(cell) + self.payload_bytes

    def header(self, epoch: str) -> bytes:
        """The first bytes of the file."""
        return _HEADER.pack(
            MAGIC,
            VERSION,
            self.cells,
            self.payload_bytes,
            self.uses,
            self.arena_offset,
            self.arena_bytes,
            epoch.encode("ascii"),
        )

    @classmethod
    def read(cls, data: memoryview) -> tuple[RegionGeometry, str]:
        """The geometry and the epoch of a region. Raises BadRegion."""
        if len(data) < _HEADER.size:
            raise BadRegion(f"the region has {len(data)} bytes, wanted at least {_HEADER.size}")
        magic, version, cells, payload, uses, arena_offset, arena_bytes, epoch = _HEADER.unpack_from(data)
        if (magic, version) != (MAGIC, VERSION):
            raise BadRegion(f"the region begins with {magic!r} version {version}, wanted {MAGIC!r} version {VERSION}")
        if not cells or payload % ALIGNMENT:
            raise BadRegion(
                f"the region has {cells} cells of {payload} bytes, wanted some, of a multiple of {ALIGNMENT}"
            )
        geometry = cls(arena_bytes, cells, payload, uses)
        if (arena_offset, len(data)) != (geometry.arena_offset, geometry.total_bytes):
            raise BadRegion(
                f"the region has {len(data)} bytes and its arena at {arena_offset}, wanted {geometry.total_bytes} and "
                f"{geometry.arena_offset}"
            )
        return geometry, epoch.decode("ascii", "replace")


class Aux(IntEnum):
    """What the aux of an item is: ids of tokens or numbers of experts, or the base model's output."""

    NONE = 0
    INDICES = 1
    OUTPUT = 2


ABSENT = (1 << 64) - 1


class Item(NamedTuple):
    """One site of a Forward, with the offsets of its tensors. Items with equal x_offset share their input."""

    site: int
    x_offset: int
    base_offset: int
    out_offset: int
    aux: int = Aux.NONE
    aux_offset: int = ABSENT

    def at(self, start: int) -> Item:
        """The same in a block that begins at `start`."""
        x, base, out, aux = (
            offset if offset == ABSENT else offset + start
            for offset in (self.x_offset, self.base_offset, self.out_offset, self.aux_offset)
        )
        return Item(self.site, x, base, out, self.aux, aux)

    def pack(self) -> bytes:
        return _ITEM.pack(self.site, self.aux, self.x_offset, self.base_offset, self.out_offset, self.aux_offset)

    @classmethod
    def unpack_all(cls, data: bytes) -> list[Item]:
        return [cls(site, x, base, out, aux, at) for site, aux, x, base, out, at in _ITEM.iter_unpack(data)]


_FORWARD = struct.Struct("<2Q3I4x")
_ITEM = struct.Struct("<2I4Q")


class Forward(NamedTuple):
    """The payload of a FORWARD; `row_counts` has one count per entry of the mapping."""

    mapping_id: int
    generation: int
    dtype: int
    row_counts: Sequence[int]
    items: Sequence[Item]

    def pack(self) -> bytes:
        counts = self.row_counts
        head = _FORWARD.pack(self.mapping_id, self.generation, self.dtype, len(counts), len(self.items))
        return b"".join((head, struct.pack(f"<{len(counts)}I", *counts), *(item.pack() for item in self.items)))

    @classmethod
    def unpack(cls, payload: bytes) -> Forward:
        """Raises BadRegion unless the payload has exactly what its counts say."""
        if len(payload) < _FORWARD.size:
            raise BadRegion(f"a Forward of {len(payload)} bytes, wanted at least {_FORWARD.size}")
        mapping_id, generation, dtype, counts, items = _FORWARD.unpack_from(payload)
        items_at = _FORWARD.size + INDEX.size * counts
        wanted = items_at + _ITEM.size * items
        if len(payload) != wanted:
            raise BadRegion(f"a Forward of {len(payload)} bytes, wanted {wanted} for {counts} counts, {items} items")
        row_counts = struct.unpack_from(f"<{counts}I", payload, _FORWARD.size)
        return cls(mapping_id, generation, dtype, row_counts, Item.unpack_all(payload[items_at:]))


def fingerprint(digests: Iterable[str]) -> int:
    """64 bits that stand for the digests of a mapping's entries, in order; empty for the base model."""
    return int.from_bytes(hashlib.sha256("\n".join(digests).encode()).digest()[:8], "little")
