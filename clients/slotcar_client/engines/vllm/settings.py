"""What the surroundings of a vLLM engine say about slotcar: one frozen value, checked at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from slotcar_client.config import default_target, variables
from slotcar_client.errors import RequestInvalid
from slotcar_client.options import TRANSPORTS, one_of, within

OnLoss = Literal["wait", "fail"]

_MAX_WAIT_SECONDS = 3600.0
_MAX_SLOTS = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Settings:
    """`target`: where the sidecar is. `plane`: how tensors travel, a `transport` of `Client.session`.

    `wait_seconds`: how long the engine waits for a sidecar that is absent, at its start and in a step, and for a slot
    that others have. `on_loss`: whether a step waits for it at all, or fails the requests that have an adapter at once.
    `reserved_slots`: slots that are the engine's own.
    """

    target: str
    plane: str = "auto"
    wait_seconds: float = 60.0
    on_loss: OnLoss = "wait"
    reserved_slots: int = 0

    def __post_init__(self) -> None:
        one_of("SLOTCAR_PLANE", self.plane, TRANSPORTS)
        one_of("SLOTCAR_ON_LOSS", self.on_loss, get_args(OnLoss))
        within("SLOTCAR_WAIT_SECONDS", self.wait_seconds, 0, _MAX_WAIT_SECONDS)
        within("SLOTCAR_RESERVED_SLOTS", self.reserved_slots, 0, _MAX_SLOTS)

    @property
    def step_wait_seconds(self) -> float:
        """How long a step waits for a sidecar that is away."""
        return self.wait_seconds if self.on_loss == "wait" else 0.0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """SLOTCAR_TARGET and one variable for each setting. Raises RequestInvalid, naming the variable."""
        environ = variables() if environ is None else environ
        found: dict[str, Any] = {
            name: read(f"SLOTCAR_{name.upper()}", text)
            for name, read in _READ.items()
            if (text := environ.get(f"SLOTCAR_{name.upper()}"))
        }
        return cls(default_target(environ), **found)


def _text(_name: str, text: str) -> str:
    return text


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise RequestInvalid(
            f"{name} is {text!r}, wanted a number", field=name, found=text, wanted="a number"
        ) from error


def _count(name: str, text: str) -> int:
    if not text.isdecimal():
        raise RequestInvalid(f"{name} is {text!r}, wanted a count", field=name, found=text, wanted="a count")
    return int(text)


_READ: dict[str, Callable[[str, str], Any]] = {
    "plane": _text,
    "wait_seconds": _number,
    "on_loss": _text,
    "reserved_slots": _count,
}
