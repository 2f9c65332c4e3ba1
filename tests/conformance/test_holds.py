"""Holds: what they keep from leaving, where and for how long."""

from __future__ import annotations

import shutil

import pytest
from slotcar.v1 import adapter_service_pb2 as pb
from slotcar.v1 import layout_pb2
from slotcar.v1.adapter_pb2 import TIER_DEVICE, TIER_HOST, TIER_SOURCE, TIER_UNSPECIFIED, Adapter

from tests.conformance.calls import parts
from tests.conformance.conftest import CRAMPED_BYTES
from tests.conformance.items import forward, item
from tests.conformance.refusals import refused
from tests.conformance.target import PATIENCE_SECONDS, Session, Target, seconds
from tests.conformance.watching import watching

DAY_SECONDS = 86_400


def get(target: Target, ref: str) -> Adapter:
    return target.adapters.GetAdapter(pb.GetAdapterRequest(ref=ref), timeout=PATIENCE_SECONDS).adapter


def unload(target: Target, ref: str, *, force: bool = False) -> pb.UnloadAdapterResponse:
    return target.adapters.UnloadAdapter(pb.UnloadAdapterRequest(ref=ref, force=force), timeout=PATIENCE_SECONDS)


def holds(session: Session) -> list[tuple[int, str, int]]:
    """Id, ref and tier of each hold."""
    return [(hold.hold_id, hold.ref, hold.tier) for hold in session.status.holds]


# Time


def test_a_hold_ends_by_itself(target: Target) -> None:
    digest = target.load("sql").adapter.digest
    with watching(target) as events, target.session() as session:
        answer = session.hold("sql", duration=seconds(0.1))
        assert (answer.digest, answer.tier) == (digest, TIER_HOST)
        begun = events.wait(pb.EVENT_KIND_HELD, name="sql", digest=digest, session=session.short)
        ended = events.wait(pb.EVENT_KIND_HOLD_RELEASED, name="sql", digest=digest, session=session.short)
        assert ended.reason == "its time is over"
        assert ended.time.ToNanoseconds() > begun.time.ToNanoseconds()
        assert holds(session) == []
        assert target.state().adapters[0].pins == 0


def test_the_time_of_a_hold_counts_from_when_the_bytes_are_there(target: Target) -> None:
    """By the server's clock: each hold begins after one event and is looked at before the next."""
    target.folder("large", rank=target.server.max_rank, sites=len(target.model.sites))
    with watching(target) as events, target.session() as session:
        hold = pb.LoadHold(session=session.id, hold_id=1, duration=seconds(DAY_SECONDS))
        target.load("large", hold=hold)
        (first,) = session.status.holds
        target.adapters.KeepAdapter(pb.KeepAdapterRequest(ref="large"), timeout=PATIENCE_SECONDS)
        session.hold("large", duration=seconds(DAY_SECONDS))
        (second,) = session.status.holds
        target.adapters.ReleaseKeep(pb.ReleaseKeepRequest(ref="large"), timeout=PATIENCE_SECONDS)
        kinds = (pb.EVENT_KIND_LOADED, pb.EVENT_KIND_KEPT, pb.EVENT_KIND_KEEP_RELEASED)
        times = [events.wait(kind).time.ToNanoseconds() for kind in kinds]
    for held, begin, end in ((first, *times[:2]), (second, *times[1:])):
        assert 0 <= seconds(DAY_SECONDS).ToNanoseconds() - held.left.ToNanoseconds() <= end - begin


def test_a_hold_without_a_duration_lasts_until_it_is_released(target: Target) -> None:
    digest = target.load("sql").adapter.digest
    with watching(target) as events, target.session() as session:
        session.hold("sql", 2**64 - 1)
        (held,) = session.status.holds
        assert (held.hold_id, held.ref, held.tier) == (2**64 - 1, f"sql@{digest}", TIER_HOST)
        assert not held.HasField("left")
        session.release_hold(2**64 - 1)
        assert events.wait(pb.EVENT_KIND_HOLD_RELEASED).reason == "released"
        session.hold("sql")
        target.close_session(session.id)
        assert events.wait(pb.EVENT_KIND_HOLD_RELEASED).reason == "the session ended"


def test_a_hold_of_the_same_id_takes_the_place_of_the_one_before(target: Target) -> None:
    digests = {name: target.load(name).adapter.digest for name in ("sql", "chat")}
    with target.session() as session:
        session.hold("sql", duration=seconds(DAY_SECONDS))
        session.hold("chat")
        assert holds(session) == [(1, f"chat@{digests['chat']}", TIER_HOST)]
        assert not session.status.holds[0].HasField("left")
        assert [adapter.pins for adapter in target.state().adapters] == [1, 0]


# Slots


