"""SIGTERM: nothing new is taken, what runs goes on until it is quiet, and then every stream is told why it ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2
from slotcar.v1 import adapter_service_pb2 as pb
from slotcar.v1 import engine_service_pb2

from tests.conformance.calls import parts, refusal_of
from tests.conformance.items import forward, item
from tests.conformance.refusals import read, refused
from tests.conformance.target import PATIENCE_SECONDS, Streamed, Target
from tests.waiting import eventually

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def end_of(call: grpc.Call) -> str:
    """The reason with which the stream is refused in the end, whatever comes before."""
    with pytest.raises(grpc.RpcError) as caught:
        deque(call, maxlen=0)
    return read(caught.value).reason


def test_a_server_that_shuts_down(start_target: Callable[..., Target]) -> None:
    target = start_target().learn()
    assert target.process is not None
    assert target.process.process is not None
    names = target.fill_slots()
    target.load("sql")
    stream, quiet = Streamed(target), threading.Event()
    events = target.adapters.WatchEvents(pb.WatchEventsRequest(), timeout=PATIENCE_SECONDS)
    next(events)
    health = target.health.Watch(health_pb2.HealthCheckRequest(service="readiness"), timeout=PATIENCE_SECONDS)
    next(health)
    with target.session() as session, target.session() as other:
        other.set_mapping(*names[1:])
        request = forward(session, session.set_mapping("sql").generation, [1], item(target, 1))
        answers: list[engine_service_pb2.ForwardStreamResponse] = []
        joined = session.join(0)
        next(joined)

        def work() -> None:
            while not quiet.is_set():
                answers.append(stream.ask(engine_service_pb2.ForwardStreamRequest(forward=request)))

        engine = threading.Thread(target=work)
        engine.start()
        target.process.process.terminate()
        assert next(health).status == NOT_SERVING
        live = target.health.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=PATIENCE_SECONDS)
        assert live.status == health_pb2.HealthCheckResponse.SERVING

        waiting = session.set_later(names[0], mapping_id=9)
        eventually(target.is_waiting(1))
        before, computed = target.state(), len(answers)
        assert refused(next, session.join(0)).reason == "SHUTTING_DOWN"
        assert refusal_of(target, *parts(target.folder("sql"), "sql")).reason == "SHUTTING_DOWN"
        assert refused(target.load, "sql").reason == "SHUTTING_DOWN"
        assert refused(target.session().__enter__).reason == "SHUTTING_DOWN"
        assert refused(target.session(resume_session=session.id).__enter__).reason == "SHUTTING_DOWN"
        assert target.state() == before
        # Those who are there go on.
        session.set_mapping("sql", None, mapping_id=2)
        session.hold("sql")
        session.release_hold()
        target.engine.Fence(engine_service_pb2.FenceRequest(session=session.id), timeout=PATIENCE_SECONDS)
        target.adapters.GetAdapter(pb.GetAdapterRequest(ref="sql"), timeout=PATIENCE_SECONDS)
        while len(answers) < computed + 10:
            assert engine.is_alive()
            target.engine.Forward(request, timeout=PATIENCE_SECONDS)
        quiet.set()
        engine.join(PATIENCE_SECONDS)
        assert {answer.WhichOneof("result") for answer in answers} == {"forward"}

        assert end_of(session.call) == "SHUTTING_DOWN"
        assert end_of(events) == "SHUTTING_DOWN"
        assert end_of(stream.call) == "SHUTTING_DOWN"
        assert end_of(joined) == "SHUTTING_DOWN"
        assert refused(waiting.result).reason == "SHUTTING_DOWN"
        assert target.process.process.wait(PATIENCE_SECONDS) == 0
        with pytest.raises(grpc.RpcError) as caught:
            target.state()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        stream.close()
