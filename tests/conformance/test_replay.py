"""Every call that says it is idempotent, made twice: the second changes nothing and answers as the first did."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from google.protobuf.message import Message
from slotcar.v1 import adapter_service_pb2 as pb
from slotcar.v1 import engine_service_pb2
from slotcar.v1.adapter_pb2 import TIER_DEVICE, TIER_HOST, TIER_UNSPECIFIED

from tests.conformance.calls import parts
from tests.conformance.items import forward, matrix
from tests.conformance.refusals import refused
from tests.conformance.target import PATIENCE_SECONDS, Target


def twice(target: Target, call: Callable[[], Any]) -> Any:
    """The answer to a call whose repetition changes nothing and answers alike."""
    first = call()
    with target.unchanged():
        assert same(call()) == same(first)
    return first


def same(answer: Message) -> Message:
    """The answer without what may differ: how it came about."""
    copy = type(answer)()
    copy.CopyFrom(answer)
    for field in ("already_resident", "timing"):
        if field in copy.DESCRIPTOR.fields_by_name:
            copy.ClearField(field)
    return copy


@pytest.mark.parametrize("keep", [False, True])
def test_a_load(target: Target, keep: bool) -> None:
    first = twice(target, lambda: target.load("sql", keep=keep))
    assert not first.already_resident
    assert target.load("sql").already_resident
    digest = first.adapter.digest
    by_digest = target.load("sql", ref=f"sql@{digest}", source="")
    assert same(by_digest) == same(first)
    assert same(target.load("sql", on_conflict=pb.ON_CONFLICT_REPLACE)) == same(first)
    assert first.adapter.keep == keep


def test_loads_of_the_same_bytes_at_one_time_are_one(target: Target) -> None:
    target.folder("sql")
    with ThreadPoolExecutor(8) as pool:
        together = threading.Barrier(8)

        def load(number: int) -> pb.LoadAdapterResponse:
            together.wait()
            return target.load("sql", ref=f"sql-{number % 3}", source=str(target.root / "sql"))

        answers = list(pool.map(load, range(8)))
    assert len({answer.adapter.digest for answer in answers}) == 1
    assert len({answer.adapter.slot for answer in answers}) == 1
    state = target.state()
    assert [adapter.name for adapter in state.adapters] == ["sql-0", "sql-1", "sql-2"]
    assert [slot.digest for slot in state.layout.slots].count(answers[0].adapter.digest) == 1


def test_an_unload(target: Target) -> None:
    digest = target.load("sql").adapter.digest
    request = pb.UnloadAdapterRequest(ref="sql")
    assert target.adapters.UnloadAdapter(request, timeout=PATIENCE_SECONDS).digest == digest
    for force in (False, True):
        request.force = force
        with target.unchanged():
            refusal = refused(target.adapters.UnloadAdapter, request, timeout=PATIENCE_SECONDS)
        assert refusal.reason == "ADAPTER_NOT_FOUND"
        assert refusal.metadata == {"adapters": "sql"}


def test_a_keep_and_its_end(target: Target) -> None:
    target.load("sql")
    keep, release = pb.KeepAdapterRequest(ref="sql"), pb.ReleaseKeepRequest(ref="sql")
    for _ in range(2):
        assert twice(target, lambda: target.adapters.KeepAdapter(keep, timeout=PATIENCE_SECONDS)).adapter.keep
        answer = twice(target, lambda: target.adapters.ReleaseKeep(release, timeout=PATIENCE_SECONDS))
        assert not answer.adapter.keep


def test_a_get_and_an_estimate(target: Target) -> None:
    loaded = target.load("sql")
    get = pb.GetAdapterRequest(ref="sql")
    answer = twice(target, lambda: target.adapters.GetAdapter(get, timeout=PATIENCE_SECONDS))
    assert answer.adapter == loaded.adapter
    estimate = pb.EstimateAdapterRequest(source=str(target.folder("chat")))
    answer = twice(target, lambda: target.adapters.EstimateAdapter(estimate, timeout=PATIENCE_SECONDS))
    assert answer.fits
    assert target.load("chat").adapter.digest == answer.digest


def test_the_end_of_a_session(target: Target) -> None:
    target.load("sql")
    with target.session() as session:
        session.set_mapping("sql")
        twice(target, lambda: target.close_session(session.id))
    assert target.close_session("never-was").layout == target.close_session("").layout
    assert target.state().adapters[0].pins == 0


def test_the_end_of_a_mapping(target: Target) -> None:
    target.load("sql")
    with target.session() as session:
        session.set_mapping("sql")
        twice(target, session.release_mapping)
        with target.unchanged():
            session.release_mapping(99)
        assert target.state().adapters[0].pins == 0


def test_a_mapping(target: Target) -> None:
    """Its generation is another, so that a Forward for the one is never taken for the other; all else is the same."""
    target.load("sql")
    with target.session() as session:
        first = session.set_mapping("sql", None, "sql")
        before = target.state()
        second = session.set_mapping("sql", None, "sql")
        assert second.entries == first.entries
        assert second.generation > first.generation
        after = target.state()
        assert after.adapters == before.adapters
        assert after.layout.slots == before.layout.slots
        assert after.gauges == before.gauges


def test_a_mapping_of_several_ranks(target: Target) -> None:
    """The recorded answer, generation and all, for as long as it is current."""
    ref = f"sql@{target.load('sql').adapter.digest}"
    with target.session(ranks=3) as session:
        first = twice(target, lambda: session.set_mapping(ref, None))
        assert twice(target, lambda: session.set_mapping(ref, None, load=True)) == first
        other = twice(target, lambda: session.set_mapping(None, mapping_id=2))
        assert other.generation > first.generation
        assert session.set_mapping(ref, None).generation == first.generation


def test_a_hold_and_its_end(target: Target) -> None:
    target.load("sql")
    with target.session(reserved_slots=1) as session:
        for tier in (TIER_UNSPECIFIED, TIER_HOST, TIER_DEVICE):
            answer = twice(target, lambda tier=tier: session.hold("sql", tier=tier))
            assert answer.tier == (tier or TIER_HOST)
            assert len(session.status.holds) == 1
            assert target.state().adapters[0].pins == 1
        twice(target, session.release_hold)
        with target.unchanged():
            session.release_hold(99)
        assert target.state().adapters[0].pins == 0


def test_a_load_with_a_hold(target: Target) -> None:
    with target.session(reserved_slots=1) as session:
        hold = pb.LoadHold(session=session.id, hold_id=3, tier=TIER_DEVICE)
        answer = twice(target, lambda: target.load("sql", hold=hold))
        assert (answer.adapter.pins, len(session.status.holds)) == (1, 1)


@pytest.mark.parametrize("tier", [TIER_HOST, TIER_DEVICE])
def test_an_upload(target: Target, tier: int) -> None:
    sent = parts(target.folder("sql"), "sql", target_tier=tier)
    first = twice(target, lambda: target.adapters.LoadAdapterStream(iter(sent), timeout=PATIENCE_SECONDS))
    assert not first.already_resident
    second = target.adapters.LoadAdapterStream(iter(sent), timeout=PATIENCE_SECONDS)
    assert second.already_resident == (tier == TIER_DEVICE)
    # From a folder the bytes have the same digest, and then a source.
    loaded = target.load("sql", target_tier=tier)
    assert loaded.adapter.digest == first.adapter.digest
    assert loaded.adapter.source


def test_a_load_into_memory(target: Target) -> None:
    first = twice(target, lambda: target.load("sql", target_tier=TIER_HOST))
    assert (first.adapter.tier, first.already_resident) == (TIER_HOST, False)


def test_the_end_of_a_session_by_an_operator(target: Target) -> None:
    with target.session() as session:
        request = pb.EndSessionRequest(session=session.short)
        answers = [target.adapters.EndSession(request, timeout=PATIENCE_SECONDS) for _ in range(3)]
    assert [answer.ended for answer in answers] == [True, False, False]


def test_a_fence_a_list_and_a_look_at_the_capacity(target: Target) -> None:
    target.load("sql")
    with target.session() as session:
        session.set_mapping("sql")
        fence = engine_service_pb2.FenceRequest(session=session.id)
        twice(target, lambda: target.engine.Fence(fence, timeout=PATIENCE_SECONDS))
        twice(target, target.capacity)
        with target.unchanged():
            assert [status.session for status in target.sessions()] == [session.short]


def test_a_forward(target: Target) -> None:
    target.load("sql", source=str(target.folder("all-sites", sites=len(target.model.sites))))
    add = engine_service_pb2.FORWARD_MODE_ADD
    with target.session() as session:
        generation = session.set_mapping("sql", None).generation
        items = [
            engine_service_pb2.ForwardItem(
                site=site.name, x=matrix(3, site.in_features), base=matrix(3, site.out_features), mode=add
            )
            for site in target.model.sites
        ]
        request = forward(session, generation, [2, 1], *items)
        answer = twice(target, lambda: target.engine.Forward(request, timeout=PATIENCE_SECONDS))
        assert len(answer.outputs) == len(items)


def test_two_names_of_the_same_bytes_keep_sources_of_their_own(target: Target) -> None:
    first = str(target.folder("first", seed=1))
    second = str(target.folder("second", seed=1))
    digests = {target.load(name, source=source).adapter.digest for name, source in (("a", first), ("b", second))}
    assert len(digests) == 1
    assert [adapter.source for adapter in target.state().adapters] == [first, second]
    assert target.load("a", source="").adapter.source == first
