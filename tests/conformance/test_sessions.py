"""A session's stream: what it says first, what it says later, and how a session outlives it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice

import grpc
import pytest
from google.protobuf import duration_pb2
from slotcar.v1 import adapter_service_pb2 as pb
from slotcar.v1 import engine_service_pb2, engine_service_pb2_grpc, layout_pb2

from tests.conformance.calls import refusal_of
from tests.conformance.items import forward, item
from tests.conformance.refusals import refused
from tests.conformance.target import PATIENCE_SECONDS, Session, Target, open_channel
from tests.waiting import eventually


def unload(target: Target, name: str) -> None:
    target.adapters.UnloadAdapter(pb.UnloadAdapterRequest(ref=name), timeout=PATIENCE_SECONDS)


@contextmanager
def watching(target: Target) -> Iterator[grpc.Call]:
    """Events from now on, the greeting left out."""
    events = target.adapters.WatchEvents(pb.WatchEventsRequest(), timeout=2 * PATIENCE_SECONDS)
    next(events)
    yield events
    events.cancel()


def wait_for_end(events: grpc.Call) -> str:
    """Why the next session that ends does, once it has."""
    return next(message.event.reason for message in events if message.event.kind == pb.EVENT_KIND_SESSION_ENDED)


def wait_for_close(call: grpc.Call) -> grpc.StatusCode:
    """How the stream ends, whatever comes before."""
    for _ in call:
        pass
    return call.code()


def test_a_session_opens_with_what_the_server_is(target: Target) -> None:
    state = target.state()
    with target.session() as session:
        opened, version = session.opened, session.first.version
        assert len(session.id) >= 32
        assert not opened.resumed
        assert opened.server == target.server
        assert opened.server.version
        assert opened.server.slots == len(opened.layout.slots) == len(state.layout.slots)
        assert opened.server.max_rank > 0
        assert opened.server.max_message_bytes > 0
        assert opened.model_spec == target.model
        assert opened.layout == state.layout
        assert opened.layout.version == version
    with target.session() as other:
        assert other.id != session.id


def test_every_answer_has_the_layout_version(target: Target) -> None:
    epoch = target.state().layout.version.epoch
    adapters, engine, later = target.adapters, target.engine, {"timeout": PATIENCE_SECONDS}
    with target.session() as session, watching(target) as events:
        loaded = target.load("sql")
        mapped = session.set_mapping("sql", None)
        computed = engine.Forward(forward(session, mapped.generation, [1, 2], item(target, 3)), **later)
        source = str(target.folder("sql"))
        versions = [
            loaded.layout,
            mapped.layout,
            computed.layout,
            session.release_mapping().layout,
            adapters.KeepAdapter(pb.KeepAdapterRequest(ref="sql"), **later).layout,
            adapters.ReleaseKeep(pb.ReleaseKeepRequest(ref="sql"), **later).layout,
            adapters.GetAdapter(pb.GetAdapterRequest(ref="sql"), **later).layout,
            adapters.EstimateAdapter(pb.EstimateAdapterRequest(source=source), **later).layout,
            adapters.ListAdapters(pb.ListAdaptersRequest(), **later).layout.version,
            adapters.UnloadAdapter(pb.UnloadAdapterRequest(ref="sql"), **later).layout,
            target.close_session(session.id).layout,
        ]
        assert {version.epoch for version in versions} == {epoch}
        generations = [version.generation for version in versions]
        assert generations == sorted(generations)
        assert generations[0] > 1
        assert next(events).layout.epoch == epoch
        assert computed.digests == [loaded.adapter.digest, ""]
        assert mapped.generation == mapped.layout.generation


def test_a_publish_is_told_whole(target: Target) -> None:
    with target.session() as session:
        loaded = target.load("sql")
        while (message := session.next("layout")).layout.slots[loaded.adapter.slot].digest != loaded.adapter.digest:
            pass
        while message.layout.slots[loaded.adapter.slot].state != layout_pb2.SLOT_STATE_OCCUPIED:
            message = session.next("layout")
        assert message.version == message.layout.version == loaded.layout
        assert len(message.layout.slots) == target.server.slots
        unload(target, "sql")
        freed = session.next("layout").layout
        assert freed.slots[loaded.adapter.slot].state == layout_pb2.SLOT_STATE_FREE
        assert freed.slots[loaded.adapter.slot].mod_generation <= loaded.layout.generation


def test_the_newest_layout_wins(target: Target) -> None:
    """A reader that was slow sees generations that only grow, and the newest at last."""
    with target.session() as session:
        for _ in range(30):
            target.load("sql")
            unload(target, "sql")
        newest = target.state().layout
        seen = [session.opened.layout]
        while seen[-1] != newest:
            seen.append(session.next("layout").layout)
        generations = [layout.version.generation for layout in seen]
        assert generations == sorted(set(generations))


def test_a_quiet_session_has_heartbeats(target: Target) -> None:
    with target.session() as session:
        for _ in range(2):
            assert session.next("heartbeat").version == target.state().layout.version


def test_a_heartbeat_has_the_version_of_its_moment(target: Target) -> None:
    with target.session() as session:
        first = session.set_mapping(None).generation
        newest = session.set_mapping(None)
        assert newest.generation > first
        session.next("heartbeat")
        assert session.next("heartbeat").version.generation == newest.layout.generation


def test_a_busy_session_has_heartbeats_too(target: Target) -> None:
    """Though something that is no layout happens all the time."""
    with target.session() as session, target.session() as other:
        session.next("heartbeat")
        start = time.monotonic()
        session.next("heartbeat")
        interval = time.monotonic() - start
        came = threading.Event()

        def read() -> None:
            with suppress(grpc.RpcError):
                session.next("heartbeat")
                came.set()

        reader = threading.Thread(target=read)
        reader.start()
        give_up = time.monotonic() + 10 * interval
        while not came.is_set() and time.monotonic() < give_up:
            other.release_mapping()
        beat = came.is_set()
        session.call.cancel()
        reader.join(PATIENCE_SECONDS)
        assert beat, f"no heartbeat in {10 * interval:.1f} s"


def test_a_session_is_resumed_with_its_mappings(target: Target) -> None:
    digest = target.load("sql").adapter.digest
    with target.session() as session:
        mapped = session.set_mapping("sql")
        session.call.cancel()
        with target.session(resume_session=session.id) as again:
            assert again.opened.resumed
            assert again.id == session.id
            assert again.opened.layout == target.state().layout
            assert target.state().adapters[0].pins == 1
            request = forward(again, mapped.generation, [1], item(target, 1))
            assert target.engine.Forward(request, timeout=PATIENCE_SECONDS).digests == [digest]
            assert again.next("heartbeat")


def test_a_second_resume_takes_over_and_the_first_stream_ends(target: Target) -> None:
    target.load("sql")
    with target.session() as first:
        generation = first.set_mapping("sql").generation
        with target.session(resume_session=first.id) as second:
            assert wait_for_close(first.call) is grpc.StatusCode.OK
            assert second.next("heartbeat")
            # The end of the first stream is not the end of the session, nor the start of its grace.
            request = forward(second, generation, [1], item(target, 1))
            target.engine.Forward(request, timeout=PATIENCE_SECONDS)
            with target.session(resume_session=first.id) as third:
                assert third.next("heartbeat")
                assert wait_for_close(second.call) is grpc.StatusCode.OK


def test_a_session_resumed_from_two_places_at_once_is_one_of_theirs(target: Target) -> None:
    """The newest wins, the other streams end, and nothing is lost."""
    target.load("sql")
    with target.session() as session, ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        generation = session.set_mapping("sql").generation
        session.hold("sql")
        channels = [stack.enter_context(open_channel(target.address)) for _ in range(2)]
        together = threading.Barrier(2)

        def resume(channel: grpc.Channel) -> grpc.Call:
            stub = engine_service_pb2_grpc.EngineServiceStub(channel)
            request = engine_service_pb2.OpenSessionRequest(resume_session=session.id)
            together.wait()
            stream = stub.OpenSession(request, timeout=PATIENCE_SECONDS)
            opened = next(stream).opened
            assert (opened.session, opened.resumed) == (session.id, True)
            return stream

        streams = list(pool.map(resume, channels))
        assert sorted(len(list(islice(stream, 4))) < 4 for stream in streams) == [False, True]
        status = session.status
        assert (status.attached, len(status.mappings), len(status.holds)) == (True, 1, 1)
        request = forward(session, generation, [1], item(target, 1))
        target.engine.Forward(request, timeout=PATIENCE_SECONDS)
        assert wait_for_close(session.call) is grpc.StatusCode.OK


def test_a_session_ends_when_its_grace_has_passed(target: Target) -> None:
    target.load("sql")
    grace = duration_pb2.Duration(nanos=1)
    with watching(target) as events, target.session(grace=grace) as session:
        session.set_mapping("sql")
        session.call.cancel()
        assert wait_for_end(events) == "grace passed"
        with target.unchanged():
            assert refused(session.set_mapping, "sql").reason == "SESSION_NOT_FOUND"
            refusal = refused(target.session(resume_session=session.id).__enter__)
            assert refusal.reason == "SESSION_NOT_FOUND"
        assert target.state().adapters[0].pins == 0


def test_a_grace_does_not_run_while_a_stream_lives(target: Target) -> None:
    with target.session(grace=duration_pb2.Duration()) as session:
        for _ in range(3):
            assert session.next("heartbeat")
        session.set_mapping(None)


def test_a_client_that_vanishes_leaves_nothing(target: Target) -> None:
    """Its channel is closed in the middle of things, without a word."""
    target.load("sql")
    vanishing = Target(target.address, target.root)
    with watching(target) as events:
        session = Session(vanishing, engine_service_pb2.OpenSessionRequest(grace=duration_pb2.Duration()))
        generation = session.set_mapping("sql").generation
        request = forward(session, generation, [1], item(target, 1))
        calls = [vanishing.engine.Forward.future(request, timeout=PATIENCE_SECONDS) for _ in range(20)]
        vanishing.close()
        del calls
        assert wait_for_end(events) == "grace passed"
    assert target.state().adapters[0].pins == 0


def test_closing_a_session_ends_its_stream_and_its_pins(target: Target) -> None:
    target.load("sql")
    with watching(target) as events, target.session() as session:
        session.set_mapping("sql", mapping_id=1)
        session.set_mapping("sql", mapping_id=2)
        assert target.state().adapters[0].pins == 2
        target.close_session(session.id)
        assert wait_for_close(session.call) is grpc.StatusCode.OK
        assert wait_for_end(events) == "closed"
        assert target.state().adapters[0].pins == 0


def test_a_session_id_is_not_told_to_others(target: Target) -> None:
    """It is all that it takes to act in the session's name."""
    with watching(target) as events, target.session() as session:
        message = next(events)
        assert message.event.kind == pb.EVENT_KIND_SESSION_OPENED
        assert session.id not in str(message)


