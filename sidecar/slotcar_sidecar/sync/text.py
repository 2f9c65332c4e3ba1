"""From the text of a file to plain values, in the part of YAML that cannot surprise: every scalar is text.

A name such as `on`, `1e5` or `0123` stays what was written. Aliases, tags and deep nesting are refused, so that neither
the time nor the memory that a text takes is more than in proportion to its size.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import yaml
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

Plain = str | Sequence["Plain"] | Mapping[str, "Plain"]

_MAX_DEPTH = 5
_IMPLIED_TAGS = frozenset(
    {BaseResolver.DEFAULT_SCALAR_TAG, BaseResolver.DEFAULT_SEQUENCE_TAG, BaseResolver.DEFAULT_MAPPING_TAG}
)


class TextError(Exception):
    """The text is not what can be read; the message says where and why."""


class Twice(dict[str, Plain]):
    """A mapping in which some keys are twice: `twice` names them. `lines` says where each key is first."""

    def __init__(self) -> None:
        super().__init__()
        self.twice: list[str] = []
        self.lines: dict[str, int] = {}


class _Named(io.StringIO):
    """A text with the name that errors have for it."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name


class _Loader(Reader, Scanner, Parser, Composer, BaseResolver):
    """Composes nodes, and knows no types but text."""

    def __init__(self, text: str, name: str) -> None:
        Reader.__init__(self, _Named(text, name))
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise TextError(f"line {_line(event)} has an alias: write it out")
        if self._depth == _MAX_DEPTH:
            raise TextError(f"line {_line(event)} is nested more than {_MAX_DEPTH} deep")
        self._depth += 1
        try:
            return super().compose_node(parent, index)  # type: ignore[arg-type]
        finally:
            self._depth -= 1


def parse(text: str, name: str) -> Plain:
    """The one document in the text of the file called `name`. Raises TextError."""
    try:
        node = _Loader(text, name).get_single_node()
    except yaml.YAMLError as error:
        raise TextError(" ".join(str(error).split())) from error
    if node is None:
        raise TextError("it is empty")
    return _plain(node)


def _plain(node: yaml.Node) -> Plain:
    if node.tag not in _IMPLIED_TAGS:
        raise TextError(f"line {_line(node)} has the tag {node.tag}: write it without")
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    if not isinstance(node, yaml.MappingNode):
        return str(node.value)
    values = Twice()
    for key_node, value_node in node.value:
        key = _plain(key_node)
        if not isinstance(key, str):
            raise TextError(f"line {_line(key_node)} has a key that is no text")
        if key in values:
            values.twice.append(key)
        values.lines.setdefault(key, _line(key_node))
        values[key] = _plain(value_node)
    return values


def _line(place: yaml.Node | yaml.Event) -> int:
    mark = place.start_mark
    return mark.line + 1 if mark is not None else 0
