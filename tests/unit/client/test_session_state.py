"""The order in which a session does things, as the effects of its plans: no server, no time, no threads."""

from __future__ import annotations

import pytest
import torch
from slotcar_client import Mapping, SlotcarError, errors
from slotcar_client.effects import Wait
from slotcar_client.session_state import ROWS_MAPPING_ID

from tests.unit.client.fake_engine import A, B
from tests.unit.client.plans import Face, make_hold

X = {"q": torch.zeros(1, 4)}
STALE = errors.LayoutStale("stale", entries="sql")
FORGOTTEN = errors.SessionNotFound("no such session")


def mapped(face: Face, *, load: bool = False) -> Mapping:
    mapping = face.run(face.state.set_mapping([("sql", 1)], 1, load, 0.0))
    face.log.clear()
    face.requests.clear()
    return mapping


def test_a_stale_mapping_is_told_of_then_set_again_by_digest() -> None:
    face = Face()
    mapped(face)
    face.fail = {"Forward": [STALE]}
    face.run(face.state.forward(X, None, None, None))
    assert face.log == ["Forward", "stale", "SetMapping", "Forward"]
    assert [entry.ref for entry in face.named("SetMapping")[0].targets] == [f"sql@{A}"]
    assert face.state.recoveries == {"LAYOUT_STALE": 1}


@pytest.mark.parametrize("load", [False, True])
def test_only_a_mapping_that_was_set_with_load_loads_again_and_never_waits(load: bool) -> None:
    face = Face()
    face.run(face.state.set_mapping([("sql", 1)], 1, not load, 0.0))
    face.run(face.state.set_mapping([("sql", 1)], 1, load, 9.0))
    face.fail = {"Forward": [STALE]}
    face.run(face.state.forward(X, None, None, None))
    again = face.named("SetMapping")[-1]
    assert (again.load, again.HasField("wait")) == (load, False)


def test_a_forgotten_session_is_opened_then_its_holds_taken_then_its_mapping_set() -> None:
    face = Face()
    held = face.run(face.state.hold("sql", None, None, False, make_hold))
    mapped(face)
    face.fail = {"Forward": [FORGOTTEN]}
    face.run(face.state.forward(X, None, None, None))
    assert face.log == ["Forward", "stale", "OpenSession", "HoldAdapter", "SetMapping", "Forward"]
    again = face.named("HoldAdapter")[0]
    assert (again.session, again.hold_id, again.ref) == ("s2", held.hold_id, f"sql@{A}")
    assert face.state.recoveries == {"SESSION_NOT_FOUND": 1, "HOLD": 1}
    face.log.clear()
    face.run(face.state.forward(X, None, None, None))
    assert face.log == ["Forward"]


def test_a_hold_is_taken_again_for_the_rest_of_its_time() -> None:
    face = Face()
    face.run(face.state.hold("sql", 1, 30.0, True, make_hold))
    face.run(face.state.hold("sql", 2, 5.0, False, make_hold))
    face.clock.now += 10
    face.fail = {"Fence": [FORGOTTEN]}
    face.run(face.state.fence())
    (again,) = face.named("HoldAdapter")[2:]
    assert (again.hold_id, again.duration.seconds) == (1, 20)


def test_a_hold_that_cannot_be_taken_again_is_every_callers_error_until_it_is_released() -> None:
    face = Face()
    held = face.run(face.state.hold("sql", 7, None, False, make_hold))
    face.digest, face.fail = B, {"Fence": [FORGOTTEN]}
    for _ in range(2):
        with pytest.raises(errors.AdapterNotFound) as caught:
            face.run(face.state.fence())
        assert caught.value.metadata == {"adapters": f"sql@{A}", "hold_id": "7"}
    face.log.clear()
    face.run(face.state.release_hold(held))
    face.run(face.state.fence())
    assert face.log == ["Fence"], "a hold of a session that is gone needs no call"
    assert "HOLD" not in face.state.recoveries


def test_a_hold_that_comes_back_ends_the_error() -> None:
    face = Face()
    face.run(face.state.hold("sql", 7, None, False, make_hold))
    face.fail = {"Fence": [FORGOTTEN], "HoldAdapter": [errors.AdapterNotFound("not yet")]}
    with pytest.raises(errors.AdapterNotFound):
        face.run(face.state.fence())
    face.run(face.state.fence())
    assert face.state.recoveries["HOLD"] == 1


def test_a_release_is_once_and_for_the_hold_that_it_was() -> None:
    face = Face()
    old = face.run(face.state.hold("sql", 7, None, False, make_hold))
    new = face.run(face.state.hold("sql", 7, None, False, make_hold))
    for held in (old, new, new, old):
        face.run(face.state.release_hold(held))
    assert face.log.count("ReleaseHold") == 1