@pytest.mark.parametrize("seconds", [0, 3600])
def test_a_grace_may_be_between_nothing_and_an_hour(target: Target, seconds: int) -> None:
    with target.session(grace=duration_pb2.Duration(seconds=seconds)) as session:
        assert session.id


# Versions


def neighbour(version: str, by: int) -> str:
    """The version whose minor number is so much more or less."""
    major, minor, *rest = version.split(".")
    return ".".join([major, str(int(minor) + by), *rest])


@pytest.mark.parametrize("make", [str, lambda version: "", lambda version: neighbour(version, 1) + "-dev"])
def test_neighbouring_versions_work_together(target: Target, make: Callable[[str], str]) -> None:
    version = make(target.server.version)
    with target.session(client_version=version) as session:
        assert next(session.join(0, client_version=version)).opened.session == session.id


FAR = [lambda version: neighbour(version, 2), lambda _: "999.0.0", lambda _: "new", lambda _: "0", lambda _: "1" * 5000]


@pytest.mark.parametrize("make", FAR)
def test_versions_that_are_too_far_apart_are_refused(target: Target, make: Callable[[str], str]) -> None:
    """Whatever else is wrong, as the rest of the request may be of another version."""
    version = make(target.server.version)
    with target.session() as session:
        for request in (
            engine_service_pb2.OpenSessionRequest(client_version=version),
            engine_service_pb2.OpenSessionRequest(client_version=version, ranks=2**31, client_name="\n"),
            engine_service_pb2.OpenSessionRequest(client_version=version, resume_session=session.id),
            engine_service_pb2.JoinSessionRequest(client_version=version, session=session.id),
            engine_service_pb2.JoinSessionRequest(client_version=version, session="nobody", rank=9),
        ):
            refusal = refusal_of(target, request)
            assert refusal.reason == "VERSION_MISMATCH"
            assert (refusal.fields, refusal.subjects) == (("client_version",), ("client_version",))
            assert refusal.metadata["found"].startswith(version[:100])
            assert refusal.metadata["wanted"] == target.server.version
        assert session.next("heartbeat")


def test_a_thousand_abandoned_sessions_leave_nothing(target: Target) -> None:
    """Each has a mapping and a hold and closes nothing; there are never many at a time, as their grace is none."""
    target.load("sql")
    before = target.state()
    for _ in range(1000):
        session = Session(target, engine_service_pb2.OpenSessionRequest(grace=duration_pb2.Duration()))
        session.set_mapping("sql")
        session.hold("sql")
        session.call.cancel()
    eventually(lambda: not target.sessions())
    assert target.state() == before
    with target.session() as session:
        session.set_mapping("sql")
