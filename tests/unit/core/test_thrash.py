"""What was evicted a short time ago and comes back is noticed, once, and what is remembered is bounded."""

from __future__ import annotations

from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.core.thrash import THRASH_SECONDS, Evicted


def digest(number: int) -> Digest:
    return Digest(f"sha256:{number:064x}")


def test_a_return_within_the_time_is_thrash_once() -> None:
    evicted = Evicted()
    evicted.leave(digest(1), 100.0)
    assert evicted.come(digest(1), 100.0 + THRASH_SECONDS)
    assert not evicted.come(digest(1), 100.0 + THRASH_SECONDS)


def test_a_return_after_the_time_and_a_first_coming_are_none() -> None:
    evicted = Evicted()
    evicted.leave(digest(1), 100.0)
    assert not evicted.come(digest(1), 100.5 + THRASH_SECONDS)
    assert not evicted.come(digest(2), 100.0)


def test_the_last_eviction_counts() -> None:
    evicted = Evicted()
    evicted.leave(digest(1), 0.0)
    evicted.leave(digest(1), 100.0)
    assert evicted.come(digest(1), 150.0)


def test_what_left_long_ago_is_forgotten() -> None:
    evicted = Evicted()
    for number in range(10_000):
        evicted.leave(digest(number), 0.0)
    assert len(evicted) == 4096
    evicted.leave(digest(1), THRASH_SECONDS + 1)
    assert len(evicted) == 1
