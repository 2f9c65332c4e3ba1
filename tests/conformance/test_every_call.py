"""What holds for every RPC, and that no RPC is without tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from slotcar.v1 import adapter_pb2, layout_pb2
from slotcar.v1 import adapter_service_pb2 as pb

from tests.conformance import (
    test_bad_forwards,
    test_bad_holds,
    test_bad_requests,
    test_desired,
    test_events,
    test_holds,
    test_lists,
    test_mapping_loads,
    test_operators,
    test_prefetch,
    test_process,
    test_ranks,
    test_refused_states,
    test_replay,
    test_sessions,
    test_uploads,
    test_waiting,
)
from tests.conformance.calls import CALLS, LAST, METHODS, SERVICES, Given, ask, ask_bytes, given, refusal_of
from tests.conformance.items import forward, item
from tests.conformance.refusals import read, refused
from tests.conformance.target import PATIENCE_SECONDS, Session, Target, seconds
from tests.waiting import eventually

SHORT_SECONDS = 0.001

# Beside what is tested here for all of them.
TESTS: dict[str, list[Callable[..., None]]] = {
    "LoadAdapter": [test_replay.test_a_load, test_refused_states.test_a_name_with_other_bytes_is_a_conflict],
    "LoadAdapterStream": [
        test_uploads.test_an_upload_is_an_adapter_like_any_other,
        test_uploads.test_a_malformed_upload_is_refused,
    ],
    "UnloadAdapter": [test_replay.test_an_unload, test_holds.test_a_forced_unload_ends_holds_and_counts_them],
    "KeepAdapter": [test_replay.test_a_keep_and_its_end],
    "ReleaseKeep": [test_replay.test_a_keep_and_its_end],
    "GetAdapter": [test_replay.test_a_get_and_an_estimate],
    "ListAdapters": [test_lists.test_pages_together_are_the_list],
    "ListDesired": [
        test_desired.test_a_server_that_follows_no_file_declares_nothing,
        test_desired.test_pages_together_are_all_entries,
    ],
    "EstimateAdapter": [test_replay.test_a_get_and_an_estimate],
    "PrefetchAdapters": [
        test_prefetch.test_what_is_known_comes_nearer_and_takes_nothing_from_anybody,
        test_prefetch.test_a_malformed_prefetch_is_refused,
    ],
    "GetCapacity": [
        test_operators.test_capacity_says_how_many_loads_succeed,
        test_operators.test_capacity_counts_what_there_is,
    ],
    "ListSessions": [
        test_operators.test_a_list_of_sessions_says_who_pins_what,
        test_operators.test_pages_together_are_all_sessions,
    ],
    "EndSession": [test_operators.test_an_operator_ends_a_session, test_operators.test_no_other_word_ends_a_session],
    "WatchEvents": [test_events.test_everything_that_happens_is_told_in_its_order],
    "Shutdown": [
        test_process.test_the_end_may_be_asked_for_again,
        test_process.test_a_deadline_out_of_its_bounds_is_refused,
    ],
    "SetLogLevel": [
        test_process.test_the_level_of_the_log_is_changed,
        test_process.test_what_is_no_level_is_refused,
    ],
    "GetSettings": [test_process.test_the_settings_are_those_of_the_flags],
    "OpenSession": [test_sessions.test_a_session_opens_with_what_the_server_is],
    "JoinSession": [test_ranks.test_a_rank_joins, test_ranks.test_a_second_stream_of_a_rank_takes_over],
    "CloseSession": [test_replay.test_the_end_of_a_session],
    "HoldAdapter": [test_holds.test_a_hold_ends_by_itself, test_bad_holds.test_a_malformed_hold_is_refused],
    "ReleaseHold": [test_replay.test_a_hold_and_its_end, test_bad_holds.test_a_hold_is_its_sessions_own],
    "SetMapping": [
        test_mapping_loads.test_a_set_is_made_resident_whole_or_nothing_changes,
        test_waiting.test_who_waits_first_is_served_first,
        test_bad_requests.test_a_malformed_ref_is_refused_by_every_call,
    ],
    "ReleaseMapping": [test_replay.test_the_end_of_a_mapping],
    "Fence": [test_operators.test_a_fence_waits_for_the_forwards_before_it],
    "Forward": [test_bad_forwards.test_a_forward_that_does_not_fit_is_refused],
    "ForwardStream": [test_bad_forwards.test_a_forward_that_does_not_fit_is_refused],
}


def test_no_call_is_without_tests() -> None:
    assert CALLS.keys() == METHODS.keys()
    assert TESTS.keys() == {method.name for service in SERVICES for method in service.methods}
    assert TESTS.keys() == METHODS.keys() | {LAST}


@pytest.mark.parametrize("name", METHODS)
def test_a_sound_call_is_answered_with_the_layout_version(target: Target, name: str) -> None:
    with given(target) as made:
        answer = ask(target, name, CALLS[name](made))
        answer = answer.forward if name == "ForwardStream" else answer
        layout = answer.version if name in ("OpenSession", "JoinSession") else answer.layout
        version = layout.version if isinstance(layout, layout_pb2.Layout) else layout
        now = target.state().layout.version
        assert version.epoch == now.epoch
        assert 1 < version.generation <= now.generation
    eventually(target.has_nothing_of_sessions)


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"ForwardStream"}))
def test_bytes_that_are_no_message_are_refused_by_every_call(target: Target, name: str) -> None:
    with target.unchanged():
        refusal = refused(ask_bytes, target, name, b"\xff\xff\xff")
    assert (refusal.reason, refusal.metadata["field"]) == ("REQUEST_INVALID", "request")


def with_session(made: Given, name: str, guess: str) -> Any:
    request = CALLS[name](made)[0]
    request.session = guess
    return request


SESSION_CALLS = [name for name, method in METHODS.items() if "session" in method.input_type.fields_by_name]


@pytest.mark.parametrize("name", SESSION_CALLS)
def test_a_session_is_known_by_its_whole_id_alone(target: Target, name: str) -> None:
    """Not by what others see of it; what ends a session says that there is none."""
    with given(target) as made:
        whole = made.session.id
        for guess in ("", made.session.short, whole[:-1], f"{whole} ", whole.upper() + "x", "x" * 1000):
            if name == "EndSession" and guess == made.session.short:
                continue
            request = with_session(made, name, guess)
            if name in ("CloseSession", "EndSession"):
                with target.unchanged():
                    assert not getattr(ask(target, name, [request]), "ended", False)
            else:
                refusal = refusal_of(target, request)
                assert (refusal.reason, refusal.metadata) == ("SESSION_NOT_FOUND", {})


def test_a_load_for_a_session_that_is_not_there_is_refused(target: Target) -> None:
    with given(target) as made:
        source = str(target.folder("new"))
        for guess in ("", made.session.short):
            refusal = refusal_of(
                target, pb.LoadAdapterRequest(ref="new", source=source, hold=pb.LoadHold(session=guess))
            )
            assert refusal.reason == "SESSION_NOT_FOUND"


# Deadlines


@pytest.fixture(scope="module")
def hurried(start_target: Callable[..., Target]) -> Target:
    """A server of this module's own: what an abandoned call does may come later than its test's end."""
    return start_target().learn()


def loading(made: Given) -> list[Any]:
    """A load with a hold of an adapter that is in no tier."""
    hold = pb.LoadHold(session=made.session.id, hold_id=7, tier=adapter_pb2.TIER_DEVICE)
    return [pb.LoadAdapterRequest(ref="slow", source=str(made.target.folder("slow", rank=16)), hold=hold)]


VARIANTS: dict[str, tuple[str, Callable[[Given], list[Any]]]] = {name: (name, make) for name, make in CALLS.items()} | {
    "loads-and-holds": ("LoadAdapter", loading),
    "maps-and-loads": ("SetMapping", lambda g: [g.session.mapping("lost", mapping_id=3, load=True)]),
    "maps-and-waits": ("SetMapping", lambda g: [g.session.mapping("lost", load=True, wait=seconds(PATIENCE_SECONDS))]),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_deadline_of_a_millisecond_leaves_nothing(hurried: Target, variant: str) -> None:
    hurried.unload_all()
    hurried.load("lost")
    name, make = VARIANTS[variant]
    with given(hurried) as made, hurried.session() as other:
        if variant == "maps-and-waits":
            other.set_mapping("sql", "spare")
        for _ in range(8):
            _try(hurried, name, make(made))
        hurried.close_session(made.session.id)
    eventually(hurried.has_nothing_of_sessions)
    hurried.load("sql")
    with hurried.session() as session:
        request = forward(session, session.set_mapping("sql").generation, [1], item(hurried, 1))
        hurried.engine.Forward(request, timeout=PATIENCE_SECONDS)
    assert hurried.has_nothing_of_sessions()


def _try(target: Target, name: str, requests: list[Any]) -> None:
    """The call with a short deadline; it may be answered, refused or given up, but is no fault."""
    try:
        ask(target, name, requests, timeout=SHORT_SECONDS)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            read(error)


# Secrets


@pytest.fixture
def victim(target: Target) -> Iterator[Session]:
    """A session that does all that others may hear of."""
    digest = target.load("sql").adapter.digest
    with target.session(client_name="victim", ranks=2, reserved_slots=1) as session:
        session.set_mapping(f"sql@{digest}")
        session.hold("sql", tier=adapter_pb2.TIER_DEVICE)
        stream = session.join(1)
        next(stream)
        yield session
        stream.cancel()


def test_nobody_is_told_the_id_of_anothers_session(target: Target, victim: Session) -> None:
    """It is all that it takes to act in the session's name: no answer, refusal, event, metric or log line has it."""
    heard: list[bytes] = []
    for name, make in CALLS.items():
        with given(target) as made:
            heard.append(ask(target, name, make(made)).SerializeToString())
            if name in SESSION_CALLS and name != "EndSession":
                heard.append(_heard(target, name, with_session(made, name, victim.short)))
                heard.append(_heard(target, name, with_session(made, name, victim.id[:-1])))
    listed = target.adapters.ListSessions(pb.ListSessionsRequest(), timeout=PATIENCE_SECONDS).SerializeToString()
    assert victim.short.encode() in listed
    target.close_session(victim.id)
    told = _told(target, victim)
    heard += [listed, *told]
    if target.metrics_url is not None:
        heard.append(target.metrics_text().encode())
    if target.process is not None:
        heard.append(target.process.log.encode())
        assert victim.short.encode() in heard[-1]
    # Of the id they have what others may see, and no more.
    secret = victim.id[len(victim.short) :].encode()
    assert any(victim.short.encode() in said for said in told)
    assert not any(secret in said for said in heard)
    eventually(target.has_nothing_of_sessions)


def _heard(target: Target, name: str, request: Any) -> bytes:
    """The answer or the refusal, whole."""
    try:
        return bytes(ask(target, name, [request]).SerializeToString())
    except grpc.RpcError as error:
        return repr((error, error.trailing_metadata())).encode()


def _told(target: Target, victim: Session) -> list[bytes]:
    """The messages of WatchEvents up to the victim's end."""
    events: Any = target.adapters.WatchEvents(pb.WatchEventsRequest(replay=1000), timeout=PATIENCE_SECONDS)
    told: list[bytes] = []
    for message in events:
        told.append(message.SerializeToString())
        if message.event.kind == pb.EVENT_KIND_SESSION_ENDED and message.event.session == victim.short:
            break
    events.cancel()
    return told
