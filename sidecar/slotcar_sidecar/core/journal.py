"""What a restart brings back: each name with its digest, source and keep, those in slots first, the latest used first.

line 1   {"slotcar_journal": 1, "sha256": …, "names": …}: of all that follows, and how many lines it has
line 2…  one name each, as JSON
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slotcar_sidecar.core.errors import SlotcarError
from slotcar_sidecar.core.ids import AdapterName, AdapterRef, Digest

VERSION = 1
_KIND = "slotcar_journal"
# What is raised for JSON that is none, or that has another shape.
_UNEXPECTED = (ValueError, TypeError, LookupError, RecursionError, AttributeError)


class JournalDamaged(Exception):
    """Why a file is no journal of this version."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One name. `source` is "" for what was uploaded, `history` has the digests of before, the latest first."""

    ref: AdapterRef
    source: str
    keep: bool
    in_slot: bool
    history: tuple[Digest, ...] = ()

    @property
    def digest(self) -> Digest:
        assert self.ref.digest is not None
        return self.ref.digest


@dataclass(frozen=True, slots=True)
class NamesCopy:
    """The table of names at one moment, cheap to take, to be written elsewhere."""

    digests: Mapping[AdapterName, Digest]
    sources: Mapping[AdapterName, str]
    kept: Collection[AdapterName]
    history: Mapping[AdapterName, tuple[Digest, ...]]

    def entries(self, in_slots: Collection[Digest]) -> list[JournalEntry]:
        """One per name; `in_slots` are the digests that are resident, the latest used first."""
        order = {digest: place for place, digest in enumerate(in_slots)}
        names = sorted(self.digests, key=lambda name: order.get(self.digests[name], len(order)))
        return [
            JournalEntry(
                AdapterRef(name, self.digests[name]),
                self.sources[name],
                name in self.kept,
                self.digests[name] in order,
                self.history.get(name, ()),
            )
            for name in names
        ]


def encode(entries: Iterable[JournalEntry]) -> bytes:
    """The journal's file."""
    lines = [json.dumps(_plain(entry), ensure_ascii=True, separators=(",", ":")) for entry in entries]
    body = "".join(f"{line}\n" for line in lines).encode()
    head = {_KIND: VERSION, "sha256": hashlib.sha256(body).hexdigest(), "names": len(lines)}
    return json.dumps(head).encode() + b"\n" + body


def decode(data: bytes) -> tuple[JournalEntry, ...]:
    """The entries of a journal's file, in order. Raises JournalDamaged."""
    head, _, body = data.partition(b"\n")
    try:
        said = json.loads(head)
        version, sha256 = said[_KIND], said["sha256"]
    except _UNEXPECTED as error:
        raise JournalDamaged("its first line is not that of a journal") from error
    if version != VERSION:
        raise JournalDamaged(f"it is of version {str(version)[:20]}, wanted {VERSION}")
    if sha256 != hashlib.sha256(body).hexdigest():
        raise JournalDamaged("its bytes are not those that were written")
    entries = tuple(_entry(number, line) for number, line in enumerate(body.splitlines(), 2))
    if len({entry.ref.name for entry in entries}) != len(entries):
        raise JournalDamaged("it has a name twice")
    return entries


def _plain(entry: JournalEntry) -> dict[str, Any]:
    return {
        "name": str(entry.ref.name),
        "digest": str(entry.digest),
        "source": entry.source,
        "keep": entry.keep,
        "in_slot": entry.in_slot,
        "history": [str(digest) for digest in entry.history],
    }


def _entry(number: int, line: bytes) -> JournalEntry:
    try:
        fields = json.loads(line)
        ref = AdapterRef(AdapterName(fields["name"]), Digest(fields["digest"]))
        source, keep, in_slot = fields["source"], fields["keep"], fields["in_slot"]
        history = tuple(Digest(text) for text in fields["history"])
    except SlotcarError as error:
        raise JournalDamaged(f"line {number}: {error.message}") from error
    except _UNEXPECTED as error:
        raise JournalDamaged(f"line {number} does not have what a name has") from error
    if not (isinstance(source, str) and isinstance(keep, bool) and isinstance(in_slot, bool)):
        raise JournalDamaged(f"line {number} has a field of another type")
    return JournalEntry(ref, source, keep, in_slot, history)
