"""The host tier holds what fits, lets go of what was used the longest ago, and keeps count."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
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


def test_drop_is_idempotent() -> None:
    tier = HostTierLru(20)
    tier.put(weights(1))
    tier.drop(digest(1))
    tier.drop(digest(1))
    assert tier.used_bytes == 0
    assert digest(1) not in tier