def test_a_release_that_failed_can_be_repeated_and_is_not_held_again() -> None:
    face = Face()
    held = face.run(face.state.hold("sql", 7, None, False, make_hold))
    face.fail = {"ReleaseHold": [errors.Unavailable("gone")], "Fence": [FORGOTTEN]}
    with pytest.raises(errors.Unavailable):
        face.run(face.state.release_hold(held))
    face.run(face.state.release_hold(held))
    assert face.log.count("ReleaseHold") == 2
    face.run(face.state.fence())
    assert face.log.count("HoldAdapter") == 1


def test_own_hold_ids_are_all_different() -> None:
    face = Face()
    holds = [face.run(face.state.hold("sql", None, None, False, make_hold)) for _ in range(3)]
    assert len({hold.hold_id for hold in holds}) == 3
    assert min(hold.hold_id for hold in holds) >= 1 << 63


def test_what_on_stale_raises_reaches_the_caller_and_changes_nothing() -> None:
    told: list[tuple[Mapping, SlotcarError]] = []

    class Restart(Exception):
        pass

    def on_stale(mapping: Mapping, error: SlotcarError) -> None:
        told.append((mapping, error))
        if len(told) == 1:
            raise Restart

    face = Face(on_stale=on_stale)
    mapping = mapped(face)
    face.fail = {"Forward": [STALE, STALE]}
    with pytest.raises(Restart):
        face.run(face.state.forward(X, None, None, None))
    assert face.log == ["Forward", "stale"]
    assert face.state.recoveries == {}
    assert told == [(mapping, STALE)]
    assert face.state.mapping == mapping
    face.run(face.state.forward(X, None, None, None))
    assert face.log[2:] == ["Forward", "stale", "SetMapping", "Forward"]


def test_on_stale_may_raise_the_very_error_that_it_was_told() -> None:
    def on_stale(_mapping: Mapping, error: SlotcarError) -> None:
        raise error

    face = Face(on_stale=on_stale)
    mapped(face)
    face.fail = {"Forward": [STALE]}
    with pytest.raises(errors.LayoutStale):
        face.run(face.state.forward(X, None, None, None))
    assert face.log == ["Forward", "stale"]


def test_without_the_setting_an_absent_server_is_the_callers_at_once() -> None:
    face = Face()
    mapped(face)
    face.away_until = float("inf")
    for plan in (face.state.forward(X, None, None, None), face.state.fence()):
        with pytest.raises(errors.Unavailable):
            face.run(plan)
    assert face.log == ["Forward", "Fence"]


def test_a_call_waits_for_the_server_and_goes_on_by_digest() -> None:
    face = Face(away="wait", away_seconds=10.0)
    mapped(face)
    face.away_until = face.clock.now + 3.0
    face.fail = {"Forward": [FORGOTTEN]}
    face.run(face.state.forward(X, None, None, None))
    assert set(face.log[:-5]) == {"Forward", "wait"}
    assert face.log[-5:] == ["Forward", "stale", "OpenSession", "SetMapping", "Forward"]
    assert [entry.ref for entry in face.named("SetMapping")[0].targets] == [f"sql@{A}"]
    assert face.state.recoveries == {"UNAVAILABLE": 1, "SESSION_NOT_FOUND": 1}


def test_a_server_that_goes_away_again_while_the_session_is_opened_is_waited_for() -> None:
    face = Face(away="wait", away_seconds=10.0)
    face.run(face.state.hold("sql", 7, None, False, make_hold))
    mapped(face)
    gone = errors.Unavailable("gone")
    face.fail = {
        "Forward": [FORGOTTEN, FORGOTTEN, errors.MappingNotFound("?")],
        "OpenSession": [gone],
        "HoldAdapter": [gone],
    }
    face.run(face.state.forward(X, None, None, None))
    assert face.log == [
        *("Forward", "stale", "OpenSession", "wait"),
        *("Forward", "stale", "OpenSession", "HoldAdapter", "wait"),
        *("HoldAdapter", "Forward", "stale", "SetMapping", "Forward"),
    ]
    assert face.sessions == 2


def test_a_call_waits_no_longer_than_it_may() -> None:
    face = Face(away="wait", away_seconds=10.0)
    mapped(face)
    began, face.away_until = face.clock.now, float("inf")
    with pytest.raises(errors.Unavailable, match=r"away for 10\.0 s: nobody there"):
        face.run(face.state.set_mapping([("sql", 1)], 1, False, 0.0))
    assert face.clock.now - began == pytest.approx(10.0)
    assert face.state.recoveries == {}


def test_a_source_that_is_away_is_not_waited_for() -> None:
    face = Face(away="wait")
    face.fail = {"Fence": [errors.SourceUnavailable("no such folder")]}
    with pytest.raises(errors.SourceUnavailable):
        face.run(face.state.fence())


