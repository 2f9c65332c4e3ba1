"""Which adapter gives way to a new one, by how each was used, in logical time.

Time is the number of uses so far, never a clock's: the same uses always choose the same slot.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from slotcar_sidecar.core.ids import Digest, SlotId

_HALF_LIFE = 16
"""A request counts half after so many later ones, for each slot."""
_REMEMBERED = 4
"""Adapters that left their slots and whose requests still count, for each slot."""
_MOST_COSTS = 1 << 14
_READ_BYTES_PER_SECOND = 1 << 30
"""How fast an adapter is read that came with a call."""
_LEAST_COST = 1e-9


class Eviction(StrEnum):
    """Who gives way: the one whose last use is the longest ago; the one that mappings asked for the least often, where
    old requests count less; or the one whose frequency × bytes × seconds of a reload is the least."""

    LRU = "lru"
    LFU = "lfu"
    COST = "cost"


@dataclass(frozen=True, slots=True)
class Use:
    """How an adapter was used.

    `last` is the moment of its last use. `weight` is log₂ of Σ 2^(age of the table at a request, in half-lives), whose
    order is that of frequencies with ageing, and which no later request of others changes. `cost` is that of a reload.
    """

    last: int
    weight: float
    cost: float


_RANKS: Mapping[Eviction, Callable[[Use], float]] = {
    Eviction.LRU: lambda use: use.last,
    Eviction.LFU: lambda use: use.weight,
    Eviction.COST: lambda use: use.weight + math.log2(use.cost),
}


class ReloadCosts:
    """What a reload of an adapter costs, bytes × seconds, by how long it took to read the last time.

    Bounded: an adapter whose reading is forgotten costs as little as any.
    """

    def __init__(self) -> None:
        self._costs: OrderedDict[Digest, float] = OrderedDict()

    def was_read(self, digest: Digest, size_bytes: int, seconds: float) -> None:
        """The bytes were read and verified in `seconds`; 0 for what came with a call."""
        self._costs[digest] = max(_LEAST_COST, size_bytes * (seconds or size_bytes / _READ_BYTES_PER_SECOND))
        self._costs.move_to_end(digest)
        if len(self._costs) > _MOST_COSTS:
            self._costs.popitem(last=False)

    def of(self, digest: Digest) -> float:
        """More than 0."""
        return self._costs.get(digest, _LEAST_COST)


class Uses:
    """How the adapters in slots were used, and some of those that left; bounded by the number of slots."""

    def __init__(self, slots: int, eviction: Eviction = Eviction.LRU) -> None:
        self.costs = ReloadCosts()
        self.now = 0
        self._rank = _RANKS[eviction]
        self._requests = 0
        self._half_life = _HALF_LIFE * slots
        self._digests: dict[SlotId, Digest] = {}
        self._last: dict[SlotId, int] = {}
        self._weights: dict[SlotId, float] = {}
        self._most_left = _REMEMBERED * slots
        self._left: OrderedDict[Digest, float] = OrderedDict()

    def enter(self, slot: SlotId, digest: Digest) -> None:
        """The slot has the digest from now on; what it had before has left."""
        before = self._digests.get(slot)
        if before is not None:
            self._left[before] = self._weights[slot]
            self._left.move_to_end(before)
        known = self._left.pop(digest, -math.inf)
        if len(self._left) > self._most_left:
            self._left.popitem(last=False)
        self._digests[slot] = digest
        # Nobody asked for it yet, but whoever loads it means to: it is worth a request of now.
        self._weights[slot] = max(known, self._age)
        self.touch((slot,))

    def touch(self, slots: Iterable[SlotId]) -> None:
        """The slots are used now."""
        self.now += 1
        for slot in slots:
            self._last[slot] = self.now

    def ask(self, slots: Iterable[SlotId]) -> None:
        """A mapping asks for the slots: they are used now, and each was requested once more.

        Forwards only touch: how often one is told differs from plane to plane.
        """
        slots = tuple(slots)
        self.touch(slots)
        self._requests += len(slots)
        age = self._age
        for slot in slots:
            self._weights[slot] = _sum(self._weights.get(slot, -math.inf), age)

    def latest_first(self, slots: Iterable[SlotId]) -> list[SlotId]:
        """The slots in order of their last use."""
        return sorted(slots, key=lambda slot: (-self._last.get(slot, 0), slot))

    def last(self, slot: SlotId) -> int:
        """The moment of the slot's last use, 0 for none."""
        return self._last.get(slot, 0)

    def idle(self, candidates: Iterable[SlotId], since: int) -> list[SlotId]:
        """The candidates that were not used after the moment `since`."""
        return [slot for slot in candidates if self._last.get(slot, 0) <= since]

    def victim(self, candidates: Iterable[SlotId]) -> SlotId | None:
        """Who gives way; among equals the one used the longest ago, then the lowest index. None without candidates."""
        return min(candidates, key=self._key, default=None)

    @property
    def _age(self) -> float:
        return self._requests / self._half_life

    def _key(self, slot: SlotId) -> tuple[float, int, SlotId]:
        use = self._use(slot)
        return self._rank(use), use.last, slot

    def _use(self, slot: SlotId) -> Use:
        digest = self._digests.get(slot)
        cost = self.costs.of(digest) if digest is not None else _LEAST_COST
        return Use(self._last.get(slot, 0), self._weights.get(slot, -math.inf), cost)


def _sum(weight: float, age: float) -> float:
    """log₂(2^weight + 2^age) for an age that is finite."""
    high, low = max(weight, age), min(weight, age)
    return high + math.log2(1 + 2 ** (low - high))