def test_a_hold_inside_a_reservation_keeps_the_slot(target: Target) -> None:
    slot = target.load("held").adapter.slot
    with target.session(reserved_slots=1) as session:
        assert session.hold("held", tier=TIER_DEVICE).tier == TIER_DEVICE
        assert session.status.holds[0].tier == TIER_DEVICE
        assert target.capacity().slots_pinned == 1
        for _ in range(2):
            target.fill_slots()
        adapter = get(target, "held")
        assert (adapter.tier, adapter.slot, adapter.pins) == (TIER_DEVICE, slot, 1)
        session.release_hold()
        target.fill_slots("next")
        assert get(target, "held").tier == TIER_HOST


def test_a_hold_outside_a_reservation_keeps_the_bytes_alone(target: Target) -> None:
    target.load("held")
    with target.session() as session:
        assert session.hold("held", tier=TIER_DEVICE).tier == TIER_HOST
        assert session.status.holds[0].tier == TIER_HOST
        assert target.capacity().slots_pinned == 0
        assert get(target, "held").pins == 1
        target.fill_slots()
        assert get(target, "held").tier == TIER_HOST


def test_a_reservation_has_room_for_so_many_adapters(target: Target) -> None:
    """However many holds they have; and a second adapter of a reservation of one slot keeps its bytes alone."""
    for name in ("one", "two"):
        target.load(name)
    with target.session(reserved_slots=1) as session:
        tiers = [session.hold(name, number, tier=TIER_DEVICE).tier for number, name in enumerate(("one", "one", "two"))]
        assert tiers == [TIER_DEVICE, TIER_DEVICE, TIER_HOST]
        assert target.capacity().slots_pinned == 1
        session.release_hold(0)
        assert session.hold("two", 2, tier=TIER_DEVICE).tier == TIER_HOST
        session.release_hold(1)
        assert session.hold("two", 2, tier=TIER_DEVICE).tier == TIER_DEVICE


def test_a_hold_brings_an_evicted_adapter_back(target: Target) -> None:
    target.load("held")
    target.fill_slots()
    assert get(target, "held").tier == TIER_HOST
    with target.session(reserved_slots=1) as session:
        assert session.hold("held", tier=TIER_DEVICE).tier == TIER_DEVICE
        adapter = get(target, "held")
        assert target.state().layout.slots[adapter.slot].digest == adapter.digest


def test_a_load_may_take_the_hold_in_the_same_step(target: Target) -> None:
    with target.session(reserved_slots=1) as session:
        hold = pb.LoadHold(session=session.id, hold_id=5, tier=TIER_DEVICE)
        answer = target.load("sql", hold=hold)
        adapter = answer.adapter
        assert answer.hold_tier == TIER_DEVICE
        assert (adapter.tier, adapter.pins) == (TIER_DEVICE, 1)
        assert holds(session) == [(5, f"sql@{adapter.digest}", TIER_DEVICE)]
        answer = target.load("chat", target_tier=TIER_HOST, hold=pb.LoadHold(session=session.id, hold_id=6))
        adapter = answer.adapter
        assert answer.hold_tier == TIER_HOST
        assert target.load("chat", target_tier=TIER_HOST).hold_tier == TIER_UNSPECIFIED
        assert (adapter.tier, adapter.pins) == (TIER_HOST, 1)
        assert holds(session)[1:] == [(6, f"chat@{adapter.digest}", TIER_HOST)]


# Names


def test_a_forced_unload_ends_holds_and_counts_them(target: Target) -> None:
    digest = target.load("sql").adapter.digest
    with target.session() as session, target.session(reserved_slots=1) as other, watching(target) as events:
        generation = session.set_mapping("sql").generation
        session.hold("sql", 1)
        session.hold("sql", 2)
        other.hold("sql", 1, tier=TIER_DEVICE)
        answer = unload(target, "sql", force=True)
        assert (answer.pins_ended, answer.slot_state) == (4, layout_pb2.SLOT_STATE_FREE)
        ended = [events.wait(pb.EVENT_KIND_HOLD_RELEASED) for _ in range(3)]
        assert {event.reason for event in ended} == {"sql was unloaded by force"}
        assert sorted(event.session for event in ended) == sorted([session.short, session.short, other.short])
        assert holds(session) == holds(other) == []
        request = forward(session, generation, [1], item(target, 1))
        assert refused(target.engine.Forward, request, timeout=PATIENCE_SECONDS).reason == "LAYOUT_STALE"
        for who in (session, other):
            assert refused(who.hold, f"sql@{digest}").reason == "ADAPTER_NOT_FOUND"


def test_force_leaves_holds_alone_while_another_name_has_the_bytes(target: Target) -> None:
    target.load("sql")
    target.load("sql", ref="alias")
    with target.session() as session:
        session.hold("sql")
        assert unload(target, "sql", force=True).pins_ended == 0
        assert len(holds(session)) == 1


