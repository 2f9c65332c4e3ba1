"""What operators see and do: sessions and what they pin, the end of one, and how full the server is; and Fence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
from slotcar.v1 import adapter_service_pb2 as pb
from slotcar.v1 import engine_service_pb2 as engine
from slotcar.v1.adapter_pb2 import TIER_DEVICE, TIER_HOST

from tests.conformance.calls import code_of, refusal_of
from tests.conformance.items import forward, item
from tests.conformance.refusals import refused
from tests.conformance.target import PATIENCE_SECONDS, Session, Target, seconds
from tests.conformance.watching import watching
from tests.waiting import eventually


def page(target: Target, **request: Any) -> pb.ListSessionsResponse:
    return target.adapters.ListSessions(pb.ListSessionsRequest(**request), timeout=PATIENCE_SECONDS)


def end(target: Target, session: str) -> pb.EndSessionResponse:
    return target.adapters.EndSession(pb.EndSessionRequest(session=session), timeout=PATIENCE_SECONDS)


@contextmanager
def many(target: Target, count: int) -> Iterator[list[Session]]:
    with ExitStack() as stack:
        yield [stack.enter_context(target.session(client_name=f"engine {number}")) for number in range(count)]


# Lists


def test_a_list_of_sessions_says_who_pins_what(target: Target) -> None:
    sql, chat = (target.load(name).adapter for name in ("sql", "chat"))
    refs = [f"{adapter.name}@{adapter.digest}" for adapter in (sql, chat)]
    with target.session(client_name="one", ranks=2, reserved_slots=1) as one, target.session(client_name="two") as two:
        first = one.set_mapping(refs[0], None, refs[0], mapping_id=2**64 - 1)
        one.set_mapping(None, mapping_id=3)
        one.hold(refs[0], 8, tier=TIER_DEVICE)
        one.hold(refs[1], 7, duration=seconds(60))
        second = two.set_mapping("sql", "sql")
        answer = page(target)
        assert answer.layout == target.state().layout
        mine, other = answer.sessions
        assert (mine.session, mine.client_name, mine.attached) == (one.short, "one", True)
        assert (mine.ranks, list(mine.joined), mine.reserved_slots, mine.forwards_in_flight) == (2, [], 1, 0)
        base, mapped = mine.mappings
        assert (base.mapping_id, list(base.refs), list(base.slots), base.pinned, base.current) == (
            3,
            [],
            [],
            True,
            True,
        )
        assert (mapped.mapping_id, mapped.generation) == (2**64 - 1, first.generation)
        assert (list(mapped.refs), list(mapped.slots)) == (refs[:1], [sql.slot])
        host, device = mine.holds
        assert (host.hold_id, host.ref, host.tier) == (7, refs[1], TIER_HOST)
        assert 0 < host.left.ToNanoseconds() <= seconds(60).ToNanoseconds()
        assert (device.hold_id, device.ref, device.tier, device.HasField("left")) == (8, refs[0], TIER_DEVICE, False)
        assert (other.session, other.client_name, other.ranks) == (two.short, "two", 1)
        assert (list(other.mappings[0].refs), other.mappings[0].generation) == (refs[:1], second.generation)
        assert list(other.mappings[0].slots) == [sql.slot]
        assert {adapter.name: adapter.pins for adapter in target.state().adapters} == {"sql": 3, "chat": 1}


def test_a_session_in_its_grace_is_listed_with_what_is_left(target: Target) -> None:
    with target.session(grace=seconds(3600)) as session:
        assert not session.status.HasField("grace_left")
        session.call.cancel()
        eventually(lambda: not session.status.attached)
        assert 0 < session.status.grace_left.ToNanoseconds() <= seconds(3600).ToNanoseconds()
        with target.session(resume_session=session.id):
            assert session.status.attached
            assert not session.status.HasField("grace_left")


def test_a_mapping_that_is_stale_is_listed_as_such(target: Target) -> None:
    target.load("sql")
    with target.session() as session:
        session.set_mapping("sql")
        target.adapters.UnloadAdapter(pb.UnloadAdapterRequest(ref="sql", force=True), timeout=PATIENCE_SECONDS)
        (mapping,) = session.status.mappings
        assert (mapping.pinned, mapping.current) == (False, False)


@pytest.mark.parametrize("page_size", [1, 2, 4, 5, 6, 2**32 - 1])
def test_pages_together_are_all_sessions(target: Target, page_size: int) -> None:
    """In the order in which they were opened, of one moment, whatever happens between two pages."""
    with many(target, 5) as sessions:
        answers = [page(target, page_size=page_size)]
        target.close_session(sessions[-1].id)
        target.load("newcomer")
        while answers[-1].next_page_token:
            answers.append(page(target, page_size=page_size, page_token=answers[-1].next_page_token))
        listed = [status for answer in answers for status in answer.sessions]
        assert [status.session for status in listed] == [session.short for session in sessions]
        assert [status.client_name for status in listed] == [f"engine {number}" for number in range(5)]
        assert len(answers) == -(-5 // page_size)
        assert all(answer.layout == answers[0].layout for answer in answers)


@pytest.mark.parametrize("token", ["garbage", ":1", f"{'0' * 32}:1", "{name}:-1", "{name}:", "{list}", "x" * 2000])
def test_a_token_that_is_not_of_this_list_is_refused(target: Target, token: str) -> None:
    for name in ("a", "b"):
        target.load(name)
    others = target.adapters.ListAdapters(pb.ListAdaptersRequest(page_size=1), timeout=PATIENCE_SECONDS)
    with many(target, 2):
        name = page(target, page_size=1).next_page_token.rpartition(":")[0]
        text = token.format(name=name, list=others.next_page_token)
        refusal = refusal_of(target, pb.ListSessionsRequest(page_token=text))
        assert (refusal.reason, refusal.fields) == ("REQUEST_INVALID", ("page_token",))


def test_no_session_is_one_empty_page(target: Target) -> None:
    answer = page(target)
    assert (list(answer.sessions), answer.next_page_token) == ([], "")
    assert answer.layout == target.state().layout


# The end of a session


def test_an_operator_ends_a_session(target: Target) -> None:
    target.load("sql")
    with watching(target) as events, target.session(reserved_slots=1) as session, target.session() as other:
        generation = session.set_mapping("sql").generation
        session.hold("sql", tier=TIER_DEVICE)
        answer = end(target, session.short)
        assert answer.ended
        assert answer.layout == target.state().layout.version
        assert code_of(session.call) is grpc.StatusCode.OK
        assert events.wait(pb.EVENT_KIND_SESSION_ENDED, session=session.short).reason == "ended by an operator"
        capacity = target.capacity()
        assert (capacity.sessions, capacity.slots_pinned, capacity.slots_reserved) == (1, 0, 0)
        for request in (
            session.mapping("sql"),
            forward(session, generation, [1], item(target, 1)),
            engine.OpenSessionRequest(resume_session=session.id),
        ):
            assert refusal_of(target, request).reason == "SESSION_NOT_FOUND"
        with target.unchanged():
            assert not end(target, session.short).ended
        assert other.next("heartbeat")


def test_no_other_word_ends_a_session(target: Target) -> None:
    """Above all not the whole id, which operators do not have."""
    with target.session() as session, target.unchanged():
        short = session.short
        for word in (
            "",
            session.id,
            short[:-1],
            session.id[:9],
            f" {short}",
            short.upper() + "!",
            "0" * 8,
            "x" * 10_000,
        ):
            assert not end(target, word).ended
        assert session.next("heartbeat")


# Capacity


def test_capacity_counts_what_there_is(target: Target) -> None:
    slots, empty = target.server.slots, target.capacity()
    assert (empty.slots, empty.slots_free, empty.slots_available) == (slots, slots, slots)
    assert (empty.adapters, empty.sessions, empty.keeps, empty.waiting, empty.slots_reserved) == (0, 0, 0, 0, 0)
    assert empty.host_bytes_held == 0
    widths = sum(site.in_features + site.out_features for site in target.model.sites)
    assert empty.slot_bytes >= widths * target.server.max_rank * 2
    assert min(empty.host_bytes_capacity, empty.adapters_capacity, empty.sessions_capacity) > 0
    names = target.fill_slots()
    target.adapters.KeepAdapter(pb.KeepAdapterRequest(ref=names[0]), timeout=PATIENCE_SECONDS)
    with target.session() as session:
        session.set_mapping(names[1])
        session.hold(names[1])
        target.adapters.UnloadAdapter(pb.UnloadAdapterRequest(ref=names[1]), timeout=PATIENCE_SECONDS)
        full = target.capacity()
        assert full.layout == target.state().layout.version
        assert (full.slots_occupied, full.slots_draining, full.slots_pinned) == (slots - 1, 1, 1)
        assert (full.slots_available, full.keeps, full.sessions) == (slots - 2, 1, 1)
        assert full.adapters == slots - 1
        size = target.state().adapters[0].bytes
        assert full.host_bytes_used >= slots * size
        assert full.host_bytes_held == size


# Forwards that compute for longer than they travel.
LARGE_RANK, LARGE_ROWS, LARGE_CALLS = 1024, 2048, 8
PREPARED: dict[str, Callable[[Target, ExitStack], object]] = {
    "empty": lambda target, stack: None,
    "full": lambda target, stack: target.fill_slots(),
    "kept": lambda target, stack: [target.load(f"kept-{number}", keep=True) for number in range(2)],
    "reserved": lambda target, stack: stack.enter_context(target.session(reserved_slots=4)),
    "all-reserved": lambda target, stack: stack.enter_context(target.session(reserved_slots=6)),
    "reserved-and-used": lambda target, stack: _using(target, stack, reserved=2, used=1),
    "more-than-reserved": lambda target, stack: _using(target, stack, reserved=2, used=4),
    "reserved-and-kept": lambda target, stack: (
        target.load("kept", keep=True),
        _using(target, stack, reserved=3, used=3),
        target.fill_slots(),
    ),
}


def _using(target: Target, stack: ExitStack, *, reserved: int, used: int) -> None:
    session = stack.enter_context(target.session(reserved_slots=reserved))
    names = [f"used-{number}" for number in range(used)]
    for name in names:
        target.load(name, target_tier=TIER_HOST)
    session.set_mapping(*names, load=True)


@pytest.fixture(scope="module")
def roomy(start_target: Callable[..., Target]) -> Target:
    """A server with six slots, and room for adapters that take their time."""
    return start_target(slots=6, max_rank=LARGE_RANK).learn()


@pytest.mark.parametrize("prepare", PREPARED.values(), ids=PREPARED.keys())
def test_capacity_says_how_many_loads_succeed(roomy: Target, prepare: Callable[[Target, ExitStack], object]) -> None:
    """Each is pinned at once, so that the next one cannot take its slot."""
    roomy.unload_all()
    with ExitStack() as stack, roomy.session() as taker:
        prepare(roomy, stack)
        for left in range(roomy.capacity().slots_available, 0, -1):
            assert roomy.capacity().slots_available == left
            roomy.load(f"new-{left}")
            taker.set_mapping(f"new-{left}", mapping_id=left)
        assert roomy.capacity().slots_available == 0
        with roomy.unchanged():
            assert refused(roomy.load, "one-more").reason == "SLOTS_EXHAUSTED"


# Fence


def test_a_fence_waits_for_the_forwards_before_it(roomy: Target) -> None:
    """Answered or not: half of the callers are gone by then."""
    target = roomy
    target.unload_all()
    target.folder("large", rank=LARGE_RANK)
    target.load("large")
    with target.session() as session, target.session() as other:
        generation = session.set_mapping("large").generation
        request = forward(session, generation, [LARGE_ROWS], item(target, LARGE_ROWS))
        calls = [target.engine.Forward.future(request, timeout=PATIENCE_SECONDS) for _ in range(LARGE_CALLS)]
        eventually(lambda: session.status.forwards_in_flight + sum(call.done() for call in calls) >= LARGE_CALLS)
        for call in calls[::2]:
            call.cancel()
        fence = engine.FenceRequest(session=session.id)
        answer = target.engine.Fence(fence, timeout=PATIENCE_SECONDS)
        assert session.status.forwards_in_flight == 0
        assert answer.layout == target.state().layout.version
        assert {call.code() for call in calls[1::2]} == {grpc.StatusCode.OK}
        target.engine.Fence(engine.FenceRequest(session=other.id), timeout=PATIENCE_SECONDS)
