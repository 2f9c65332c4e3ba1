"""What a client process did, as records in append-only files, which survive kill -9 up to the last whole record.

A record is a head (sizes and a checksum), facts as JSON and, for a Forward, the outputs' bytes. A process writes one
file after the other; whoever reads them deletes those that it is done with, so that the disk stays bounded.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_HEAD = struct.Struct("<III")
_FILE_BYTES = 4 << 20
_FILE_SECONDS = 5.0
_MOST_FILES = 32
_PATIENCE_SECONDS = 90.0


class Record(NamedTuple):
    """`kind` is "map", "forward", "step" or "fault"."""

    kind: str
    facts: dict[str, Any]
    payload: bytes = b""

    def packed(self) -> bytes:
        facts = json.dumps([self.kind, self.facts], separators=(",", ":")).encode()
        return _HEAD.pack(len(facts), len(self.payload), zlib.crc32(self.payload, zlib.crc32(facts))) + (
            facts + self.payload
        )


def unpacked(data: bytes) -> tuple[list[Record], int]:
    """The whole records at the start of `data`, and how many bytes are left over after them."""
    records = []
    at = 0
    while at + _HEAD.size <= len(data):
        facts_bytes, payload_bytes, checksum = _HEAD.unpack_from(data, at)
        start = at + _HEAD.size
        end = start + facts_bytes + payload_bytes
        if end > len(data) or zlib.crc32(data[start:end]) != checksum:
            break
        kind, facts = json.loads(data[start : start + facts_bytes])
        records.append(Record(kind, facts, data[start + facts_bytes : end]))
        at = end
    return records, len(data) - at


class Backlogged(Exception):
    """Nobody reads the records."""


class Journal:
    """Writes the records of one process into `folder`. Safe for threads; a record is one write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._number = 0
        self._file = -1
        self._bytes = 0
        self._opened_at = 0.0

    def append(self, kind: str, facts: dict[str, Any], payload: bytes = b"") -> None:
        """Raises Backlogged when too many files lie unread for too long."""
        with self._lock:
            now = time.monotonic()
            data = Record(kind, {"t": round(now, 4)} | facts, payload).packed()
            if self._file < 0 or self._bytes > _FILE_BYTES or now - self._opened_at > _FILE_SECONDS:
                self._next_file(now)
            os.write(self._file, data)
            self._bytes += len(data)

    def _next_file(self, now: float) -> None:
        deadline = now + _PATIENCE_SECONDS
        while len(files(self._folder)) >= _MOST_FILES:
            if time.monotonic() > deadline:
                raise Backlogged
            time.sleep(0.1)
        if self._file >= 0:
            os.close(self._file)
        self._number += 1
        path = self._folder / f"{self._number:06}.rec"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._bytes, self._opened_at = 0, now


def files(folder: Path) -> list[Path]:
    """The files of one process, the oldest first."""
    return sorted(folder.glob("*.rec"))


def save(path: Path, records: Iterable[Record]) -> None:
    path.write_bytes(b"".join(record.packed() for record in records))


def load(path: Path) -> Iterator[Record]:
    records, left = unpacked(path.read_bytes())
    assert not left, f"{path} ends with {left} bytes that are no record"
    yield from records
