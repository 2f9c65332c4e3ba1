"""What is more than a server's settings allow is refused with how much there is and how much may be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from slotcar.v1 import adapter_service_pb2 as pb
from slotcar.v1 import engine_service_pb2, model_pb2

from tests.adapters import WEIGHTS_FILE
from tests.conformance.items import forward, item, matrix
from tests.conformance.refusals import Refusal, read_value, refused
from tests.conformance.target import MODEL, PATIENCE_SECONDS, Streamed, Target
from tests.waiting import eventually

MESSAGE_BYTES, RESPONSE_BYTES, ADAPTER_BYTES, HOST_BYTES = 1 << 20, 24 << 10, 24_000, 20_000
SESSIONS, MAPPINGS, HOLDS, ADAPTERS, ENTRIES, ROWS, SLOTS = 4, 3, 3, 64, 64, 96, 48
SETTINGS = {
    "max-message-bytes": MESSAGE_BYTES,
    "max-response-bytes": RESPONSE_BYTES,
    "max-adapter-bytes": ADAPTER_BYTES,
    "host-bytes": HOST_BYTES,
    "max-sessions": SESSIONS,
    "max-mappings": MAPPINGS,
    "max-holds": HOLDS,
    "max-adapters": ADAPTERS,
    "max-entries": ENTRIES,
    "max-rows": ROWS,
}


@pytest.fixture(scope="module")
def narrow(start_target: Callable[..., Target]) -> Target:
    extra = tuple(text for name, value in SETTINGS.items() for text in (f"--{name}", str(value)))
    target = start_target(slots=SLOTS, max_rank=32, extra=extra).learn(MODEL)
    assert target.server.max_message_bytes == MESSAGE_BYTES
    return target


@pytest.fixture
def limited(narrow: Target) -> Iterator[Target]:
    """A server with narrow limits, without adapters."""
    narrow.unload_all()
    yield narrow
    assert narrow.state().gauges["slotcar_sessions"] == 0


def sized(request: engine_service_pb2.ForwardRequest, size: int) -> engine_service_pb2.ForwardRequest:
    """The request with more bytes behind its x, so that it has `size` bytes in all."""
    x = request.items[0].x
    while request.ByteSize() != size:
        more = size - request.ByteSize()
        x.inline = x.inline + b"\0" * more if more > 0 else x.inline[:more]
    return request


def found_and_wanted(refusal: Refusal) -> tuple[str, str, str]:
    assert refusal.fields == ()
    assert refusal.retry_seconds is None
    return refusal.reason, refusal.metadata["found"], refusal.metadata["wanted"]


# Messages


def test_a_forward_above_the_limit_is_refused_with_sizes(limited: Target) -> None:
    limited.load("sql")
    stream = Streamed(limited)
    with limited.session() as session:
        generation = session.set_mapping("sql").generation
        good = forward(session, generation, [1], item(limited, 1))
        for size in (MESSAGE_BYTES + 1, 3 * MESSAGE_BYTES):
            large = sized(forward(session, generation, [1], item(limited, 1)), size)
            with limited.unchanged():
                refusal = refused(limited.engine.Forward, large, timeout=PATIENCE_SECONDS)
                assert found_and_wanted(refusal) == ("CAPACITY_EXCEEDED", str(size), str(MESSAGE_BYTES))
                answer = stream.ask(engine_service_pb2.ForwardStreamRequest(forward=large))
            value = read_value(answer.error)
            assert value.reason == "CAPACITY_EXCEEDED"
            assert int(value.metadata["found"]) >= size
            assert value.metadata["wanted"] == str(MESSAGE_BYTES)
            assert stream.ask(engine_service_pb2.ForwardStreamRequest(forward=good)).HasField("forward")
        just = sized(forward(session, generation, [1], item(limited, 1)), MESSAGE_BYTES)
        # As large as allowed: looked at, and refused for what it is.
        assert refused(limited.engine.Forward, just, timeout=PATIENCE_SECONDS).reason == "SHAPE_MISMATCH"
    stream.close()


@pytest.mark.parametrize("factor", [5, 20])
def test_a_message_far_above_the_limit_ends_the_call_and_nothing_else(limited: Target, factor: int) -> None:
    limited.load("sql")
    stream = Streamed(limited)
    with limited.session() as session:
        generation = session.set_mapping("sql").generation
        good = forward(session, generation, [1], item(limited, 1))
        large = sized(forward(session, generation, [1], item(limited, 1)), factor * MESSAGE_BYTES)
        with limited.unchanged():
            for call in (
                lambda: limited.engine.Forward(large, timeout=PATIENCE_SECONDS),
                lambda: stream.ask(engine_service_pb2.ForwardStreamRequest(forward=large)),
            ):
                with pytest.raises(grpc.RpcError) as caught:
                    call()
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert session.next("heartbeat")
        limited.engine.Forward(good, timeout=PATIENCE_SECONDS)
        assert (limited.process is None) or limited.process.process.poll() is None
    stream.close()


def test_any_other_message_above_the_limit_is_refused(limited: Target) -> None:
    request = pb.EstimateAdapterRequest(source="x" * MESSAGE_BYTES)
    refusal = refused(limited.adapters.EstimateAdapter, request, timeout=PATIENCE_SECONDS)
    assert found_and_wanted(refusal) == ("CAPACITY_EXCEEDED", str(request.ByteSize()), str(MESSAGE_BYTES))


def test_a_session_request_above_the_limit_is_refused(limited: Target) -> None:
    sites = [model_pb2.Site(name=f"{'x' * 400}{n}", in_features=1, out_features=1) for n in range(2600)]
    request = engine_service_pb2.OpenSessionRequest(model_spec=model_pb2.ModelSpec(sites=sites))
    with limited.unchanged():
        refusal = refused(next, limited.engine.OpenSession(request, timeout=PATIENCE_SECONDS))
    assert found_and_wanted(refusal) == ("CAPACITY_EXCEEDED", str(request.ByteSize()), str(MESSAGE_BYTES))


def test_a_message_above_the_limit_is_measured_before_it_is_read(limited: Target) -> None:
    """Of small parts, protobuf makes 28 bytes of each byte."""
    assert limited.process is not None
    assert limited.process.process is not None
    empty_entry = b"\x1a\x00"
    data = empty_entry * (3 * MESSAGE_BYTES // len(empty_entry))
    rpc = limited.channel.unary_unary("/slotcar.v1.EngineService/SetMapping")
    before = peak_bytes(limited.process.process.pid)
    refusal = refused(rpc, data, timeout=PATIENCE_SECONDS)
    assert found_and_wanted(refusal) == ("CAPACITY_EXCEEDED", str(len(data)), str(MESSAGE_BYTES))
    assert peak_bytes(limited.process.process.pid) - before < 8 * len(data)


def peak_bytes(pid: int) -> int:
    """The most memory that the process ever had."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    assert match is not None
    return int(match[1]) << 10


