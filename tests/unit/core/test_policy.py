"""Who gives way, under each policy: a function of the uses alone."""

from __future__ import annotations

import hashlib
import random

import pytest
from slotcar_sidecar.core.ids import Digest, SlotId
from slotcar_sidecar.core.policy import Eviction, ReloadCosts, Uses

S0, S1, S2 = SLOTS = tuple(map(SlotId, range(3)))


def digest(text: object) -> Digest:
    return Digest("sha256:" + hashlib.sha256(str(text).encode()).hexdigest())


def uses(eviction: Eviction, slots: int = 3) -> Uses:
    """All slots have an adapter, each with its number, in order."""
    made = Uses(slots, eviction)
    for index in range(slots):
        made.enter(SlotId(index), digest(index))
    return made


@pytest.mark.parametrize("eviction", Eviction)
def test_nobody_gives_way_without_candidates(eviction: Eviction) -> None:
    assert uses(eviction).victim(()) is None


@pytest.mark.parametrize("eviction", Eviction)
def test_only_candidates_give_way_and_equals_in_the_order_of_their_use(eviction: Eviction) -> None:
    made = uses(eviction)
    assert made.victim(SLOTS) == S0
    assert made.victim((S2, S1)) == S1
    made.touch((S0, S1, S2))
    assert made.victim((S2, S1)) == S1, "of those used at one moment, the lowest index"


@pytest.mark.parametrize("eviction", Eviction)
def test_a_slot_that_nobody_ever_used_gives_way_first(eviction: Eviction) -> None:
    made = Uses(3, eviction)
    made.enter(S0, digest(0))
    assert made.victim(SLOTS) == S1


@pytest.mark.parametrize("eviction", Eviction)
def test_the_same_uses_choose_the_same_slots(eviction: Eviction) -> None:
    def victims() -> list[SlotId | None]:
        made, chosen, found = uses(eviction), random.Random(3), []
        for number in range(500):
            made.ask(chosen.sample(SLOTS, 2))
            victim = made.victim(SLOTS)
            assert victim is not None
            found.append(victim)
            made.costs.was_read(digest(number % 7), 1 << chosen.randrange(20), chosen.random())
            made.enter(victim, digest(number % 7))
        return found

    assert victims() == victims()


def test_lru_a_forward_counts_as_a_use() -> None:
    made = uses(Eviction.LRU)
    made.touch((S0,))
    assert made.victim(SLOTS) == S1
    assert made.idle(SLOTS, made.now - 1) == [S1, S2]


def test_lfu_what_is_asked_for_often_stays_however_long_ago_it_was_used() -> None:
    made = uses(Eviction.LFU)
    for _ in range(5):
        made.ask((S0,))
    made.ask((S1,))
    made.ask((S2,))
    assert made.victim(SLOTS) == S1


def test_lfu_forwards_are_no_requests() -> None:
    """How many Forwards the owner hears of depends on the plane."""
    made = uses(Eviction.LFU)
    for _ in range(100):
        made.touch((S0,))
    made.ask((S1,))
    made.ask((S2,))
    assert made.victim(SLOTS) == S0


def test_lfu_old_requests_count_less() -> None:
    made = uses(Eviction.LFU)
    for _ in range(20):
        made.ask((S0,))
    for _ in range(300):
        made.ask((S1,))
    for _ in range(3):
        made.ask((S2,))
    assert made.victim(SLOTS) == S0


def test_lfu_an_adapter_that_comes_back_has_its_requests() -> None:
    made = uses(Eviction.LFU)
    for _ in range(5):
        made.ask((S0,))
        made.ask((S1,))
    made.enter(S0, digest("once"))
    assert made.victim(SLOTS) == S2, "whoever is new is worth a request of now"
    made.enter(S2, digest(0))
    assert made.victim(SLOTS) == S0


def test_what_left_is_forgotten_in_time() -> None:
    made = uses(Eviction.LFU)
    for number in range(1000):
        made.enter(S0, digest(("passing", number)))
    assert len(made._left) <= 4 * 3


def test_cost_what_is_dear_to_reload_stays() -> None:
    made = uses(Eviction.COST)
    for number, seconds in enumerate((0.01, 10.0, 0.5)):
        made.costs.was_read(digest(number), 1 << 20, seconds)
    assert made.victim(SLOTS) == S0
    for _ in range(1000):
        made.ask((S0,))
    assert made.victim(SLOTS) == S2, "unless it is asked for much less often"


def test_costs_are_positive_and_bounded() -> None:
    costs = ReloadCosts()
    assert costs.of(digest("never read")) > 0
    costs.was_read(digest("empty"), 0, 0.0)
    assert costs.of(digest("empty")) > 0
    costs.was_read(digest("uploaded"), 1 << 30, 0.0)
    assert costs.of(digest("uploaded")) == pytest.approx(1 << 30)
    for number in range(20_000):
        costs.was_read(digest(number), 1, 1.0)
    assert len(costs._costs) < 20_000


def test_weights_stay_finite_over_a_long_life() -> None:
    made = uses(Eviction.LFU)
    made._requests = 10**12
    made.ask((S0,))
    made.ask((S1,))
    assert made.victim(SLOTS) == S2
    assert made.victim((S0, S1)) == S0
