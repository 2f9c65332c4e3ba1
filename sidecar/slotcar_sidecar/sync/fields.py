"""The fields of files that people write for slotcar: strict, so that what is misspelt is refused, not passed over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slotcar_sidecar.core.errors import RequestInvalid
from slotcar_sidecar.sync.text import Plain, TextError, Twice, parse

API_VERSION = "slotcar.dev/v1"
_FILE = "the file"


def document(content: str, file: str, known: Sequence[str]) -> Mapping[str, Plain]:
    """The fields at the top of the file called `file`, one of which is the apiVersion. Raises RequestInvalid."""
    try:
        top = parse(content, file)
    except TextError as error:
        raise RequestInvalid(_FILE, found=str(error), wanted="YAML without aliases, tags or surprises") from error
    fields = as_mapping("" if isinstance(top, Twice) else _FILE, top, known)
    version = as_text("apiVersion", fields.get("apiVersion", ""))
    if version != API_VERSION:
        raise RequestInvalid("apiVersion", found=version, wanted=API_VERSION)
    return fields


def as_mapping(place: str, value: Plain, known: Sequence[str]) -> Mapping[str, Plain]:
    """The mapping, in which no key is unknown or twice. Raises RequestInvalid, naming the key and its line."""
    if not isinstance(value, Twice):
        raise RequestInvalid(place, found=kind(value), wanted=f"a mapping with {', '.join(known)}")
    inside = f"{place}." if place else ""
    for key in value.twice:
        found = f"two values, the first in line {value.lines[key]}"
        raise RequestInvalid(f"{inside}{key}", found=found, wanted="one")
    for key in value:
        if key not in known:
            found = f"a key without meaning in line {value.lines[key]}"
            raise RequestInvalid(f"{inside}{key}", found=found, wanted=f"one of {', '.join(known)}")
    return value


def as_text(field: str, value: Plain) -> str:
    """Raises RequestInvalid for what is no text."""
    if not isinstance(value, str):
        raise RequestInvalid(field, found=kind(value), wanted="a text")
    return value


def kind(value: Plain | None) -> str:
    """What an error says was found."""
    if value is None:
        return "nothing"
    return "a text" if isinstance(value, str) else "a list" if isinstance(value, list) else "a mapping"