def test_a_small_request_may_not_ask_for_a_larger_answer(limited: Target) -> None:
    down, k, q = limited.model.sites
    assert (down.in_features, k.in_features, q.in_features) == (128, 64, 64)
    with limited.session() as session:
        generation = session.set_mapping(None).generation
        x, also = matrix(ROWS, q.in_features), engine_service_pb2.ForwardItem(site=k.name)
        most = forward(session, generation, [ROWS], engine_service_pb2.ForwardItem(site=q.name, x=x))
        answer = limited.engine.Forward(most, timeout=PATIENCE_SECONDS)
        assert len(answer.outputs[0].inline) == RESPONSE_BYTES
        more = forward(session, generation, [ROWS], *most.items, also)
        with limited.unchanged():
            refusal = refused(limited.engine.Forward, more, timeout=PATIENCE_SECONDS)
        size = RESPONSE_BYTES + 4 * ROWS * k.out_features
        assert found_and_wanted(refusal) == ("CAPACITY_EXCEEDED", str(size), str(RESPONSE_BYTES))


# Rows, entries, mappings and sessions


def test_more_rows_than_allowed_are_refused(limited: Target) -> None:
    with limited.session() as session:
        generation = session.set_mapping(None).generation
        limited.engine.Forward(forward(session, generation, [ROWS], item(limited, ROWS)), timeout=PATIENCE_SECONDS)
        request = forward(session, generation, [ROWS + 1], item(limited, ROWS + 1))
        with limited.unchanged():
            refusal = refused(limited.engine.Forward, request, timeout=PATIENCE_SECONDS)
    assert (refusal.reason, refusal.fields) == ("REQUEST_INVALID", ("row_counts",))
    assert refusal.metadata["found"] == f"{ROWS + 1} rows"


