"""One adapter as one file of the disk tier: its layout, and how every kind of damage is seen.

    0   magic: "slotcar" and the version of the format, 8 bytes
    8   length of the header, u64, little-endian
    16  sha256 of the header, 32 bytes
    48  header: JSON with the adapter (spec and origin), the table of tensors and the sha256 of the derived ones
    …   the tensors in the table's order, each at a multiple of 64 bytes

The adapter's own digest covers its spec and the tensors that it was loaded with; what is derived from them has a sha256
of its own, and the header, where the origin is, a third.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from slotcar_sidecar.core.adapter import Adapter, SiteLora
from slotcar_sidecar.core.errors import SlotcarError
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.store.memory import private_memory, read_into
from slotcar_sidecar.store.weights import HostWeights, SiteVectors, digest_of

MAGIC = b"slotcar\x01"
MAX_HEADER_BYTES = 64 << 20
_PRELUDE = struct.Struct("<8sQ32s")
_ALIGNMENT = 64
_CHUNK_BYTES = 1 << 20
_EXTRA = "extra "
_DTYPES = {str(kind).removeprefix("torch."): kind for kind in (torch.float32, torch.float16, torch.bfloat16)}


class Damaged(Exception):
    """Why a file of the disk tier is not the entry that it should be."""


class Piece(NamedTuple):
    """Bytes of an entry, and where they are in its file."""

    start: int
    data: memoryview


class Stored(NamedTuple):
    """One tensor of an entry: what it is for its site, and whether the adapter's digest covers it."""

    role: str
    site: str
    tensor: torch.Tensor
    derived: bool = False


def stored_tensors(weights: HostWeights) -> Iterator[Stored]:
    """Every tensor of an adapter, in an order of its own."""
    for site in weights.sites():
        name = site.part.site
        yield Stored("a", name, site.a)
        yield Stored("b", name, site.b)
        for extra, tensor in site.extras.items():
            yield Stored(f"{_EXTRA}{extra}", name, tensor)
        if site.vectors is not None:
            for kind, vector in site.vectors._asdict().items():
                if vector is not None:
                    yield Stored(kind, name, vector, derived=True)


def _restored(adapter: Adapter, tensors: Sequence[Stored]) -> HostWeights:
    """The adapter that `stored_tensors` took apart. Raises KeyError."""
    by_site: dict[str, dict[str, torch.Tensor]] = {part.site: {} for part in adapter.parts}
    for stored in tensors:
        by_site[stored.site][stored.role] = stored.tensor
    extras, vectors = {}, {}
    for site, table in by_site.items():
        found = {role.removeprefix(_EXTRA): table[role] for role in table if role.startswith(_EXTRA)}
        if found:
            extras[site] = MappingProxyType(found)
        if not table.keys().isdisjoint(SiteVectors._fields):
            vectors[site] = SiteVectors(*map(table.get, SiteVectors._fields))
    return HostWeights(
        adapter,
        a=MappingProxyType({site: table["a"] for site, table in by_site.items()}),
        b=MappingProxyType({site: table["b"] for site, table in by_site.items()}),
        extras=MappingProxyType(extras),
        vectors=MappingProxyType(vectors),
    )


# Writing


def entry_bytes(pieces: Sequence[Piece]) -> int:
    """Size of the file that has the pieces."""
    last = pieces[-1]
    return last.start + len(last.data)


def pieces_of(weights: HostWeights, written_at: float) -> tuple[Piece, ...]:
    """The entry as pieces in order, the tensors where they are in memory; `written_at` in Unix seconds."""
    tensors = tuple(stored_tensors(weights))
    table: list[list[Any]] = []
    start = 0
    for stored in tensors:
        shape, size = list(stored.tensor.shape), stored.tensor.nbytes
        dtype = str(stored.tensor.dtype).removeprefix("torch.")
        table.append([stored.role, stored.site, dtype, shape, start, stored.derived])
        start = _aligned(start + size)
    header = json.dumps(
        {
            "adapter": _plain(weights.adapter),
            "derived_sha256": _sha_of_derived(tensors),
            "tensors": table,
            "written_at": written_at,
        },
        ensure_ascii=True,
        separators=(",", ":"),
    ).encode()
    prelude = _PRELUDE.pack(MAGIC, len(header), hashlib.sha256(header).digest())
    body = _aligned(len(prelude) + len(header))
    memories = [_memory(stored.tensor) for stored in tensors]
    starts = [body + row[4] for row in table]
    return Piece(0, memoryview(prelude + header)), *map(Piece, starts, memories)


def _plain(adapter: Adapter) -> dict[str, Any]:
    return dataclasses.asdict(adapter) | {
        "digest": str(adapter.digest),
        "parts": [dataclasses.asdict(part) for part in adapter.parts],
    }