def test_what_is_held_outlives_its_name_for_its_holder(target: Target) -> None:
    digest = target.load("sql").adapter.digest
    ref = f"sql@{digest}"
    with target.session() as session, target.session() as other:
        session.hold("sql")
        assert unload(target, "sql").slot_state == layout_pb2.SLOT_STATE_FREE
        assert get(target, ref).tier == TIER_HOST
        assert refused(session.set_mapping, ref).reason == "ADAPTER_NOT_RESIDENT"
        for who, name in ((other, ref), (session, "sql")):
            with target.unchanged():
                assert refused(who.set_mapping, name, load=True).reason == "ADAPTER_NOT_FOUND"
        assert session.set_mapping(ref, load=True).entries[0].digest == digest
        session.release_hold()
        session.release_mapping()
        with target.unchanged():
            assert refused(session.set_mapping, ref, load=True).reason == "ADAPTER_NOT_FOUND"
            refusal = refused(target.adapters.GetAdapter, pb.GetAdapterRequest(ref=ref), timeout=PATIENCE_SECONDS)
            assert refusal.reason == "ADAPTER_NOT_FOUND"


# Memory


def press(target: Target) -> None:
    """Loads more adapters into the host tier than it has room for."""
    for number in range(6):
        target.load(f"other-{number}", target_tier=TIER_HOST)


def test_a_hold_keeps_bytes_in_memory_whatever_is_loaded(pressed: Target) -> None:
    folder = pressed.folder("held")
    with pressed.session() as session:
        pressed.load("held", target_tier=TIER_HOST)
        session.hold("held")
        shutil.rmtree(folder)
        press(pressed)
        tiers = {adapter.name: adapter.tier for adapter in pressed.state().adapters}
        assert tiers["held"] == TIER_HOST
        assert TIER_SOURCE in tiers.values()
        session.set_mapping("held", load=True)
        session.release_mapping()
        session.release_hold()
        pressed.fill_slots()
        press(pressed)
        assert get(pressed, "held").tier == TIER_SOURCE
        assert refused(session.set_mapping, "held", load=True).reason == "SOURCE_UNAVAILABLE"


def test_memory_that_is_all_held_has_room_for_nothing_else(pressed: Target) -> None:
    pressed.load("late", target_tier=TIER_HOST)
    press(pressed)
    names = ["other-3", "other-4", "other-5"]
    with pressed.session() as session:
        for number, name in enumerate(names):
            session.hold(name, number)
        size = pressed.load(names[0], target_tier=TIER_HOST).adapter.bytes
        capacity = pressed.capacity()
        assert (capacity.host_bytes_held, capacity.host_bytes_used) == (3 * size, 3 * size)
        assert capacity.host_bytes_capacity == CRAMPED_BYTES
        pressed.folder("one-more")
        for call in (
            lambda: pressed.load("one-more", target_tier=TIER_HOST),
            lambda: session.hold("late", 9),
            lambda: session.set_mapping("late", load=True),
        ):
            with pressed.unchanged():
                refusal = refused(call)
            wanted = {"found": str(size), "wanted": f"at most {CRAMPED_BYTES - 3 * size}", "held": str(3 * size)}
            assert (refusal.reason, refusal.metadata) == ("CAPACITY_EXCEEDED", {"tier": "HOST"} | wanted)
            assert refusal.retry_seconds is None
        session.release_hold(0)
        session.hold("late", 9)


def test_bytes_without_a_source_are_not_dropped(pressed: Target) -> None:
    answer = pressed.adapters.LoadAdapterStream(
        iter(parts(pressed.folder("sent"), "sent", target_tier=TIER_HOST)), timeout=PATIENCE_SECONDS
    )
    press(pressed)
    assert get(pressed, "sent").tier == TIER_HOST
    assert pressed.capacity().host_bytes_held == answer.adapter.bytes
    with pressed.session() as session:
        assert session.set_mapping("sent", load=True).entries[0].digest == answer.adapter.digest
    unload(pressed, "sent")
    assert pressed.capacity().host_bytes_held == 0


@pytest.mark.parametrize("tier", [TIER_HOST, TIER_DEVICE])
def test_a_hold_of_a_session_that_vanished_ends_with_its_grace(target: Target, tier: int) -> None:
    target.load("sql")
    with watching(target) as events, target.session(reserved_slots=1, grace=seconds(0)) as session:
        session.hold("sql", tier=tier)
        session.call.cancel()
        assert events.wait(pb.EVENT_KIND_HOLD_RELEASED).session == session.short
        assert events.wait(pb.EVENT_KIND_SESSION_ENDED).reason == "grace passed"
        assert target.has_nothing_of_sessions()
