"""Reservations: slots that a session always finds, and what others are refused for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from slotcar.v1 import adapter_service_pb2 as pb
from slotcar.v1 import engine_service_pb2 as engine
from slotcar.v1.adapter_pb2 import TIER_DEVICE, TIER_HOST

from tests.conformance.calls import refusal_of
from tests.conformance.target import PATIENCE_SECONDS, Target

ENOUGH_SLOTS = 4


@pytest.fixture(scope="module")
def roomy(server: Target, start_target: Callable[..., Target]) -> Target:
    """The server under test, or another if that has so few slots that one number is as good as another."""
    return server if server.server.slots >= ENOUGH_SLOTS else start_target(slots=ENOUGH_SLOTS).learn()


@pytest.fixture
def target(roomy: Target) -> Iterator[Target]:
    """That server, without adapters."""
    roomy.unload_all()
    yield roomy
    assert roomy.has_nothing_of_sessions(), "the test left a session"


def keep(target: Target, ref: str) -> None:
    target.adapters.KeepAdapter(pb.KeepAdapterRequest(ref=ref), timeout=PATIENCE_SECONDS)


def in_host(target: Target, count: int, prefix: str = "mine") -> list[str]:
    """Adapters that are in no slot."""
    names = [f"{prefix}-{number}" for number in range(count)]
    for name in names:
        target.load(name, target_tier=TIER_HOST)
    return names


def test_a_session_is_told_what_it_reserved(target: Target) -> None:
    with target.session(reserved_slots=1) as session:
        assert session.opened.reserved_slots == session.status.reserved_slots == 1
        assert target.capacity().slots_reserved == 1
        session.call.cancel()
        with target.session(resume_session=session.id) as again:
            assert again.opened.reserved_slots == 1
            assert target.capacity().slots_reserved == 1
    assert target.capacity().slots_reserved == 0


@pytest.mark.parametrize("more", [1, 2**32 - 1])
def test_more_slots_than_there_are_cannot_be_reserved(target: Target, more: int) -> None:
    slots = target.server.slots
    count = min(slots + more, 2**32 - 1)
    refusal = refusal_of(target, engine.OpenSessionRequest(reserved_slots=count))
    facts = {"slots": str(slots), "reserved": "0", "wanted": str(count), "kept": "0"}
    assert (refusal.reason, refusal.metadata) == ("SLOTS_EXHAUSTED", facts)
    assert (refusal.retry_seconds, refusal.fields) == (None, ())


def test_a_slot_is_reserved_once(target: Target) -> None:
    slots = target.server.slots
    with target.session(reserved_slots=slots - 1), target.session(reserved_slots=1) as last:
        refusal = refusal_of(target, engine.OpenSessionRequest(reserved_slots=1))
        assert (refusal.reason, refusal.metadata["reserved"]) == ("SLOTS_EXHAUSTED", str(slots))
        target.close_session(last.id)
        with target.session(reserved_slots=1):
            assert target.capacity().slots_reserved == slots


def test_what_is_kept_or_pinned_cannot_be_reserved(target: Target) -> None:
    slots, names = target.server.slots, target.fill_slots()
    for name in names[:-1]:
        keep(target, name)
    refusal = refusal_of(target, engine.OpenSessionRequest(reserved_slots=2))
    assert (refusal.reason, refusal.metadata["kept"]) == ("SLOTS_EXHAUSTED", str(slots - 1))
    with target.session() as session:
        session.set_mapping(names[-1])
        refusal = refusal_of(target, engine.OpenSessionRequest(reserved_slots=1))
        assert refusal.reason == "SLOTS_EXHAUSTED"
        assert refusal.retry_seconds
        session.release_mapping()
        with target.session(reserved_slots=1):
            assert target.capacity().slots_available == 0


def test_a_keep_does_not_eat_a_reservation(target: Target) -> None:
    """Keeps and reservations together are at most the slots."""
    slots, names = target.server.slots, target.fill_slots()
    source = str(target.folder("new"))
    with target.session(reserved_slots=slots - 1):
        keep(target, names[0])
        for request in (
            pb.KeepAdapterRequest(ref=names[1]),
            pb.LoadAdapterRequest(ref=names[1], keep=True),
            pb.LoadAdapterRequest(ref="new", source=source, keep=True),
        ):
            refusal = refusal_of(target, request)
            assert refusal.reason == "SLOTS_EXHAUSTED"
            assert refusal.metadata == {"slots": str(slots), "kept": "1", "wanted": "1"}
            assert refusal.retry_seconds is None
        keep(target, names[0])


def test_a_load_does_not_eat_a_reservation(target: Target) -> None:
    """Though every slot is free."""
    slots = target.server.slots
    request = pb.LoadAdapterRequest(ref="new", source=str(target.folder("new")))
    with target.session(reserved_slots=slots) as session:
        refusal = refusal_of(target, request)
        assert (refusal.reason, refusal.metadata["reserved"]) == ("SLOTS_EXHAUSTED", str(slots))
        names = in_host(target, slots)
        mapped = session.set_mapping(*names, load=True)
        assert len({found.slot for found in mapped.entries}) == slots
        session.release_mapping()
    target.load("new")


def test_a_mapping_does_not_eat_anothers_reservation(target: Target) -> None:
    """And the session finds its slots, whatever others do."""
    slots, names = target.server.slots, target.fill_slots()
    mine = in_host(target, slots)
    with target.session(reserved_slots=slots - 1) as session, target.session() as other:
        other.set_mapping(names[0])
        refusal = refusal_of(target, other.mapping(*names[:2], mapping_id=2))
        assert (refusal.reason, refusal.metadata["reserved"]) == ("SLOTS_EXHAUSTED", str(slots - 1))
        refusal = refusal_of(target, other.mapping(mine[0], mapping_id=2, load=True))
        assert refusal.reason == "SLOTS_EXHAUSTED"
        session.set_mapping(*mine[: slots - 1], load=True)
        refusal = refusal_of(target, session.mapping(*mine, load=True))
        assert refusal.reason == "SLOTS_EXHAUSTED"
        assert refusal.retry_seconds
        other.release_mapping()
        session.set_mapping(*mine, load=True)


def test_a_slot_of_two_sessions_is_in_common_use(target: Target) -> None:
    """When the other lets go of it, it is the session's own again, and nothing is owed."""
    slots = target.server.slots
    target.load("shared")
    with ExitStack() as stack:
        session, other = (stack.enter_context(target.session(reserved_slots=count)) for count in (slots - 1, 0))
        session.hold("shared", tier=TIER_DEVICE)
        other.set_mapping("shared")
        assert target.capacity().slots_available == 0
        target.close_session(other.id)
        assert target.capacity().slots_available == 1
        names = in_host(target, slots - 2)
        session.set_mapping("shared", *names, load=True)
        target.load("new")
