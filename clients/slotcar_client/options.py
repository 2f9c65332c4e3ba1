"""How a session is opened and what it does when something happens: one frozen value, checked at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

from slotcar.shm.region import MAX_ARENA_BYTES
from slotcar.v1 import model_pb2

from slotcar_client.errors import RequestInvalid, SlotcarError
from slotcar_client.values import Mapping

Away = Literal["fail", "wait"]
IN_BAND = ("auto", "stream", "unary")
TRANSPORTS = (*IN_BAND, "ring", "direct")
OnStale = Callable[[Mapping, SlotcarError], None]
MAX_GRACE_SECONDS = 3600.0
MAX_RANKS = 1024
MIN_ARENA_BYTES = 4096


class RankSettings(TypedDict, total=False):
    """The keyword arguments of `Client.join`."""

    transport: str
    arena_bytes: int
    away: Away
    away_seconds: float
    on_stale: OnStale | None


class SessionSettings(RankSettings, total=False):
    """The keyword arguments of `Client.session`."""

    model_spec: model_pb2.ModelSpec | None
    grace_seconds: float
    reserved_slots: int
    ranks: int


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """`SessionSettings` with their defaults. With `join`, the id of another's session, it is a rank of that one."""

    name: str = "python"
    model_spec: model_pb2.ModelSpec | None = None
    grace_seconds: float = 30.0
    transport: str = "auto"
    arena_bytes: int = 64 << 20
    reserved_slots: int = 0
    ranks: int = 1
    away: Away = "fail"
    away_seconds: float = 60.0
    on_stale: OnStale | None = None
    join: str = ""
    rank: int = 0

    def __post_init__(self) -> None:
        within("grace_seconds", self.grace_seconds, 0, MAX_GRACE_SECONDS)
        within("reserved_slots", self.reserved_slots, 0, (1 << 32) - 1)
        within("ranks", self.ranks, 1, MAX_RANKS)
        within("rank", self.rank, 0, MAX_RANKS - 1)
        within("away_seconds", self.away_seconds, 0, float("inf"))
        within("arena_bytes", self.arena_bytes, MIN_ARENA_BYTES, MAX_ARENA_BYTES)
        one_of("away", self.away, get_args(Away))
        one_of("transport", self.transport, TRANSPORTS)

    @property
    def owner(self) -> bool:
        """The session is this side's own, so that it may be opened again and closed."""
        return not self.join


def within(field: str, found: float, lowest: float, highest: float) -> None:
    """Raises RequestInvalid unless `found` lies between the two; a NaN does not."""
    if not lowest <= found <= highest:
        wanted = f"{lowest:g} to {highest:g}"
        raise RequestInvalid(f"{field} is {found}, wanted {wanted}", field=field, found=found, wanted=wanted)


def one_of(field: str, found: str, wanted: Sequence[str]) -> None:
    """Raises RequestInvalid unless `found` is one of the words."""
    if found not in wanted:
        words = " or ".join(wanted)
        raise RequestInvalid(f"{field} is {found!r}, wanted {words}", field=field, found=found, wanted=words)


def checked_timeout(timeout_seconds: float) -> float:
    """The deadline of each call. Raises RequestInvalid unless it is above 0."""
    if not timeout_seconds > 0:
        raise RequestInvalid(
            f"timeout_seconds is {timeout_seconds}", field="timeout_seconds", found=timeout_seconds, wanted="above 0"
        )
    return timeout_seconds
