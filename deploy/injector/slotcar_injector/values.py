"""The forms that values of annotations have: each function reads one, exactly, or raises Unfit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

Parse = Callable[[str], Any]

_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | _BINARY
_MEMORY = re.compile(r"(\d{1,15}(?:\.\d{1,3})?)(|[kMGT]|[KMGT]i)", re.ASCII)
_CPU = re.compile(r"\d{1,6}m|\d{1,4}(\.\d{1,3})?", re.ASCII)
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,252}", re.ASCII)
# No $, which Kubernetes would expand in arguments.
_PATH = re.compile(r"(/[A-Za-z0-9_@+=-][A-Za-z0-9._@+=-]*)+", re.ASCII)
_SUBPATH = re.compile(r"(/[A-Za-z0-9_@+=-][A-Za-z0-9._@+=-]*)*", re.ASCII)
_SOURCE = re.compile(r"[a-z][a-z0-9+.-]{0,30}://[A-Za-z0-9._/*@=+-]{1,500}", re.ASCII)
_IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._/:@-]{0,510}", re.ASCII)


class Unfit(Exception):
    """The text is not of the form that is wanted."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity as Kubernetes writes it, and what it is: bytes, or thousandths of a CPU."""

    text: str
    amount: int


@dataclass(frozen=True, slots=True)
class Named:
    """Something by its name, and a part of it."""

    name: str
    part: str


@dataclass(frozen=True, slots=True)
class Mount:
    """A volume of the pod, or a folder in it, at a path of the sidecar."""

    volume: str
    folder: str
    path: str


def number(least: int, most: int) -> Parse:
    """A whole number between two others."""

    def parse(text: str) -> int:
        if re.fullmatch(r"\d{1,9}", text, re.ASCII) is None or not least <= int(text) <= most:
            raise Unfit
        return int(text)

    return parse


def choice(*choices: str) -> Parse:
    """One of these words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise Unfit
        return text

    return parse


def several(parse_one: Parse) -> Parse:
    """Values with commas between them, none twice."""

    def parse(text: str) -> tuple[Any, ...]:
        values = tuple(parse_one(part.strip()) for part in text.split(","))
        if len(set(values)) != len(values):
            raise Unfit
        return values

    return parse


def memory(text: str) -> Quantity:
    """A whole number of bytes above 0."""
    match = _MEMORY.fullmatch(text)
    amount = Decimal(match[1]) * _UNITS[match[2]] if match else Decimal(0)
    if amount <= 0 or amount != int(amount):
        raise Unfit
    return Quantity(text, int(amount))


def cpu(text: str) -> Quantity:
    """An amount of CPU above 0, at least in thousandths."""
    if _CPU.fullmatch(text) is None:
        raise Unfit
    amount = int(text[:-1]) if text.endswith("m") else int(Decimal(text) * 1000)
    if amount <= 0:
        raise Unfit
    return Quantity(text, amount)


def container_name(text: str) -> str:
    """A DNS label."""
    return _matched(_LABEL, text)


def image(text: str) -> str:
    """A reference of an image."""
    return _matched(_IMAGE, text)


def source(text: str) -> str:
    """A remote place, as `slotcar serve --source` has it."""
    return _matched(_SOURCE, text)


def object_key(default: str) -> Parse:
    """NAME or NAME/KEY of a ConfigMap or Secret."""

    def parse(text: str) -> Named:
        name, slash, key = text.partition("/")
        if not slash:
            key = default
        return Named(_matched(_SUBDOMAIN, name), _matched(_KEY, key))

    return parse


def claim(text: str) -> Named:
    """CLAIM or CLAIM/REQUEST of the pod's resourceClaims."""
    name, slash, request = text.partition("/")
    return Named(_matched(_LABEL, name), _matched(_LABEL, request) if slash else "")


def mount(text: str) -> Mount:
    """VOLUME:/path or VOLUME/folder:/path."""
    place, _, path = text.partition(":")
    volume, slash, folder = place.partition("/")
    folder = _matched(_SUBPATH, slash + folder).removeprefix("/")
    return Mount(_matched(_LABEL, volume), folder, _matched(_PATH, path))


def size_flag(amount: int) -> str:
    """The number of bytes as `slotcar serve` reads it, as short as can be: 8589934592 → 8GiB."""
    fitting = [(name, unit) for name, unit in _BINARY.items() if amount % unit == 0]
    name, unit = fitting[-1] if fitting else ("", 1)
    return f"{amount // unit}{name and name + 'B'}"


def memory_text(amount: int) -> str:
    """The number of bytes as Kubernetes writes it: 16777216 → 16Mi."""
    return size_flag(amount).removesuffix("B")


def _matched(pattern: re.Pattern[str], text: str) -> str:
    if pattern.fullmatch(text) is None:
        raise Unfit
    return text
