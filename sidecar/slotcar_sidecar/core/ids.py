"""The identities of slotcar as types, so that one can never be taken for another."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NewType

from slotcar_sidecar.core.errors import RequestInvalid

SlotId = NewType("SlotId", int)

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")


@dataclass(frozen=True, slots=True, order=True)
class Digest:
    """The identity of an adapter: sha256 over its canonical spec and weight bytes."""

    value: str
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not _DIGEST.fullmatch(self.value):
            raise RequestInvalid("digest", found=self.value, wanted="sha256: and 64 lower-case hex digits")
        object.__setattr__(self, "_hash", hash(self.value))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return self.value

    @property
    def short(self) -> str:
        """The prefix that logs and tables show."""
        return self.value[:19]


@dataclass(frozen=True, slots=True, order=True)
class AdapterName:
    """An operator's name for an adapter."""

    value: str
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = self.value.split("/")
        if not _NAME.fullmatch(self.value) or any(part in ("", ".", "..") for part in parts):
            raise RequestInvalid(
                "name",
                found=self.value,
                wanted="1 to 200 letters, digits, '.', '_', '-' or '/', a letter or digit first, no empty or '..' part",
            )
        object.__setattr__(self, "_hash", hash(self.value))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """`name` or `name@digest`, as a caller wrote it."""

    name: AdapterName
    digest: Digest | None = None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.name, self.digest)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def parse(cls, text: str, field: str = "ref") -> AdapterRef:
        """Raises RequestInvalid for `field`."""
        name, at, digest = text.partition("@")
        try:
            return cls(AdapterName(name), Digest(digest) if at else None)
        except RequestInvalid as error:
            raise error.at(field) from None

    def __str__(self) -> str:
        return f"{self.name}@{self.digest}" if self.digest else str(self.name)


@dataclass(frozen=True, slots=True)
class Epoch:
    """Random id of one life of the server process."""

    value: str

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class SessionId:
    """Secret id of one engine's presence."""

    value: str

    @property
    def short(self) -> str:
        """What others may see of it: logs, events."""
        return self.value[:8]

    def __str__(self) -> str:
        return self.value
