"""What a request names: the adapters and the sessions, found by the names of its fields, so that none is left out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from slotcar_sidecar.core.ports import Limits

ADAPTER_FIELDS = frozenset({"ref", "refs"})
SESSION_FIELDS = frozenset({"session", "resume_session"})
OTHER_FIELDS = frozenset(
    {
        *("client_name", "client_version", "source", "page_token"),
        *("name", "site", "adapter_prefix", "model_prefix", "fingerprint"),
    }
)
"""Texts of requests that name neither; a test finds a text that is in none of the three."""

# An operator ends others' sessions, by the short ids that lists show.
_BY_SHORT_ID = frozenset({"slotcar.v1.EndSessionRequest"})

Path = tuple[str, ...]


def adapters_of(request: Message, limits: Limits) -> Iterator[str]:
    """Each ref, as it was written. Raises CapacityExceeded before it reads more entries than there may be."""
    for path in _paths(request.DESCRIPTOR, ADAPTER_FIELDS):
        for text in _texts(request, path, limits):
            if text:
                yield text


def sessions_of(request: Message) -> Iterator[str]:
    """Each session's id."""
    if request.DESCRIPTOR.full_name in _BY_SHORT_ID:
        return
    for path in _paths(request.DESCRIPTOR, SESSION_FIELDS):
        yield from (text for text in _texts(request, path, None) if text)


@cache
def _paths(message: Descriptor, names: frozenset[str]) -> tuple[Path, ...]:
    """The ways to the text fields of these names, also inside of other messages."""
    paths: list[Path] = []
    for field in message.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            paths += [(field.name, *path) for path in _paths(field.message_type, names)]
        elif field.type == FieldDescriptor.TYPE_STRING and field.name in names:
            paths.append((field.name,))
    return tuple(paths)


def _texts(message: Any, path: Path, limits: Limits | None) -> Iterator[str]:
    name, *rest = path
    value = getattr(message, name)
    if isinstance(value, str):
        yield value
    elif isinstance(value, Message):
        if message.HasField(name):
            yield from _texts(value, tuple(rest), limits)
    else:
        if limits is not None:
            limits.check_entries(name, len(value))
        for each in value:
            yield from (each,) if not rest else _texts(each, tuple(rest), limits)