def test_a_mapping_that_was_replaced_during_the_wait_is_not_computed_with() -> None:
    replaced: list[Mapping] = []

    def on_stale(_mapping: Mapping, _error: SlotcarError) -> None:
        if not replaced:
            replaced.append(face.run(face.state.set_mapping([("sql", 1), ("sql", 0)], 1, False, 0.0)))

    face = Face(on_stale=on_stale)
    mapped(face)
    face.fail = {"Forward": [STALE]}
    with pytest.raises(errors.MappingReplaced):
        face.run(face.state.forward(X, None, None, None))
    assert face.log == ["Forward", "stale", "SetMapping"]


def test_a_session_that_another_call_opened_is_not_opened_twice() -> None:
    def on_stale(_mapping: Mapping, _error: SlotcarError) -> None:
        face.fail["Fence"] = [FORGOTTEN]
        face.run(face.state.fence())

    face = Face(on_stale=on_stale)
    mapped(face)
    face.fail = {"Forward": [FORGOTTEN]}
    face.run(face.state.forward(X, None, None, None))
    assert face.log == ["Forward", "stale", "Fence", "OpenSession", "Fence", "SetMapping", "Forward"]


def test_the_mapping_id_of_rows_is_theirs() -> None:
    face = Face()
    with pytest.raises(errors.RequestInvalid):
        face.run(face.state.set_mapping([("sql", 1)], ROWS_MAPPING_ID, False, 0.0))


def test_a_server_of_another_version_is_left_with_its_session_closed() -> None:
    face = Face()
    mapped(face)
    face.fail, face.version = {"Forward": [FORGOTTEN]}, "9.0.0"
    with pytest.raises(errors.VersionMismatch) as caught:
        face.run(face.state.forward(X, None, None, None))
    assert caught.value.metadata["found"] == "9.0.0"
    assert face.log == ["Forward", "stale", "OpenSession", "CloseSession"]
    assert face.named("CloseSession")[0].session == "s2"


def test_a_release_that_did_not_arrive_is_sent_before_the_next_call() -> None:
    face = Face()
    held = face.run(face.state.hold("sql", None, None, False, make_hold))
    face.fail = {"ReleaseHold": [errors.Unavailable("away")]}
    with pytest.raises(errors.Unavailable):
        face.run(face.state.release_hold(held))
    face.log.clear()
    face.run(face.state.fence())
    face.run(face.state.fence())
    assert face.log == ["ReleaseHold", "Fence", "Fence"]


def test_a_hold_whose_answer_did_not_come_is_released() -> None:
    face = Face()
    face.fail = {"HoldAdapter": [errors.DeadlineExceeded("slow")]}
    with pytest.raises(errors.DeadlineExceeded):
        face.run(face.state.hold("sql", None, None, False, make_hold))
    (hold,), (release,) = face.named("HoldAdapter"), face.named("ReleaseHold")
    assert release.hold_id == hold.hold_id


def test_a_hold_that_was_to_be_replaced_is_not_released_by_a_deadline() -> None:
    face = Face()
    face.run(face.state.hold("sql", 7, None, False, make_hold))
    face.fail = {"HoldAdapter": [errors.DeadlineExceeded("slow")]}
    with pytest.raises(errors.DeadlineExceeded):
        face.run(face.state.hold("chat", 7, None, False, make_hold))
    assert not face.named("ReleaseHold")


def test_a_release_waits_for_a_server_that_is_away() -> None:
    face = Face(away="wait")
    mapped(face)
    face.fail = {"ReleaseMapping": [errors.Unavailable("away")]}
    face.run(face.state.release_mapping(None))
    assert face.log == ["ReleaseMapping", "wait", "ReleaseMapping"]
    assert face.state.mapping is None


def test_a_release_that_waited_leaves_a_mapping_that_was_set_meanwhile() -> None:
    face = Face(away="wait")
    mapped(face)
    release = face.state.release_mapping(None)
    next(release)
    assert isinstance(release.throw(errors.Unavailable("away")), Wait)
    other = mapped(face)
    with pytest.raises(StopIteration):
        release.send(None)
    assert face.state.current(other) is other


def test_a_release_that_waited_releases_what_was_set_again_by_digest_meanwhile() -> None:
    """To see it fail: release only what is the very same object."""
    face = Face(away="wait")
    mapping = mapped(face)
    release = face.state.release_mapping(None)
    next(release)
    assert isinstance(release.throw(errors.Unavailable("away")), Wait)
    face.run(face.state._remap(mapping))
    face.run(release)
    assert face.log[-1] == "ReleaseMapping"
    with pytest.raises(errors.MappingReplaced):
        face.state.current(mapping)


def test_a_release_waits_for_a_short_while_only() -> None:
    face = Face(away="wait")
    mapping = mapped(face)
    face.fail = {"ReleaseMapping": [errors.Unavailable("away")] * 100}
    with pytest.raises(errors.Unavailable, match=r"away for 5\.0 s"):
        face.run(face.state.release_mapping(None))
    assert face.state.current(mapping) is mapping
