"""How often an adapter is in its tier when it is asked for: `python -m tests.bench.hits [--quick|--smoke]`.

Each eviction policy chooses over traces of requests, for 8 and 32 slots and for a host tier that holds a twentieth and
a fifth of all bytes, where only LRU is built in; the peer is Belady's rule, which drops what is asked for the latest.
For slots it is the optimum; for bytes, where sizes differ, it is no bound but a good plan that knows the future.
Figures are misses per 1000 requests, over the seeds of a trace; `hit_ratio` and `belady` in the case are the shares of
requests that hit, and `reload_s` and `belady_reload_s` the seconds of reloads per 1000 requests.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from slotcar_sidecar.core.ids import Digest, SlotId
from slotcar_sidecar.core.policy import Eviction, Uses

from tests.bench.harness import Record
from tests.bench.sizes import Size, size_wanted
from tests.bench.trace import RECORDED, SYNTHETIC, Trace, read_trace, synthetic

SLOTS = (8, 32)
HOST_SHARES = (0.05, 0.2)


@dataclass(frozen=True)
class Result:
    """What became of a trace's requests, each of which hit or missed."""

    hits: Sequence[bool]
    reload_seconds: float

    @classmethod
    def of(cls, trace: Trace, hits: Sequence[bool]) -> Result:
        missed = (number for number, hit in zip(trace.requests, hits, strict=True) if not hit)
        return cls(hits, sum(trace.seconds[number] for number in missed))

    @property
    def hit_ratio(self) -> float:
        return sum(self.hits) / len(self.hits)

    def per_1000(self, amount: float) -> float:
        return 1000 * amount / len(self.hits)

    @property
    def misses(self) -> float:
        return self.per_1000(self.hits.count(False))


def digest_of(number: int) -> Digest:
    return Digest(f"sha256:{sha256(str(number).encode()).hexdigest()}")


def in_slots(trace: Trace, slots: int, eviction: Eviction) -> Result:
    """The policy that the server has, told what the server tells it."""
    uses = Uses(slots, eviction)
    digests = [digest_of(number) for number in range(len(trace.mib))]
    for digest, mib, seconds in zip(digests, trace.mib, trace.seconds, strict=True):
        uses.costs.was_read(digest, mib << 20, seconds)
    slot_of: dict[int, SlotId] = {}
    number_in: dict[SlotId, int] = {}
    every = [SlotId(index) for index in range(slots)]
    hits = []
    for number in trace.requests:
        slot = slot_of.get(number)
        hits.append(slot is not None)
        if slot is None:
            slot = every[len(number_in)] if len(number_in) < slots else uses.victim(every)
            assert slot is not None
            slot_of.pop(number_in.get(slot, -1), None)
            slot_of[number], number_in[slot] = slot, number
            uses.enter(slot, digests[number])
        uses.ask((slot,))
    return Result.of(trace, hits)


def in_bytes(trace: Trace, capacity_mib: int) -> Result:
    """Least recently used by bytes, as the host tier does."""
    there: dict[int, None] = {}
    used, hits = 0, []
    for number in trace.requests:
        hits.append(number in there)
        if number in there:
            del there[number]
        else:
            while used + trace.mib[number] > capacity_mib:
                oldest = next(iter(there))
                del there[oldest]
                used -= trace.mib[oldest]
            used += trace.mib[number]
        there[number] = None
    return Result.of(trace, hits)


def belady(trace: Trace, capacity: int, sizes: Sequence[int]) -> Result:
    """Drops what is asked for the latest; each request must be let in."""
    later = _next_requests(trace.requests)
    next_of: dict[int, float] = {}
    heap: list[tuple[float, int]] = []
    used, hits = 0, []
    for at, number in enumerate(trace.requests):
        hits.append(number in next_of)
        if number not in next_of:
            while used + sizes[number] > capacity:
                when, latest = heapq.heappop(heap)
                if next_of.get(latest) == -when:
                    del next_of[latest]
                    used -= sizes[latest]
            used += sizes[number]
        next_of[number] = later[at]
        heapq.heappush(heap, (-later[at], number))
    return Result.of(trace, hits)


def _next_requests(requests: Sequence[int]) -> list[float]:
    """For each request, when its adapter is asked for again."""
    found: dict[int, int] = {}
    later = [math.inf] * len(requests)
    for at in range(len(requests) - 1, -1, -1):
        later[at] = found.get(requests[at], math.inf)
        found[requests[at]] = at
    return later


def traces(size: Size) -> Iterator[tuple[str, list[Trace]]]:
    """Each kind, with some seeds of it."""
    adapters, length, seeds = size.pick((50, 500, 1), (1000, 10_000, 1), (1000, 40_000, 5))
    for name in SYNTHETIC:
        yield name, [synthetic(name, seed, adapters, length) for seed in range(seeds)]
    yield "recorded", [read_trace(RECORDED)]


def _record(case: dict[str, object], policy: str, results: Sequence[tuple[Result, Result]]) -> None:
    ours, best = ([pair[side] for pair in results] for side in (0, 1))
    shares = {"hit_ratio": ours, "belady": best}
    case |= {name: round(statistics.median(r.hit_ratio for r in side), 4) for name, side in shares.items()}
    seconds = {"reload_s": ours, "belady_reload_s": best}
    case |= {
        name: round(statistics.median(r.per_1000(r.reload_seconds) for r in side), 1) for name, side in seconds.items()
    }
    Record.counted(
        "hits", case, (policy, [r.misses for r in ours]), ("belady", [r.misses for r in best]), "misses per 1000"
    ).printed()


def main() -> None:
    size = size_wanted(__doc__)
    for name, kind in traces(size):
        about = {"trace": name, "requests": len(kind[0].requests), "adapters": len(kind[0].mib)}
        for slots in SLOTS:
            bests = [belady(trace, slots, [1] * len(trace.mib)) for trace in kind]
            for eviction in Eviction:
                mine = [in_slots(trace, slots, eviction) for trace in kind]
                case = {**about, "tier": "device", "room": f"{slots} slots", "eviction": str(eviction)}
                _record(case, str(eviction), list(zip(mine, bests, strict=True)))
        for share in HOST_SHARES:
            rooms = [max(*trace.mib, int(share * sum(trace.mib))) for trace in kind]
            pairs = [(in_bytes(t, room), belady(t, room, t.mib)) for t, room in zip(kind, rooms, strict=True)]
            case = {**about, "tier": "host", "room": f"{share:.0%} of the bytes", "eviction": "lru"}
            _record(case, "lru", pairs)


if __name__ == "__main__":
    main()
