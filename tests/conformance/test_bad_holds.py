"""Holds, tiers and times that cannot be: refused by the field at fault, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from slotcar.v1 import adapter_service_pb2 as adapters
from slotcar.v1 import engine_service_pb2 as engine
from slotcar.v1.adapter_pb2 import TIER_DISK, TIER_HOST, TIER_SOURCE

from tests.conformance.calls import Given, given, refusal_of
from tests.conformance.target import ABSENT_DIGEST, PATIENCE_SECONDS, Target, entry


@pytest.fixture(scope="module")
def made(server: Target) -> Iterator[Given]:
    server.unload_all()
    with given(server) as made:
        yield made


def holding(made: Given, **fields: Any) -> engine.HoldAdapterRequest:
    return engine.HoldAdapterRequest(**{"session": made.session.id, "hold_id": 2, "ref": "sql"} | fields)


def loading(made: Given, **fields: Any) -> adapters.LoadAdapterRequest:
    """A load with a hold of those fields."""
    hold = adapters.LoadHold(**{"session": made.session.id, "hold_id": 2} | fields)
    return adapters.LoadAdapterRequest(ref="new", source=str(made.target.folder("new")), hold=hold)


# Field → (request with that duration, the most that it may be).
TIMES: dict[str, Callable[[Given, Duration], Any]] = {
    "grace": lambda _, time: engine.OpenSessionRequest(grace=time),
    "wait": lambda made, time: engine.SetMappingRequest(session=made.session.id, entries=[entry("sql")], wait=time),
    "duration": lambda made, time: holding(made, duration=time),
    "hold.duration": lambda made, time: loading(made, duration=time),
}
BAD_TIMES = {
    "negative": Duration(seconds=-1),
    "a-little-negative": Duration(nanos=-1),
    "a-year": Duration(seconds=365 * 86_400),
    "most": Duration(seconds=2**63 - 1, nanos=2**31 - 1),
    "least": Duration(seconds=-(2**63), nanos=-(2**31)),
    "least-and-most": Duration(seconds=-(2**63), nanos=2**31 - 1),
    "nanos-for-seconds": Duration(seconds=1, nanos=10**9),
    "nanos-over-seconds": Duration(seconds=-1, nanos=2**31 - 1),
    "two-signs": Duration(seconds=1, nanos=-1),
}


@pytest.mark.parametrize("time", BAD_TIMES.values(), ids=BAD_TIMES.keys())
@pytest.mark.parametrize("field", TIMES)
def test_a_time_that_cannot_be_is_refused(made: Given, field: str, time: Duration) -> None:
    refusal = refusal_of(made.target, TIMES[field](made, time))
    assert (refusal.reason, refusal.fields) == ("REQUEST_INVALID", (field,))
    assert refusal.metadata["field"] == field
    assert refusal.metadata["found"]
    assert refusal.metadata["wanted"]


@pytest.mark.parametrize(
    "time",
    [Duration(), Duration(seconds=86_400, nanos=1), Duration(seconds=86_401)],
    ids=["none", "more", "a-day-more"],
)
@pytest.mark.parametrize("make", [holding, loading])
def test_a_hold_lasts_more_than_nothing_and_at_most_a_day(
    made: Given, make: Callable[..., Any], time: Duration
) -> None:
    refusal = refusal_of(made.target, make(made, duration=time))
    assert (refusal.reason, refusal.metadata["wanted"]) == ("REQUEST_INVALID", "more than 0 and at most 86400 seconds")


BAD_HOLDS: dict[str, tuple[Callable[[Given], Any], str]] = {
    "tier-source": (lambda made: holding(made, tier=TIER_SOURCE), "tier"),
    "tier-disk": (lambda made: holding(made, tier=TIER_DISK), "tier"),
    "tier-unknown": (lambda made: holding(made, tier=99), "tier"),
    "no-ref": (lambda made: holding(made, ref=""), "ref"),
    "bad-ref": (lambda made: holding(made, ref="../sql"), "ref"),
    "bad-digest": (lambda made: holding(made, ref="sql@sha256:0"), "ref"),
    "load-source": (lambda made: loading(made, tier=TIER_SOURCE), "hold.tier"),
    "load-unknown": (lambda made: loading(made, tier=99), "hold.tier"),
}


@pytest.mark.parametrize(("make", "field"), BAD_HOLDS.values(), ids=BAD_HOLDS.keys())
def test_a_malformed_hold_is_refused(made: Given, make: Callable[[Given], Any], field: str) -> None:
    refusal = refusal_of(made.target, make(made))
    assert (refusal.reason, refusal.fields) == ("REQUEST_INVALID", (field,))


@pytest.mark.parametrize("tier", [TIER_SOURCE, 99])
def test_a_load_goes_to_no_other_tier(made: Given, tier: int) -> None:
    request = adapters.LoadAdapterRequest(ref="new", source=str(made.target.folder("new")), target_tier=tier)
    refusal = refusal_of(made.target, request)
    assert (refusal.reason, refusal.fields, refusal.metadata["found"]) == (
        "REQUEST_INVALID",
        ("target_tier",),
        str(tier),
    )


def test_what_is_kept_is_kept_in_a_slot(made: Given) -> None:
    target = made.target
    source = str(target.folder("new"))
    request = adapters.LoadAdapterRequest(ref="new", source=source, keep=True, target_tier=TIER_HOST)
    refusal = refusal_of(target, request)
    assert (refusal.reason, refusal.fields) == ("REQUEST_INVALID", ("target_tier",))
    # Nor does a kept name move to bytes that are in none.
    target.load("spare", keep=True)
    request = adapters.LoadAdapterRequest(
        ref="spare", source=source, target_tier=TIER_HOST, on_conflict=adapters.ON_CONFLICT_REPLACE
    )
    refusal = refusal_of(target, request)
    assert (refusal.reason, refusal.fields) == ("REQUEST_INVALID", ("target_tier",))
    target.adapters.ReleaseKeep(adapters.ReleaseKeepRequest(ref="spare"), timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("ref", ["nobody", f"sql@{ABSENT_DIGEST}"])
def test_a_hold_of_an_unknown_adapter_is_refused(made: Given, ref: str) -> None:
    refusal = refusal_of(made.target, holding(made, ref=ref))
    assert (refusal.reason, refusal.metadata, refusal.fields) == ("ADAPTER_NOT_FOUND", {"adapters": ref}, ())


def test_a_refused_hold_leaves_the_one_of_its_id(made: Given) -> None:
    before = made.session.status.holds[0]
    for request in (holding(made, hold_id=1, ref="nobody"), holding(made, hold_id=1, tier=99)):
        refusal_of(made.target, request)
    assert made.session.status.holds[0] == before


def test_a_hold_is_its_sessions_own(made: Given) -> None:
    """Released by another session, released twice, or never taken: nothing changes."""
    target, session = made.target, made.session
    with target.session() as other:
        with target.unchanged():
            other.release_hold(1)
            other.release_mapping(1)
            session.release_hold(99)
            session.release_mapping(99)
        other.hold("sql")
        assert [len(status.holds) for status in target.sessions()] == [1, 1]
        other.release_hold()
        with target.unchanged():
            other.release_hold()
    assert [hold.hold_id for hold in session.status.holds] == [1]


def test_a_refused_load_takes_no_hold(made: Given) -> None:
    target, session = made.target, made.session
    for ref, source in (
        ("new", "/etc"),
        (f"new@{ABSENT_DIGEST}", str(target.folder("new"))),
        ("sql", str(target.folder("new"))),
    ):
        hold = adapters.LoadHold(session=session.id, hold_id=1)
        refusal_of(target, adapters.LoadAdapterRequest(ref=ref, source=source, hold=hold))
