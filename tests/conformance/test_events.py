"""Events: a greeting, the past as far as asked for, then everything in its order, with reasons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from slotcar.v1 import adapter_service_pb2 as pb
from slotcar.v1 import adapter_service_pb2_grpc

from tests.conformance.items import forward, item
from tests.conformance.refusals import refused
from tests.conformance.target import ABSENT_DIGEST, PATIENCE_SECONDS, Target, open_channel

MOST_REPLAYED = 1000


@contextmanager
def watching(target: Target, replay: int = 0) -> Iterator[grpc.Call]:
    """All messages of a subscription."""
    events = target.adapters.WatchEvents(pb.WatchEventsRequest(replay=replay), timeout=2 * PATIENCE_SECONDS)
    yield events
    events.cancel()


def take(events: grpc.Call, count: int) -> list[pb.WatchEventsResponse]:
    return [next(events) for _ in range(count)]


def brief(messages: list[pb.WatchEventsResponse]) -> list[str]:
    """Kind and name of each event, as LOADED sql."""
    kinds = [pb.EventKind.Name(message.event.kind).removeprefix("EVENT_KIND_") for message in messages]
    return [f"{kind} {message.event.name}".strip() for kind, message in zip(kinds, messages, strict=True)]


def unload(target: Target, name: str, *, force: bool = False) -> None:
    target.adapters.UnloadAdapter(pb.UnloadAdapterRequest(ref=name, force=force), timeout=PATIENCE_SECONDS)


def test_the_first_message_comes_at_once_and_has_no_event(target: Target) -> None:
    with watching(target) as events:
        greeting = next(events)
        assert not greeting.HasField("event")
        assert greeting.missed == 0
        assert greeting.layout == target.state().layout.version


def test_an_eviction_says_who_took_the_slot(target: Target) -> None:
    names = target.fill_slots()
    digests = {adapter.name: adapter.digest for adapter in target.state().adapters}
    slots = {adapter.name: adapter.slot for adapter in target.state().adapters}
    with watching(target) as events:
        next(events)
        loaded = target.load("taker")
        evicted, arrived = take(events, 2)
    assert brief([evicted, arrived]) == [f"EVICTED {names[0]}", "LOADED taker"]
    event = evicted.event
    assert event.reason == "slot taken by taker"
    assert (event.digest, event.slot) == (digests[names[0]], slots[names[0]])
    assert event.HasField("slot")
    assert arrived.event.slot == event.slot == loaded.adapter.slot
    assert arrived.event.digest == loaded.adapter.digest
    assert event.generation < arrived.event.generation == loaded.layout.generation
    assert 0 < event.time.ToNanoseconds() <= arrived.event.time.ToNanoseconds()
    assert evicted.layout.epoch == loaded.layout.epoch
    assert evicted.missed == arrived.missed == 0


def test_everything_that_happens_is_told_in_its_order(target: Target) -> None:
    target.load("sql")
    target.folder("chat")
    with watching(target) as events:
        next(events)
        with target.session(client_name="teller") as session:
            target.adapters.KeepAdapter(pb.KeepAdapterRequest(ref="sql"), timeout=PATIENCE_SECONDS)
            target.adapters.ReleaseKeep(pb.ReleaseKeepRequest(ref="sql"), timeout=PATIENCE_SECONDS)
            session.set_mapping("sql")
            session.hold("sql")
            session.release_hold()
            session.release_hold()
            source = str(target.root / "chat")
            refused(target.load, "sql", source=source)
            target.load("sql", source=source, on_conflict=pb.ON_CONFLICT_REPLACE)
            session.set_mapping("sql")
            unload(target, "sql")
            session.release_mapping()
            target.load("sql")
            generation = session.set_mapping("sql").generation
            unload(target, "sql", force=True)
            refused(target.engine.Forward, forward(session, generation, [1], item(target, 1)), timeout=PATIENCE_SECONDS)
        told = take(events, 16)
    assert brief(told) == [
        "SESSION_OPENED",
        "KEPT sql",
        "KEEP_RELEASED sql",
        "HELD sql",
        "HOLD_RELEASED sql",
        "REFUSED sql",
        "REPLACED sql",
        "DRAINING",
        "FREED",
        "UNLOADED sql",
        "DRAINING",
        "FREED",
        "LOADED sql",
        "UNLOADED sql",
        "FORWARD_STALE",
        "SESSION_ENDED",
    ]
    assert [message.missed for message in told] == [0] * len(told)
    generations = [message.event.generation for message in told]
    assert generations == sorted(generations)
    reasons = [message.event.reason for message in told]
    assert reasons[0] == "teller"
    assert reasons[4] == "released"
    assert reasons[5].startswith("ADAPTER_CONFLICT: ")
    assert reasons[6].startswith("was sha256:")
    assert reasons[7] == "1 pins left"
    assert reasons[13] == "forced; 1 pins ended"
    assert reasons[14].startswith("a slot of mapping 1 changed ")
    assert reasons[15] == "closed"


def test_a_refused_load_is_told_with_its_reason(target: Target) -> None:
    with watching(target) as events:
        next(events)
        refused(target.load, "bad", source="/etc")
        refused(target.load, "sql", ref=f"other@{ABSENT_DIGEST}")
        denied, mismatch = take(events, 2)
    assert brief([denied, mismatch]) == ["REFUSED bad", "REFUSED other"]
    assert denied.event.reason.startswith("SOURCE_DENIED: ")
    assert mismatch.event.reason.startswith("DIGEST_MISMATCH: ")
    assert not denied.event.HasField("slot")


def test_the_past_is_told_first_and_in_order(target: Target) -> None:
    for name in ("a", "b", "c"):
        target.load(name)
        unload(target, name)
    with watching(target, replay=4) as events:
        greeting = next(events)
        assert (greeting.HasField("event"), greeting.replayed) == (False, 4)
        past = take(events, 4)
        assert brief(past) == ["FREED", "LOADED c", "UNLOADED c", "FREED"]
        assert [message.missed for message in past] == [0] * 4
        target.load("a")
        assert brief(take(events, 1)) == ["LOADED a"]


@pytest.mark.parametrize("replay", [0, 1, 2**32 - 1])
def test_no_more_of_the_past_than_asked_for_or_kept_is_told(target: Target, replay: int) -> None:
    with watching(target, replay=replay) as events, target.session(client_name=f"mark-{replay}"):
        messages = [next(events)]
        while messages[-1].event.reason != f"mark-{replay}":
            messages.append(next(events))
    past = messages[1:-1]
    assert len(past) <= messages[0].replayed <= min(replay, MOST_REPLAYED)
    assert {message.replayed for message in messages[1:]} == {0}
    assert {message.missed for message in past} <= {0}
    times = [message.event.time.ToNanoseconds() for message in past]
    assert times == sorted(times)


def test_a_watcher_that_does_not_read_is_told_how_many_it_missed(target: Target) -> None:
    """Told and missed together are all that happened, and what is told is in order."""
    target.load("sql")
    names = [f"{n:04}{'x' * 190}" for n in range(1500)]
    small = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
    with open_channel(target.address, *small) as channel:
        stub = adapter_service_pb2_grpc.AdapterServiceStub(channel)
        events = stub.WatchEvents(pb.WatchEventsRequest(), timeout=2 * PATIENCE_SECONDS)
        next(events)
        for start in range(0, len(names), 100):
            requests = [pb.LoadAdapterRequest(ref=name, source="/") for name in names[start : start + 100]]
            calls = [target.adapters.LoadAdapter.future(request, timeout=PATIENCE_SECONDS) for request in requests]
            assert {call.code() for call in calls} == {grpc.StatusCode.PERMISSION_DENIED}
        target.load("sql")
        told, seen = [], 0
        while seen < len(names) + 1:
            message = next(events)
            seen += 1 + message.missed
            told.append(message)
    assert seen == len(names) + 1
    assert len(told) < len(names)
    assert len({message.event.name for message in told}) == len(told)
    generations = [message.event.time.ToNanoseconds() for message in told]
    assert generations == sorted(generations)


def test_two_watchers_are_told_the_same(target: Target) -> None:
    with watching(target) as first, watching(target) as second:
        next(first), next(second)
        for name in ("sql", "chat"):
            target.load(name)
        assert [message.event for message in take(first, 2)] == [message.event for message in take(second, 2)]
