"""SetMapping that loads: all adapters become resident or nothing changes; and mappings that are idle."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
from slotcar.v1 import adapter_service_pb2 as pb
from slotcar.v1.adapter_pb2 import TIER_DEVICE, TIER_HOST, TIER_SOURCE

from tests.conformance.calls import refusal_of
from tests.conformance.items import delta, forward, item, tensor
from tests.conformance.refusals import refused
from tests.conformance.target import PATIENCE_SECONDS, Session, Target
from tests.conformance.watching import watching
from tests.tolerances import assert_close


def evicted(target: Target) -> tuple[list[str], list[str]]:
    """Two adapters that are in no slot, and as many as there are slots in them; the two are in memory no more."""
    gone = ["gone-0", "gone-1"]
    for name in gone:
        target.load(name, target_tier=TIER_HOST)
    there = target.fill_slots()
    target.load("last", target_tier=TIER_HOST)
    return gone, there


def check_delta(target: Target, session: Session, generation: int, *names: str) -> None:
    """The mapping of those adapters computes what they say, one row each."""
    one = item(target, len(names))
    request = forward(session, generation, [1] * len(names), one)
    output = tensor(target.engine.Forward(request, timeout=PATIENCE_SECONDS).outputs[0])
    for row, name in enumerate(names):
        assert_close(output[row : row + 1], delta(target, name, tensor(one.x)[row : row + 1]))


def test_an_adapter_that_waits_in_memory_is_loaded_by_a_mapping(target: Target) -> None:
    before = target.state().layout
    loaded = target.load("sql", target_tier=TIER_HOST)
    assert (loaded.adapter.tier, loaded.adapter.HasField("slot"), loaded.layout) == (TIER_HOST, False, before.version)
    assert not loaded.already_resident
    with target.session() as session:
        refusal = refusal_of(target, session.mapping("sql"))
        assert (refusal.reason, refusal.metadata) == ("ADAPTER_NOT_RESIDENT", {"adapters": "sql"})
        mapped = session.set_mapping("sql", load=True)
        assert mapped.entries[0].digest == loaded.adapter.digest
        assert target.state().adapters[0].tier == TIER_DEVICE
        check_delta(target, session, mapped.generation, "sql")
        # What is in a slot stays there.
        assert target.load("sql", target_tier=TIER_HOST).adapter.tier == TIER_DEVICE


def test_a_set_of_evicted_adapters_is_made_resident(pressed: Target) -> None:
    gone, _ = evicted(pressed)
    tiers = {adapter.name: adapter.tier for adapter in pressed.state().adapters}
    assert [tiers[name] for name in gone] == [TIER_SOURCE, TIER_SOURCE]
    with pressed.session() as session, watching(pressed) as events:
        mapped = session.set_mapping(gone[0], None, gone[1], load=True)
        assert len({found.slot for found in mapped.entries if found.digest}) == 2
        reasons = [events.wait(pb.EVENT_KIND_EVICTED).reason for _ in gone]
        assert sorted(reasons) == [f"slot taken by {name}" for name in gone]
        (mapping,) = session.status.mappings
        assert (len(mapping.slots), mapping.pinned, mapping.current) == (2, True, True)
        session.set_mapping(*gone)
        check_delta(pressed, session, session.set_mapping(*gone, load=True).generation, *gone)


@pytest.mark.parametrize("order", [1, -1])
def test_a_set_is_made_resident_whole_or_nothing_changes(pressed: Target, order: int) -> None:
    """The source of one of two names is gone: nothing is evicted for the other. Bytes may come into memory."""
    gone, _ = evicted(pressed)
    shutil.rmtree(pressed.root / gone[0])
    with pressed.session() as session:
        before = pressed.state()
        refusal = refused(session.set_mapping, *gone[::order], load=True)
        assert (refusal.reason, refusal.subjects, refusal.retry_seconds) == ("SOURCE_UNAVAILABLE", (), None)
        after = pressed.state()
        assert (after.layout, after.sessions) == (before.layout, before.sessions)
        session.set_mapping(gone[1], load=True)


def test_other_bytes_at_the_source_are_not_taken_for_the_adapter(pressed: Target) -> None:
    gone, _ = evicted(pressed)
    digest = {adapter.name: adapter.digest for adapter in pressed.state().adapters}[gone[0]]
    pressed.write(pressed.root / gone[0], seed=99)
    with pressed.session() as session:
        before = pressed.state()
        refusal = refused(session.set_mapping, gone[0], load=True)
        assert (refusal.reason, refusal.metadata["wanted"], refusal.fields) == ("DIGEST_MISMATCH", digest, ())
        after = pressed.state()
        assert (after.layout, after.sessions) == (before.layout, before.sessions)


def test_one_unknown_name_and_nothing_is_loaded(target: Target) -> None:
    target.load("sql", target_tier=TIER_HOST)
    with target.session() as session:
        refusal = refusal_of(target, session.mapping("sql", "nobody", load=True))
        assert (refusal.reason, refusal.metadata) == ("ADAPTER_NOT_FOUND", {"adapters": "nobody"})


def test_more_adapters_than_slots_are_not_loaded(target: Target) -> None:
    names = target.fill_slots()
    target.load("more", target_tier=TIER_HOST)
    with target.session() as session:
        session.set_mapping(names[0], mapping_id=2)
        refusal = refusal_of(target, session.mapping(*names, "more", load=True))
        assert (refusal.reason, refusal.retry_seconds) == ("SLOTS_EXHAUSTED", None)


def test_slots_that_only_the_replaced_mapping_pins_count_as_free(target: Target) -> None:
    names = target.fill_slots()
    others = [f"other-{number}" for number in range(len(names))]
    for name in others:
        target.load(name, target_tier=TIER_HOST)
    with target.session() as session:
        old = session.set_mapping(*names)
        assert refusal_of(target, session.mapping(*others, mapping_id=2, load=True)).reason == "SLOTS_EXHAUSTED"
        new = session.set_mapping(*others, load=True)
        check_delta(target, session, new.generation, *others)
        request = forward(session, old.generation, [1] * len(names), item(target, len(names)))
        assert refused(target.engine.Forward, request, timeout=PATIENCE_SECONDS).reason == "LAYOUT_STALE"


def test_an_adapter_in_many_entries_takes_one_slot(target: Target) -> None:
    target.load("sql", target_tier=TIER_HOST)
    digest = target.load("sql", ref="alias", target_tier=TIER_HOST).adapter.digest
    with target.session() as session:
        mapped = session.set_mapping(*["sql", "alias", None] * 300, load=True)
        assert [found.digest for found in mapped.entries] == [digest, digest, ""] * 300
        assert len({found.slot for found in mapped.entries if found.digest}) == 1
        capacity = target.capacity()
        assert (capacity.slots_pinned, capacity.slots_occupied) == (1, 1)
        assert [adapter.pins for adapter in target.state().adapters] == [1, 1]
        (mapping,) = session.status.mappings
        assert list(mapping.refs) == [f"sql@{digest}", f"alias@{digest}"]


# Idleness


@pytest.fixture(scope="module")
def impatient(start_target: Callable[..., Target]) -> Target:
    """A server whose mappings are soon idle."""
    return start_target(extra=("--mapping-idle-seconds", "0.3")).learn()


def test_an_idle_mapping_loses_its_pins_and_not_its_validity(impatient: Target) -> None:
    impatient.unload_all()
    impatient.load("sql")
    with watching(impatient) as events, impatient.session() as session:
        request = forward(session, session.set_mapping("sql").generation, [1], item(impatient, 1))
        for _ in range(2):
            expired = events.wait(pb.EVENT_KIND_EXPIRED, session=session.short)
            assert expired.reason == "mapping 1 was idle"
            (mapping,) = session.status.mappings
            assert (mapping.pinned, mapping.current) == (False, True)
            assert mapping.idle.ToNanoseconds() >= 300_000_000
            assert impatient.state().adapters[0].pins == 0
            impatient.engine.Forward(request, timeout=PATIENCE_SECONDS)
            assert session.status.mappings[0].pinned
            assert impatient.state().adapters[0].pins == 1
    assert impatient.has_nothing_of_sessions()


def test_an_idle_mapping_whose_slot_was_taken_is_stale(impatient: Target) -> None:
    impatient.unload_all()
    digest = impatient.load("sql").adapter.digest
    with watching(impatient) as events, impatient.session() as session:
        request = forward(session, session.set_mapping("sql").generation, [1], item(impatient, 1))
        events.wait(pb.EVENT_KIND_EXPIRED, session=session.short)
        impatient.fill_slots()
        (mapping,) = session.status.mappings
        assert (mapping.pinned, mapping.current) == (False, False)
        refusal = refused(impatient.engine.Forward, request, timeout=PATIENCE_SECONDS)
        assert (refusal.reason, refusal.metadata["entries"]) == ("LAYOUT_STALE", f"sql@{digest}")
        again = session.set_mapping(f"sql@{digest}", load=True)
        check_delta(impatient, session, again.generation, "sql")


def test_an_idle_mapping_of_an_adapter_without_a_name_lets_it_go(impatient: Target) -> None:
    impatient.unload_all()
    digest = impatient.load("sql").adapter.digest
    with watching(impatient) as events, impatient.session() as session:
        request = forward(session, session.set_mapping("sql").generation, [1], item(impatient, 1))
        impatient.adapters.UnloadAdapter(pb.UnloadAdapterRequest(ref="sql"), timeout=PATIENCE_SECONDS)
        assert impatient.capacity().slots_draining == 1
        events.wait(pb.EVENT_KIND_FREED, digest=digest)
        assert impatient.capacity().slots_draining == 0
        impatient.fill_slots()
        refusal = refused(impatient.engine.Forward, request, timeout=PATIENCE_SECONDS)
        assert refusal.reason == "LAYOUT_STALE"
        assert refused(session.set_mapping, f"sql@{digest}", load=True).reason == "ADAPTER_NOT_FOUND"
