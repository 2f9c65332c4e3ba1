"""What the plain values of a file declare. What is wrong in an entry is that entry's matter; the others stand.

apiVersion: slotcar.dev/v1
prune: false
default: {state: present, tier: host}
adapters:
  - {name: sql, source: /srv/adapters/sql, digest: "sha256:…", state: keep}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

from slotcar_sidecar.core.desired import Cause, DesiredSet, Malformed, Want, Wanted
from slotcar_sidecar.core.errors import RequestInvalid, SlotcarError
from slotcar_sidecar.core.ids import AdapterName, Digest
from slotcar_sidecar.sync.fields import as_mapping, as_text, document, kind
from slotcar_sidecar.sync.text import Plain, Twice

T = TypeVar("T")

MAX_ENTRIES = 10_000
_TOP_KEYS = ("apiVersion", "prune", "default", "adapters")
_DEFAULT_KEYS = ("state", "tier")
_ENTRY_KEYS = ("name", "source", "digest", "state", "tier")
_FLAGS = {"true": True, "false": False}
_STATES = {state.value: state for state in Wanted}
_TIERS = {"device": "device", "host": "host", "disk": "disk"}


def declared(content: str, file: str) -> DesiredSet:
    """Raises RequestInvalid for a file that declares nothing, as a whole; `wants` of sound entries otherwise.

    `file` is what the file with this content is called.
    """
    fields = document(content, file, _TOP_KEYS)
    prune = _one_of("prune", fields.get("prune", "false"), _FLAGS)
    default = as_mapping("default", fields.get("default", Twice()), _DEFAULT_KEYS)
    _one_of("default.state", default.get("state", Wanted.PRESENT), _STATES)
    _one_of("default.tier", default.get("tier", "host"), _TIERS)
    entries = fields.get("adapters")
    if not isinstance(entries, list):
        raise RequestInvalid("adapters", found=kind(entries), wanted="a list; [] for none")
    if len(entries) > MAX_ENTRIES:
        raise RequestInvalid("adapters", found=f"{len(entries)} of them", wanted=f"at most {MAX_ENTRIES}")
    return _set(entries, default, prune=prune)


def _set(entries: Sequence[Plain], default: Mapping[str, Plain], *, prune: bool) -> DesiredSet:
    names = Counter(_name_of(entry) for entry in entries)
    wants: list[Want] = []
    malformed: list[Malformed] = []
    for index, entry in enumerate(entries):
        place, name = f"adapters[{index}]", _name_of(entry)
        try:
            if name and names[name] > 1:
                raise RequestInvalid("name", found=f"{name} in {names[name]} entries", wanted="one entry for a name")
            wants.append(_want(entry, default))
        except SlotcarError as error:
            field = f"{place}.{error.field}" if error.field else place
            malformed.append(Malformed(place, name, Cause.of(error.at(field))))
    return DesiredSet(tuple(wants), tuple(malformed), prune)


def _want(entry: Plain, default: Mapping[str, Plain]) -> Want:
    """Raises RequestInvalid, naming the field."""
    fields = as_mapping("", entry, _ENTRY_KEYS)
    name = AdapterName(as_text("name", fields.get("name", "")))
    state = _one_of("state", fields.get("state") or default.get("state", Wanted.PRESENT), _STATES)
    source = as_text("source", fields.get("source", ""))
    digest = as_text("digest", fields.get("digest", ""))
    tier = _one_of("tier", fields.get("tier") or default.get("tier", "host"), _TIERS)
    pinned = Digest(digest) if digest else None
    if state is Wanted.ABSENT:
        return Want(name, state)
    if not source:
        raise RequestInvalid("source", found="nothing", wanted=f"where to load what is to be {state}")
    if state is Wanted.KEEP and fields.get("tier") and tier != "device":
        raise RequestInvalid("tier", found=tier, wanted="device for what is kept")
    in_slot = tier == "device" or state is Wanted.KEEP
    return Want(name, state, source, pinned, in_slot, on_disk=tier == "disk" and not in_slot)


def _name_of(entry: Plain) -> str:
    """The entry's name if it is one, empty otherwise."""
    name = entry.get("name") if isinstance(entry, Twice) and "name" not in entry.twice else None
    try:
        return str(AdapterName(name)) if isinstance(name, str) else ""
    except RequestInvalid:
        return ""


def _one_of(field: str, value: Plain, table: Mapping[str, T]) -> T:
    chosen = as_text(field, value)
    if chosen not in table:
        raise RequestInvalid(field, found=chosen, wanted=" or ".join(table))
    return table[chosen]