def write_pieces(descriptor: int, pieces: Sequence[Piece]) -> None:
    """Writes an entry into an empty file, and waits until the disk has it. Raises OSError."""
    for start, data in _chunks(pieces):
        done = 0
        while done < len(data):
            done += os.pwrite(descriptor, data[done:], start + done)
    os.fsync(descriptor)


def holds_pieces(descriptor: int, pieces: Sequence[Piece]) -> bool:
    """Whether a file has these bytes and no more, read back. Raises OSError."""
    if os.fstat(descriptor).st_size != entry_bytes(pieces):
        return False
    return all(os.pread(descriptor, len(data), start) == bytes(data) for start, data in _chunks(pieces))


def _chunks(pieces: Sequence[Piece]) -> Iterator[Piece]:
    for start, data in pieces:
        for offset in range(0, len(data), _CHUNK_BYTES):
            yield Piece(start + offset, data[offset : offset + _CHUNK_BYTES])


# Reading


class _Row(NamedTuple):
    """What the table says of one tensor; `start` counts from the first one."""

    role: str
    site: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    derived: bool


class _Header(NamedTuple):
    adapter: Adapter
    table: list[_Row]
    derived_sha256: str
    body: int


def read_adapter(descriptor: int, wanted: Digest) -> Adapter:
    """What an entry says of its adapter, without reading the tensors. Raises Damaged or OSError."""
    return _read_header(descriptor, wanted).adapter


def read_entry(descriptor: int, wanted: Digest, *, verify: bool) -> HostWeights:
    """The adapter in private memory; `verify`: only if its bytes are those of the digest. Raises Damaged or OSError."""
    header = _read_header(descriptor, wanted)
    size = os.fstat(descriptor).st_size - header.body
    if size < 0:
        raise Damaged("it is cut short")
    memory = private_memory(size)
    _read_at(descriptor, memory, header.body)
    tensors = [_tensor(memory, row) for row in header.table]
    try:
        weights = _restored(header.adapter, tensors)
    except KeyError as error:
        raise Damaged("its tensors are not those of its sites") from error
    if verify and _sha_of_derived(tensors) != header.derived_sha256:
        raise Damaged("what was derived from its weights has changed")
    if verify and (found := digest_of(weights.sites())) != wanted:
        raise Damaged(f"its weights have digest {found}")
    return weights


def _read_header(descriptor: int, wanted: Digest) -> _Header:
    prelude = memoryview(bytearray(_PRELUDE.size))
    _read_at(descriptor, prelude, 0)
    magic, length, sha = _PRELUDE.unpack(prelude)
    if magic != MAGIC:
        raise Damaged("it begins as no entry of this version does")
    if not 0 < length <= min(MAX_HEADER_BYTES, os.fstat(descriptor).st_size):
        raise Damaged(f"its header would have {length} bytes")
    text = memoryview(bytearray(length))
    _read_at(descriptor, text, _PRELUDE.size)
    if hashlib.sha256(text).digest() != sha:
        raise Damaged("its header has changed")
    try:
        header = _parse(bytes(text), _aligned(_PRELUDE.size + length))
    except (ValueError, TypeError, LookupError, RecursionError, SlotcarError) as error:
        raise Damaged(f"its header is none: {type(error).__name__}") from error
    if header.adapter.digest != wanted:
        raise Damaged(f"it is the entry of {header.adapter.digest}")
    return header


def _parse(text: bytes, body: int) -> _Header:
    fields = json.loads(text)
    plain = fields["adapter"]
    adapter = Adapter(
        **plain
        | {
            "digest": Digest(plain["digest"]),
            "parts": tuple(SiteLora(**part) for part in plain["parts"]),
            "fields_ignored": tuple(plain["fields_ignored"]),
            "warnings": tuple(plain["warnings"]),
        }
    )
    table = [
        _Row(role, site, _DTYPES[dtype], tuple(shape), start, derived)
        for role, site, dtype, shape, start, derived in fields["tensors"]
    ]
    return _Header(adapter, table, fields["derived_sha256"], body)


def _read_at(descriptor: int, memory: memoryview, start: int) -> None:
    if read_into(descriptor, memory, start) < len(memory):
        raise Damaged("it is cut short")


def _tensor(memory: memoryview, row: _Row) -> Stored:
    count = math.prod(row.shape)
    if not 0 <= row.start <= row.start + count * row.dtype.itemsize <= len(memory):
        raise Damaged("it is cut short")
    values = torch.empty(0, dtype=row.dtype)
    if count:
        values = torch.frombuffer(memory, dtype=row.dtype, count=count, offset=row.start)
    return Stored(row.role, row.site, values.reshape(row.shape), row.derived)


# What both share


def _sha_of_derived(tensors: Sequence[Stored]) -> str:
    sha = hashlib.sha256()
    for stored in tensors:
        if stored.derived:
            sha.update(_memory(stored.tensor))
    return sha.hexdigest()


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, where they are."""
    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return data


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