def test_more_entries_than_allowed_are_refused(limited: Target) -> None:
    with limited.session() as session:
        session.set_mapping(*[None] * ENTRIES)
        with limited.unchanged():
            refusal = refused(session.set_mapping, *[None] * (ENTRIES + 1))
    assert (refusal.reason, refusal.fields) == ("REQUEST_INVALID", ("entries",))
    assert (refusal.metadata["found"], refusal.metadata["wanted"]) == (f"{ENTRIES + 1} of them", f"at most {ENTRIES}")


def test_more_mappings_than_allowed_are_refused(limited: Target) -> None:
    limited.load("sql")
    with limited.session() as session, limited.session() as other:
        for number in range(MAPPINGS):
            session.set_mapping("sql", mapping_id=number)
        with limited.unchanged():
            refusal = refused(session.set_mapping, "sql", mapping_id=MAPPINGS)
        assert found_and_wanted(refusal) == ("CAPACITY_EXCEEDED", str(MAPPINGS), str(MAPPINGS))
        session.set_mapping(None, mapping_id=0)
        other.set_mapping("sql", mapping_id=MAPPINGS)
        session.release_mapping(1)
        session.set_mapping("sql", mapping_id=MAPPINGS)
        assert limited.state().gauges["slotcar_pins"] == 3


def test_a_thousand_mappings_of_one_id_are_one_mapping(limited: Target) -> None:
    digest = limited.load("sql").adapter.digest
    with limited.session() as session:
        answers = [session.set_mapping("sql", None) for _ in range(1000)]
        generations = [answer.generation for answer in answers]
        assert generations == sorted(set(generations))
        assert {answer.entries[0].digest for answer in answers} == {digest}
        state = limited.state()
        assert state.adapters[0].pins == 1
        assert state.gauges["slotcar_pins"] == 1
        request = forward(session, generations[-1], [1, 0], item(limited, 1))
        assert limited.engine.Forward(request, timeout=PATIENCE_SECONDS).digests == [digest, ""]
        session.release_mapping()
        assert limited.state().adapters[0].pins == 0


def test_more_holds_than_allowed_are_refused(limited: Target) -> None:
    """A hold of an id that is there takes no more room."""
    limited.load("sql")
    with limited.session() as session, limited.session() as other:
        for number in range(HOLDS):
            session.hold("sql", number)
        with limited.unchanged():
            refusal = refused(session.hold, "sql", HOLDS)
        assert found_and_wanted(refusal) == ("CAPACITY_EXCEEDED", str(HOLDS), str(HOLDS))
        load_hold = pb.LoadHold(session=session.id, hold_id=HOLDS)
        with limited.unchanged():
            refusal = refused(limited.load, "sql", hold=load_hold)
        assert found_and_wanted(refusal) == ("CAPACITY_EXCEEDED", str(HOLDS), str(HOLDS))
        session.hold("sql", 0)
        other.hold("sql", HOLDS)
        session.release_hold(1)
        session.hold("sql", HOLDS)
        assert limited.state().gauges["slotcar_holds"] == HOLDS + 1


