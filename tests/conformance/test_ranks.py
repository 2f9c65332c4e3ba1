"""Sessions of several ranks: who joins, and one mapping for all of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from slotcar.v1 import adapter_service_pb2 as pb
from slotcar.v1 import engine_service_pb2 as engine
from slotcar.v1 import engine_service_pb2_grpc

from tests.conformance.calls import code_of, refusal_of
from tests.conformance.items import forward, item
from tests.conformance.refusals import refused
from tests.conformance.target import PATIENCE_SECONDS, Session, Target, open_channel, seconds
from tests.conformance.watching import watching
from tests.waiting import eventually

RANKS = 4
MOST_RANKS = 1024


def loaded(target: Target, *names: str) -> list[str]:
    """Loads the adapters and returns their refs with digests."""
    return [f"{name}@{target.load(name).adapter.digest}" for name in names]


def joined(session: Session) -> list[int]:
    return list(session.status.joined)


# Who joins


def test_a_rank_joins(target: Target) -> None:
    with target.session(ranks=3) as session:
        assert session.opened.ranks == session.status.ranks == 3
        assert joined(session) == []
        stream = session.join(2, client_version=target.server.version)
        first = next(stream)
        assert first.WhichOneof("message") == "opened"
        opened = first.opened
        assert (opened.session, opened.ranks, opened.resumed) == (session.id, 3, False)
        assert (opened.server, opened.model_spec) == (target.server, target.model)
        assert opened.layout.version == first.version == target.state().layout.version
        other = session.join(0)
        next(other)
        assert joined(session) == [0, 2]
        layout = target.load("sql").layout
        while (message := next(stream)).WhichOneof("message") != "layout" or message.version != layout:
            assert message.WhichOneof("message") in ("layout", "heartbeat")
        assert message.layout.version == layout
        assert next(stream).WhichOneof("message") == "heartbeat"
        other.cancel()
        eventually(lambda: joined(session) == [2])
        target.close_session(session.id)
        assert code_of(stream) is grpc.StatusCode.OK


def test_a_second_stream_of_a_rank_takes_over(target: Target) -> None:
    with target.session(ranks=2) as session:
        old, new = session.join(1), session.join(1)
        next(old)
        next(new)
        newest = session.join(1)
        next(newest)
        assert {code_of(old), code_of(new)} == {grpc.StatusCode.OK}
        assert joined(session) == [1]
        assert next(newest).WhichOneof("message") == "heartbeat"
        newest.cancel()
        eventually(lambda: joined(session) == [])


def test_a_joined_stream_does_not_keep_the_session_alive(target: Target) -> None:
    with watching(target) as events, target.session(ranks=2, grace=seconds(0)) as session:
        stream = session.join(1)
        next(stream)
        session.call.cancel()
        assert events.wait(pb.EVENT_KIND_SESSION_ENDED, session=session.short).reason == "grace passed"
        assert code_of(stream) is grpc.StatusCode.OK


def test_the_end_of_a_joined_stream_is_not_the_end_of_the_session(target: Target) -> None:
    with target.session(ranks=2, grace=seconds(0)) as session:
        stream = session.join(0)
        next(stream)
        stream.cancel()
        eventually(lambda: joined(session) == [])
        assert session.next("heartbeat")
        assert session.status.attached


def test_ranks_stay_joined_while_the_session_is_resumed(target: Target) -> None:
    with target.session(ranks=2) as session:
        stream = session.join(1)
        next(stream)
        with target.session(resume_session=session.id) as again:
            assert again.opened.ranks == 2
            assert code_of(session.call) is grpc.StatusCode.OK
            assert next(stream).WhichOneof("message") == "heartbeat"
            assert joined(again) == [1]
        stream.cancel()


@pytest.mark.parametrize("rank", [2, 3, 2**32 - 1])
def test_a_rank_that_the_session_does_not_have_is_refused(target: Target, rank: int) -> None:
    refs = loaded(target, "sql")
    with target.session(ranks=2) as session:
        generation = session.set_mapping(*refs).generation
        for request in (
            engine.JoinSessionRequest(session=session.id, rank=rank),
            forward(session, generation, [1], item(target, 1), rank=rank),
        ):
            refusal = refusal_of(target, request)
            assert (refusal.reason, refusal.fields) == ("REQUEST_INVALID", ("rank",))
            assert refusal.metadata["found"] == str(rank)
        for sound in range(2):
            request = forward(session, generation, [1], item(target, 1), rank=sound)
            target.engine.Forward(request, timeout=PATIENCE_SECONDS)


def test_a_session_has_one_rank_unless_said_otherwise(target: Target) -> None:
    with target.session() as session:
        assert session.opened.ranks == 1
        assert next(session.join(0)).opened.session == session.id
        assert refused(next, session.join(1)).fields == ("rank",)


@pytest.mark.parametrize("ranks", [MOST_RANKS + 1, 2**32 - 1])
def test_more_ranks_than_there_may_be_are_refused(target: Target, ranks: int) -> None:
    refusal = refusal_of(target, engine.OpenSessionRequest(ranks=ranks))
    assert (refusal.reason, refusal.fields) == ("REQUEST_INVALID", ("ranks",))
    with target.session(ranks=MOST_RANKS) as session:
        assert next(session.join(MOST_RANKS - 1)).opened.ranks == MOST_RANKS


# Mappings


def test_a_bare_name_is_refused_in_a_session_of_several_ranks(target: Target) -> None:
    """Two ranks might find other bytes under it."""
    refs = loaded(target, "sql", "chat")
    with target.session(ranks=2) as session:
        for fields in ({}, {"load": True}, {"wait": seconds(1)}):
            refusal = refusal_of(target, session.mapping(refs[0], None, "chat", **fields))
            assert (refusal.reason, refusal.fields) == ("REQUEST_INVALID", ("entries[2].ref",))
            assert refusal.metadata["found"] == "chat"
        session.set_mapping(*refs, None)
        session.hold("chat")


def test_every_rank_gets_the_recorded_answer(target: Target) -> None:
    """At one time, each over a connection of its own."""
    refs = loaded(target, "sql", "chat")
    with target.session(ranks=RANKS) as session, ExitStack() as stack, ThreadPoolExecutor(RANKS) as pool:
        channels = [stack.enter_context(open_channel(target.address)) for _ in range(RANKS)]
        together = threading.Barrier(RANKS)

        def map_(channel: grpc.Channel) -> engine.SetMappingResponse:
            stub = engine_service_pb2_grpc.EngineServiceStub(channel)
            together.wait()
            return stub.SetMapping(session.mapping(*refs, None, load=True), timeout=PATIENCE_SECONDS)

        answers = list(pool.map(map_, channels))
        assert {answer.generation for answer in answers} == {answers[0].generation}
        assert all(answer.entries == answers[0].entries for answer in answers)
        assert len(session.status.mappings) == 1
        computed = [_compute(target, session, answers[0].generation, rank) for rank in range(RANKS)]
        assert all(list(answer.digests) == list(computed[0].digests) for answer in computed)


def _compute(target: Target, session: Session, generation: int, rank: int) -> Any:
    request = forward(session, generation, [1, 1, 1], item(target, 3), rank=rank)
    return target.engine.Forward(request, timeout=PATIENCE_SECONDS)


def test_other_entries_are_another_mapping_for_every_rank(target: Target) -> None:
    """A rank that still has the one before is stale, and repeats what the others said."""
    sql, chat = loaded(target, "sql", "chat")
    with target.session(ranks=2) as session:
        old = session.set_mapping(sql).generation
        assert session.set_mapping(sql).generation == old
        new = session.set_mapping(chat).generation
        assert new > old
        request = forward(session, old, [1], item(target, 1), rank=1)
        refusal = refused(target.engine.Forward, request, timeout=PATIENCE_SECONDS)
        assert (refusal.reason, refusal.metadata["wanted"]) == ("LAYOUT_STALE", str(new))
        assert session.set_mapping(chat).generation == new
        assert session.set_mapping(sql).generation > new


def test_an_answer_that_is_not_current_is_not_repeated(target: Target) -> None:
    (sql,) = loaded(target, "sql")
    unload = pb.UnloadAdapterRequest(ref="sql", force=True)
    with target.session(ranks=2) as session:
        old = session.set_mapping(sql).generation
        target.adapters.UnloadAdapter(unload, timeout=PATIENCE_SECONDS)
        refusal = refusal_of(target, session.mapping(sql))
        assert (refusal.reason, refusal.metadata) == ("ADAPTER_NOT_FOUND", {"adapters": sql})
        target.load("sql")
        assert session.set_mapping(sql).generation > old


def test_a_mapping_of_one_rank_is_another_each_time(target: Target) -> None:
    """So that a bare name is looked up again."""
    target.load("sql")
    with target.session() as session:
        assert session.set_mapping("sql").generation < session.set_mapping("sql").generation
