"""PrefetchAdapters: what is known comes nearer, as far as that costs nobody anything; the answer says how far."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from slotcar.v1 import adapter_pb2
from slotcar.v1 import adapter_service_pb2 as pb

from tests.conformance.refusals import refused
from tests.conformance.target import ABSENT_DIGEST, PATIENCE_SECONDS, Target
from tests.waiting import eventually

DISK, HOST, DEVICE = adapter_pb2.TIER_DISK, adapter_pb2.TIER_HOST, adapter_pb2.TIER_DEVICE


@pytest.fixture(autouse=True)
def without_adapters(target: Target) -> None:
    target.unload_all()


def prefetch(target: Target, *refs: str, tier: adapter_pb2.Tier.ValueType = DEVICE) -> list[pb.PrefetchedAdapter]:
    request = pb.PrefetchAdaptersRequest(refs=refs, target_tier=tier)
    return list(target.adapters.PrefetchAdapters(request, timeout=PATIENCE_SECONDS).adapters)


def tier_of(target: Target, name: str) -> int:
    return target.adapters.GetAdapter(pb.GetAdapterRequest(ref=name), timeout=PATIENCE_SECONDS).adapter.tier


def test_what_is_known_comes_nearer_and_takes_nothing_from_anybody(target: Target) -> None:
    names = target.fill_slots()
    target.load("near", target_tier=HOST)
    kept, idle = names[:-1], names[-1]
    for name in kept:
        target.adapters.KeepAdapter(pb.KeepAdapterRequest(ref=name), timeout=PATIENCE_SECONDS)
    with target.session() as session:
        session.set_mapping(idle)
        with target.unchanged():
            (end,) = prefetch(target, "near")
        assert (end.ref, end.adapter.name, end.adapter.tier) == ("near", "near", HOST)
        assert end.why_not.startswith("SLOTS_EXHAUSTED: ")
        session.release_mapping()
        (end,) = prefetch(target, "near")
    assert (end.adapter.tier, end.why_not) == (DEVICE, "")
    assert end.adapter.HasField("slot")
    assert tier_of(target, idle) == HOST


def test_a_prefetch_takes_no_slot_twice(target: Target) -> None:
    """More than fit: the first come into slots, the others stay in memory."""
    resident = target.fill_slots()
    names = [f"wanted-{number}" for number in range(len(resident) + 2)]
    for name in names:
        target.load(name, target_tier=HOST)
    ends = prefetch(target, *names)
    assert [end.adapter.tier for end in ends] == [DEVICE] * len(resident) + [HOST] * 2
    assert [bool(end.why_not) for end in ends] == [False] * len(resident) + [True] * 2
    assert all(tier_of(target, name) == HOST for name in resident)


def test_what_is_there_already_stays(target: Target) -> None:
    names = target.fill_slots()
    with target.unchanged():
        ends = prefetch(target, *names, names[0])
    assert [end.ref for end in ends] == [*names, names[0]]
    assert {end.adapter.tier for end in ends} == {DEVICE}
    with target.unchanged():
        assert prefetch(target, names[0], tier=HOST)[0].why_not == ""


def test_an_unknown_ref_is_no_error_of_the_others(target: Target) -> None:
    digest = target.load("sql", target_tier=HOST).adapter.digest
    ends = prefetch(target, "nobody", f"sql@{ABSENT_DIGEST}", f"sql@{digest}")
    assert [end.why_not.partition(":")[0] for end in ends] == ["ADAPTER_NOT_FOUND"] * 2 + [""]
    assert not ends[0].HasField("adapter")
    assert ends[2].adapter.tier == DEVICE


def test_each_tier_can_be_asked_for(start_target: Callable[..., Target], tmp_path: Path) -> None:
    """On a server with a disk; one without refuses TIER_DISK."""
    target = start_target(extra=("--disk", str(tmp_path / "disk"))).learn()
    for number, tier in enumerate((DISK, HOST, DEVICE)):
        assert target.load(f"load-{number}", target_tier=tier).adapter.tier == tier
        target.load(f"fetch-{number}", target_tier=DISK)
        (end,) = prefetch(target, f"fetch-{number}", tier=tier)
        assert (end.adapter.tier, end.why_not) == (tier, "")


def test_without_a_disk_nothing_stops_there(target: Target) -> None:
    if target.capacity().disk_bytes_capacity:
        pytest.skip("this server has a disk tier")
    target.load("sql", target_tier=HOST)
    with target.unchanged():
        for call in (lambda: prefetch(target, "sql", tier=DISK), lambda: target.load("sql", target_tier=DISK)):
            refusal = refused(call)
            assert (refusal.reason, refusal.fields) == ("REQUEST_INVALID", ("target_tier",))


def test_no_refs_are_no_work(target: Target) -> None:
    with target.unchanged():
        assert prefetch(target) == []


@pytest.mark.parametrize("ref", ["", "a//b", "../x", "sql@sha256:abc", "sql@", "é"])
def test_a_malformed_prefetch_is_refused(target: Target, ref: str) -> None:
    target.load("sql", target_tier=HOST)
    with target.unchanged():
        refusal = refused(prefetch, target, "sql", ref)
        assert (refusal.reason, refusal.fields) == ("REQUEST_INVALID", ("refs[1]",))
    for tier in (adapter_pb2.TIER_SOURCE, 99):
        with target.unchanged():
            refusal = refused(lambda tier=tier: prefetch(target, "sql", tier=tier))
            assert (refusal.reason, refusal.fields) == ("REQUEST_INVALID", ("target_tier",))
    with target.unchanged():
        refusal = refused(prefetch, target, *["sql"] * 5000)
        assert (refusal.reason, refusal.fields) == ("REQUEST_INVALID", ("refs",))


def test_a_prefetch_outlives_its_caller(target: Target) -> None:
    names = [f"later-{number}" for number in range(target.server.slots)]
    for name in names:
        target.load(name, target_tier=HOST)
    call = target.adapters.PrefetchAdapters.future(pb.PrefetchAdaptersRequest(refs=names), timeout=PATIENCE_SECONDS)
    eventually(_is_filling_or_done(target, names[0]))
    call.cancel()
    assert call.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.OK)
    eventually(lambda: all(tier_of(target, name) == DEVICE for name in names))


def _is_filling_or_done(target: Target, name: str) -> Callable[[], bool]:
    return lambda: bool(target.capacity().slots_filling) or tier_of(target, name) == DEVICE