def test_more_names_than_allowed_are_refused(limited: Target) -> None:
    source = str(limited.folder("sql"))
    for number in range(ADAPTERS):
        limited.load("sql", ref=f"sql-{number}", source=source)
    with limited.unchanged():
        refusal = refused(limited.load, "sql")
    assert found_and_wanted(refusal) == ("CAPACITY_EXCEEDED", str(ADAPTERS), str(ADAPTERS))
    limited.load("sql", ref="sql-0", source=source)


def test_more_sessions_than_allowed_are_refused(limited: Target) -> None:
    with ExitStack() as stack:
        sessions = [stack.enter_context(limited.session()) for _ in range(SESSIONS)]
        # One in its grace counts too.
        sessions[0].call.cancel()
        eventually(lambda: not sessions[0].status.attached)
        with limited.unchanged():
            refusal = refused(limited.session().__enter__)
        assert found_and_wanted(refusal) == ("CAPACITY_EXCEEDED", str(SESSIONS), str(SESSIONS))
        limited.close_session(sessions[1].id)
        stack.enter_context(limited.session())
        stack.enter_context(limited.session(resume_session=sessions[0].id))


# Adapters


def test_an_adapter_file_above_the_limit_is_refused(limited: Target) -> None:
    folder = limited.folder("large-file", rank=32)
    size = (folder / WEIGHTS_FILE).stat().st_size
    assert size > ADAPTER_BYTES
    for call in (
        lambda: limited.load("large-file"),
        lambda: limited.adapters.EstimateAdapter(
            pb.EstimateAdapterRequest(source=str(folder)), timeout=PATIENCE_SECONDS
        ),
    ):
        with limited.unchanged():
            refusal = refused(call)
        assert found_and_wanted(refusal) == ("CAPACITY_EXCEEDED", str(size), f"at most {ADAPTER_BYTES}")
        assert refusal.metadata["file"] == WEIGHTS_FILE


def test_an_adapter_larger_than_the_host_tier_is_refused(limited: Target) -> None:
    limited.load("sql")
    site = limited.site
    rank = HOST_BYTES // ((site.in_features + site.out_features) * 4) + 1
    size = (site.in_features + site.out_features) * 4 * rank
    folder = limited.folder("large", rank=rank)
    assert (folder / WEIGHTS_FILE).stat().st_size <= ADAPTER_BYTES
    with limited.unchanged():
        refusal = refused(limited.load, "large")
    assert found_and_wanted(refusal) == ("CAPACITY_EXCEEDED", str(size), f"at most {HOST_BYTES}")
    assert refusal.metadata["tier"] == "HOST"
    request = pb.EstimateAdapterRequest(source=str(folder))
    estimate = limited.adapters.EstimateAdapter(request, timeout=PATIENCE_SECONDS)
    assert not estimate.fits
    assert estimate.why_not.startswith("CAPACITY_EXCEEDED: ")


# Refusals


def test_a_refusal_about_every_slot_arrives_whole(limited: Target) -> None:
    """A batch of 48 adapters that are all unloaded by force: stale, and then not found, with details."""
    names = limited.fill_slots()
    with limited.session() as session:
        mapped = session.set_mapping(*names)
        limited.unload_all()
        request = forward(session, mapped.generation, [1] * SLOTS, item(limited, SLOTS))
        with limited.unchanged():
            refusal = refused(limited.engine.Forward, request, timeout=PATIENCE_SECONDS)
            assert refusal.reason == "LAYOUT_STALE"
            assert refusal.metadata["entries"].startswith(f"{names[0]}@{mapped.entries[0].digest}, ")
            refs = [f"{name}@{entry.digest}" for name, entry in zip(names, mapped.entries, strict=True)]
            refusal = refused(session.set_mapping, *refs)
            assert refusal.reason == "ADAPTER_NOT_FOUND"
            assert refusal.metadata["adapters"].startswith(f"{refs[0]}, ")
        listed, _, more = refusal.metadata["adapters"].partition(" and ")
        count = len(listed.split(", "))
        assert listed.split(", ") == refs[:count]
        assert more == f"{SLOTS - count} more"
