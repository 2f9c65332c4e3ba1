"""SetMapping calls that wait for slots: in their order, for as long as they say, and without harm when they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grpc
import pytest
from slotcar.v1 import adapter_service_pb2 as pb
from slotcar.v1 import engine_service_pb2 as engine
from slotcar.v1.adapter_pb2 import TIER_HOST

from tests.conformance.calls import refusal_of
from tests.conformance.items import forward, item
from tests.conformance.refusals import refused
from tests.conformance.target import PATIENCE_SECONDS, Session, Target, seconds
from tests.waiting import eventually


class Full(NamedTuple):
    """Every slot is pinned, by mapping i of `holder` the adapter names[i]; "b", "c" and "d" are in no slot."""

    target: Target
    names: list[str]
    holder: Session
    first: Session
    second: Session

    def waits(self, count: int) -> None:
        eventually(self.target.is_waiting(count))


@pytest.fixture
def full(target: Target) -> Iterator[Full]:
    names = target.fill_slots()
    for name in ("b", "c", "d"):
        target.load(name, target_tier=TIER_HOST)
    with target.session() as holder, target.session() as first, target.session() as second:
        for number, name in enumerate(names):
            holder.set_mapping(name, mapping_id=number)
        yield Full(target, names, holder, first, second)


def result(call: Any) -> engine.SetMappingResponse:
    answer: engine.SetMappingResponse = call.result()
    return answer


def test_who_waits_first_is_served_first(full: Full) -> None:
    one = full.first.set_later("b")
    full.waits(1)
    two = full.second.set_later("c")
    full.waits(2)
    full.holder.release_mapping(0)
    assert result(one).entries[0].digest
    assert full.target.capacity().waiting == 1
    assert not two.done()
    full.holder.release_mapping(1)
    assert result(two).entries[0].digest
    assert full.target.capacity().waiting == 0


def test_nobody_overtakes_a_call_that_wants_more(full: Full) -> None:
    """Neither who waits for less, nor a newcomer, though there is a slot that would do."""
    large = full.first.set_later("b", "c")
    full.waits(1)
    small = full.second.set_later("d")
    full.waits(2)
    full.holder.release_mapping(0)
    capacity = full.target.capacity()
    assert (capacity.waiting, capacity.slots_available) == (2, 0)
    source = str(full.target.folder("new"))
    for newcomer in (
        pb.LoadAdapterRequest(ref="new", source=source),
        full.holder.mapping(full.names[1], "d", mapping_id=1, load=True),
    ):
        refusal = refusal_of(full.target, newcomer)
        assert (refusal.reason, refusal.metadata["waiting"]) == ("SLOTS_EXHAUSTED", "2")
        assert refusal.metadata["slots"] == str(len(full.names))
        assert refusal.retry_seconds
    full.holder.release_mapping(1)
    result(large)
    assert not small.done()
    full.target.close_session(full.first.id)
    result(small)


def test_a_call_that_is_cancelled_gives_up_its_place(full: Full) -> None:
    one = full.first.set_later("b")
    full.waits(1)
    two = full.second.set_later("c")
    full.waits(2)
    one.cancel()
    full.waits(1)
    full.holder.release_mapping(0)
    result(two)
    assert [mapping.mapping_id for mapping in full.first.status.mappings] == []


ENDS: dict[str, tuple[Callable[[Full], object], str, dict[str, str]]] = {
    "operator": (
        lambda full: full.target.adapters.EndSession(
            pb.EndSessionRequest(session=full.first.short), timeout=PATIENCE_SECONDS
        ),
        "SESSION_NOT_FOUND",
        {},
    ),
    "close": (lambda full: full.target.close_session(full.first.id), "SESSION_NOT_FOUND", {}),
    "release": (lambda full: full.first.release_mapping(), "MAPPING_NOT_FOUND", {"mapping_id": "1"}),
    "unload": (
        lambda full: full.target.adapters.UnloadAdapter(pb.UnloadAdapterRequest(ref="b"), timeout=PATIENCE_SECONDS),
        "ADAPTER_NOT_FOUND",
        {"adapters": "b"},
    ),
}


@pytest.mark.parametrize(("end", "reason", "facts"), ENDS.values(), ids=ENDS.keys())
def test_a_call_that_has_nothing_to_wait_for_ends(
    full: Full, end: Callable[[Full], object], reason: str, facts: dict[str, str]
) -> None:
    """And who waits behind it is next."""
    one = full.first.set_later("b")
    full.waits(1)
    two = full.second.set_later("c")
    full.waits(2)
    end(full)
    refusal = refused(one.result)
    assert (refusal.reason, refusal.metadata) == (reason, facts)
    full.waits(1)
    full.holder.release_mapping(0)
    result(two)


def test_a_newer_call_for_the_mapping_takes_the_place_of_one_that_waits(full: Full) -> None:
    one = full.first.set_later("b")
    full.waits(1)
    newer = full.first.set_mapping(full.names[0])
    assert refused(one.result).reason == "MAPPING_NOT_FOUND"
    full.waits(0)
    request = forward(full.first, newer.generation, [1], item(full.target, 1))
    full.target.engine.Forward(request, timeout=PATIENCE_SECONDS)


def test_a_refused_call_ends_no_other(full: Full) -> None:
    """A newer call for the mapping takes the place of the one that waits only if it is not refused."""
    one = full.first.set_later("b")
    full.waits(1)
    for newer in (full.first.mapping("nobody"), full.first.mapping("c", load=True), full.first.mapping("c")):
        assert refusal_of(full.target, newer).reason in ("ADAPTER_NOT_FOUND", "SLOTS_EXHAUSTED", "ADAPTER_NOT_RESIDENT")
    assert not one.done()
    full.holder.release_mapping(0)
    result(one)


def test_a_call_waits_as_long_as_it_says(full: Full) -> None:
    slots = str(len(full.names))
    facts = {"slots": slots, "pinned": slots, "kept": "0", "loading": "0", "reserved": "0"}
    for wait in (0, 0.1):
        refusal = refusal_of(full.target, full.first.mapping("b", load=True, wait=seconds(wait)))
        assert (refusal.reason, refusal.metadata) == ("SLOTS_EXHAUSTED", facts)
        assert refusal.retry_seconds
    assert full.target.capacity().waiting == 0


def test_a_call_does_not_wait_for_what_cannot_be(full: Full) -> None:
    """More adapters than slots are refused at once, whatever it would wait."""
    wanted = [*full.names, "b"]
    refusal = refusal_of(full.target, full.first.mapping(*wanted, load=True, wait=seconds(3600)))
    assert (refusal.reason, refusal.retry_seconds) == ("SLOTS_EXHAUSTED", None)


def test_a_call_that_finds_room_does_not_wait(full: Full) -> None:
    full.holder.release_mapping(0)
    result(full.first.set_later("b"))
    result(full.second.set_later(full.names[1]))


def test_while_a_call_waits_its_old_mapping_has_no_pins_and_is_valid(full: Full) -> None:
    target, name = full.target, full.names[0]
    full.holder.release_mapping(0)
    request = forward(full.first, full.first.set_mapping(name).generation, [1], item(target, 1))
    call = full.first.set_later("b", "c")
    full.waits(1)
    for _ in range(2):
        (mapping,) = full.first.status.mappings
        assert (mapping.pinned, mapping.current, mapping.generation) == (False, True, request.generation)
        assert {adapter.name: adapter.pins for adapter in target.state().adapters}[name] == 0
        target.engine.Forward(request, timeout=PATIENCE_SECONDS)
    call.cancel()
    full.waits(0)
    target.engine.Forward(request, timeout=PATIENCE_SECONDS)
    assert full.first.status.mappings[0].pinned


def test_two_calls_that_want_what_the_other_has_do_not_wait_for_each_other(full: Full) -> None:
    for number, session in enumerate((full.first, full.second)):
        full.holder.release_mapping(number)
        session.set_mapping(full.names[number])
    one = full.first.set_later(full.names[0], "b")
    two = full.second.set_later(full.names[1], "c")
    done = next(session for session in _served(full, {full.first: one, full.second: two}))
    target = full.target
    assert target.capacity().waiting == 1
    done.release_mapping()
    assert {call.code() for call in (one, two)} == {grpc.StatusCode.OK}


def _served(full: Full, calls: dict[Session, Any]) -> Iterator[Session]:
    """The sessions whose calls are answered, the first of them as soon as it is."""
    eventually(lambda: any(call.done() for call in calls.values()))
    yield from (session for session, call in calls.items() if call.done())


def test_waiting_calls_are_counted(full: Full) -> None:
    one = full.first.set_later("b")
    full.waits(1)
    if full.target.metrics_url is not None:
        assert full.target.metrics()["slotcar_mappings_waiting", ()] == 1
    one.cancel()
    full.waits(0)


def test_so_many_calls_of_a_session_may_wait_and_harm_nobody(full: Full) -> None:
    """As many as it may have mappings; others have room in the queue."""
    most = 64
    calls = [full.first.set_later("b", mapping_id=number) for number in range(most)]
    full.waits(most)
    refusal = refused(full.first.set_mapping, "c", load=True, wait=seconds(30))
    found_and_wanted = (refusal.metadata["found"], refusal.metadata["wanted"])
    assert (refusal.reason, found_and_wanted) == ("CAPACITY_EXCEEDED", (str(most), str(most)))
    other = full.second.set_later("c")
    full.waits(most + 1)
    for call in (*calls, other):
        call.cancel()
    full.waits(0)
