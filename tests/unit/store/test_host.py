"""The host tier holds what fits, lets go of what was used the longest ago, and keeps count."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcar_sidecar.core.adapter import Adapter, SiteLora
from slotcar_sidecar.core.errors import CapacityExceeded
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.store.host import HostTierLru


@dataclass(frozen=True)
class Weights:
    adapter: Adapter


def weights(number: int, size: int = 10) -> Weights:
    return Weights(Adapter(digest(number), (SiteLora("q", 1, 1.0, 1, 1),), size, "F32", "test"))


def digest(number: int) -> Digest:
    return Digest(f"sha256:{number:064x}")


def test_what_was_put_is_there() -> None:
    tier = HostTierLru(30)
    one = weights(1)
    assert tier.put(one) == ()
    assert tier.get(digest(1)) is one
    assert digest(1) in tier
    assert digest(2) not in tier
    assert tier.get(digest(2)) is None
    assert (tier.used_bytes, tier.capacity_bytes) == (10, 30)


def test_the_least_recently_used_give_way() -> None:
    tier = HostTierLru(30)
    for number in (1, 2, 3):
        tier.put(weights(number))
    tier.get(digest(1))
    assert tier.put(weights(4, size=20)) == (digest(2), digest(3))
    assert tier.used_bytes == 30
    assert [digest(number) in tier for number in (1, 2, 3, 4)] == [True, False, False, True]


def test_a_repeat_counts_as_a_use_and_costs_nothing() -> None:
    tier = HostTierLru(20)
    tier.put(weights(1))
    tier.put(weights(2))
    assert tier.put(weights(1)) == ()
    assert tier.used_bytes == 20
    assert tier.put(weights(3)) == (digest(2),)


def test_what_can_never_fit_drops_nothing() -> None:
    tier = HostTierLru(20)
    tier.put(weights(1))
    with pytest.raises(CapacityExceeded) as caught:
        tier.put(weights(2, size=21))
    assert caught.value.facts["found"] == "21"
    assert digest(1) in tier
    assert tier.used_bytes == 10


def test_what_is_held_stays_and_the_next_oldest_give_way() -> None:
    tier = HostTierLru(40)
    for number in (1, 2, 3, 4):
        tier.put(weights(number))
    assert tier.put(weights(5), held=[digest(1), digest(3)]) == (digest(2),)
    assert tier.put(weights(6, size=20), held={digest(1), digest(3)}) == (digest(4), digest(5))
    assert tier.used_bytes == 40
    # To be held is no use: once nobody holds them, they are still the oldest.
    assert tier.put(weights(7)) == (digest(1),)
    assert tier.put(weights(8)) == (digest(3),)


def test_no_more_is_dropped_than_is_needed() -> None:
    tier = HostTierLru(40)
    for number, size in ((1, 10), (2, 20), (3, 10)):
        tier.put(weights(number, size))
    assert tier.put(weights(4, size=20), held=[digest(1)]) == (digest(2),)
    assert [digest(number) in tier for number in (1, 2, 3, 4)] == [True, False, True, True]


def test_what_cannot_fit_beside_what_is_held_drops_nothing() -> None:
    tier = HostTierLru(30)
    for number in (1, 2, 3):
        tier.put(weights(number))
    held = (digest(3), digest(1), digest(1), digest(9))
    for call in (tier.put, tier.check):
        with pytest.raises(CapacityExceeded, match="30, of which 20 may not be dropped") as caught:
            call(weights(4, size=11), held)
        assert caught.value.facts == {"tier": "HOST", "found": "11", "wanted": "at most 10", "held": "20"}
    assert tier.used_bytes == 30
    tier.check(weights(4), held)
    assert tier.put(weights(4), held) == (digest(2),)


def test_what_is_larger_than_the_tier_can_never_fit_whatever_is_held() -> None:
    tier = HostTierLru(20)
    tier.put(weights(1))
    with pytest.raises(CapacityExceeded) as caught:
        tier.put(weights(2, size=21), held=[digest(1)])
    assert caught.value.facts["found"] == "21"
    tier.put(weights(2, size=20))
    assert digest(1) not in tier


def test_what_is_there_always_fits() -> None:
    tier = HostTierLru(20)
    tier.put(weights(1))
    tier.put(weights(2))
    everything = [digest(1), digest(2)]
    tier.check(weights(1), everything)
    assert tier.put(weights(1), everything) == ()
    assert tier.put(weights(3)) == (digest(2),)


def test_its_own_digest_among_the_held_takes_no_room() -> None:
    tier = HostTierLru(20)
    assert tier.put(weights(1, size=20), held=[digest(1)]) == ()
    assert tier.used_bytes == 20


def test_bytes_of_counts_each_that_is_there_once() -> None:
    tier = HostTierLru(40)
    tier.put(weights(1))
    tier.put(weights(2, size=15))
    assert tier.bytes_of([]) == 0
    assert tier.bytes_of([digest(1), digest(2), digest(1), digest(3)]) == 25
    assert tier.put(weights(3, size=20)) == (digest(1),)


digests = st.integers(1, 6)


@given(
    st.lists(st.tuples(digests, st.sets(digests, max_size=4), st.sampled_from(["put", "get", "drop"])), max_size=40),
    st.integers(0, 12),
)
def test_it_is_a_list_in_order_of_use(calls: list[tuple[int, set[int], str]], capacity: int) -> None:
    """The model: adapter n has n bytes; the oldest that are not held go one by one while it does not fit."""
    tier, model = HostTierLru(capacity), list[int]()
    for number, held, call in calls:
        known = number in model
        if known:
            model.remove(number)
        if call == "get":
            assert (tier.get(digest(number)) is not None) == known
        elif call == "drop":
            tier.drop(digest(number))
            known = False
        elif known or number + sum(held.intersection(model)) <= capacity:
            before = list(model)
            while not known and number + sum(model) > capacity:
                model.remove(next(other for other in model if other not in held))
            gone = tuple(digest(other) for other in before if other not in model)
            assert tier.put(weights(number, number), {digest(other) for other in held}) == gone
            known = True
        else:
            with pytest.raises(CapacityExceeded):
                tier.put(weights(number, number), {digest(other) for other in held})
        model += [number] * known
        assert {other for other in range(1, 7) if digest(other) in tier} == set(model)
        assert tier.used_bytes == sum(model) == tier.bytes_of([digest(other) for other in range(1, 7)]) <= capacity


def test_drop_is_idempotent() -> None:
    tier = HostTierLru(20)
    tier.put(weights(1))
    tier.drop(digest(1))
    tier.drop(digest(1))
    assert tier.used_bytes == 0
    assert digest(1) not in tier
