"""What the status page remembers is what happened, and bounded."""

from __future__ import annotations

import pytest
from slotcar_sidecar.core.events import Event, EventKind
from slotcar_sidecar.core.ids import AdapterName, Digest
from slotcar_sidecar.ops.recent import LoadLog, NameLog, UseTimes
from slotcar_sidecar.ops.state import Most

A, B = (Digest(f"sha256:{letter * 64}") for letter in "ab")
SQL = AdapterName("sql")


class WallClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> WallClock:
    return WallClock()


@pytest.fixture
def loads(clock: WallClock) -> LoadLog:
    return LoadLog(clock)


def shown(loads: LoadLog) -> list[tuple[Digest, float, list[str]]]:
    return [(load.digest, load.started, [stage for stage, _ in load.stages]) for load in loads.latest_first()]


def test_the_stages_of_a_load_are_one_row(loads: LoadLog, clock: WallClock) -> None:
    loads.stage("read", 2.0, A)
    loads.stage("read", 0.5, B)
    clock.now += 0.1
    loads.stage("wait", 0.0, A)
    loads.stage("fill", 0.1, A)
    assert shown(loads) == [(B, 999.5, ["read"]), (A, 998.0, ["read", "wait", "fill"])]


def test_an_earlier_stage_is_of_another_load(loads: LoadLog) -> None:
    for stage in ("read", "fill", "wait", "fill", "read"):
        loads.stage(stage, 0.0, A)
    assert [stages for _, _, stages in shown(loads)] == [["read"], ["wait", "fill"], ["read", "fill"]]


def test_a_fill_long_after_the_read_is_of_another_load(loads: LoadLog, clock: WallClock) -> None:
    loads.stage("read", 0.1, A)
    clock.now += 60
    loads.stage("fill", 0.1, A)
    assert [stages for _, _, stages in shown(loads)] == [["fill"], ["read"]]


def test_loads_are_bounded(loads: LoadLog) -> None:
    digests = [Digest(f"sha256:{number:064x}") for number in range(2 * Most.LOADS)]
    for digest in digests:
        loads.stage("read", 0.1, digest)
    assert [digest for digest, _, _ in shown(loads)] == digests[: Most.LOADS - 1 : -1]
    loads.stage("fill", 0.1, digests[0])
    assert shown(loads)[0][2] == ["fill"]


def event(kind: EventKind, name: AdapterName = SQL, reason: str = "") -> Event:
    return Event(1, kind, 50.0, 1, name=name, reason=reason)


def test_a_failure_stays_until_the_name_is_gone_and_is_over_once_it_loads() -> None:
    names = NameLog()
    names.note(event(EventKind.REFUSED, reason="ADAPTER_INVALID: no"))
    failure = names.failure(SQL)
    assert failure is not None
    assert (failure.time, failure.cause, failure.is_over) == (50.0, "ADAPTER_INVALID: no", False)
    names.note(event(EventKind.LOADED))
    failure = names.failure(SQL)
    assert failure is not None
    assert failure.is_over
    names.note(event(EventKind.UNLOADED))
    assert names.failure(SQL) is None


def test_why_a_name_lost_its_slot() -> None:
    names = NameLog()
    names.note(event(EventKind.EVICTED, reason="slot taken by chat"))
    left = names.left(SQL)
    assert left is not None
    assert left.cause == "slot taken by chat"
    assert names.latest_first() == (SQL,)
    names.note(Event(2, EventKind.SESSION_ENDED, 1.0, 1))


def test_names_and_causes_are_bounded() -> None:
    names = NameLog()
    for number in range(3000):
        names.note(event(EventKind.REFUSED, AdapterName(f"a{number}"), "x" * 10_000))
    latest = names.latest_first()
    assert len(latest) == 1000
    assert latest[0] == AdapterName("a2999")
    failure = names.failure(latest[0])
    assert failure is not None
    assert len(failure.cause) == 500


def test_when_a_moment_was() -> None:
    uses = UseTimes()
    assert uses.seconds_since(0, 100.0) is None
    assert uses.seconds_since(3, 100.0) == 0.0, "used since the last note"
    uses.note(3, 100.0)
    uses.note(3, 200.0)
    uses.note(9, 300.0)
    assert [uses.seconds_since(moment, 310.0) for moment in (1, 3, 4, 9, 10)] == [210.0, 210.0, 10.0, 10.0, 0.0]


def test_old_moments_become_less_exact_but_are_not_lost() -> None:
    uses = UseTimes()
    for number in range(1, 20_001):
        uses.note(number, float(number))
    assert uses.seconds_since(20_000, 20_000.0) == 0.0
    assert uses.seconds_since(19_000, 20_000.0) == 1000.0
    first = uses.seconds_since(1, 20_000.0)
    assert first is not None
    assert 15_000 < first < 20_000
