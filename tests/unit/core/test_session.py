"""Sessions live while their stream does, and for their grace after it."""

from __future__ import annotations

import pytest
from slotcar_sidecar.core.errors import CapacityExceeded, MappingNotFound, RequestInvalid, SessionNotFound
from slotcar_sidecar.core.folded import Folded
from slotcar_sidecar.core.ids import Epoch, SessionId
from slotcar_sidecar.core.mapping import Mapping
from slotcar_sidecar.core.session import MAX_GRACE_SECONDS, Sessions, SessionTerms

ID = SessionId("one")


@pytest.fixture
def sessions() -> Sessions:
    return Sessions(max_sessions=2, max_mappings=2)


def test_a_session_without_a_stream_ends_when_its_grace_has_passed(sessions: Sessions) -> None:
    session = sessions.open(ID, SessionTerms("engine", 10))
    assert session.attachment is not None
    assert sessions.expired(1e9) == []
    sessions.detach(session, session.attachment, now=100)
    assert sessions.expired(109.9) == []
    assert sessions.expired(110) == [session]


def test_a_resumed_session_does_not_end_and_its_old_stream_cannot_end_it(sessions: Sessions) -> None:
    session = sessions.open(ID, SessionTerms("engine", 10))
    first = session.attachment
    assert sessions.resume(ID) is session
    assert first is not None
    assert session.attachment != first
    sessions.detach(session, first, now=100)
    assert sessions.expired(1e9) == []


def test_a_grace_of_zero_ends_with_the_stream(sessions: Sessions) -> None:
    session = sessions.open(ID, SessionTerms("engine", 0))
    assert session.attachment is not None
    sessions.detach(session, session.attachment, now=100)
    assert sessions.expired(100) == [session]


def test_ending_is_idempotent_and_an_ended_session_is_not_found(sessions: Sessions) -> None:
    session = sessions.open(ID, SessionTerms("engine", 10))
    assert session in sessions
    assert sessions.end(ID) is session
    assert sessions.end(ID) is None
    assert session not in sessions
    for look in (sessions.get, sessions.resume):
        with pytest.raises(SessionNotFound):
            look(ID)


@pytest.mark.parametrize("grace", [-1, MAX_GRACE_SECONDS + 1, float("nan"), float("inf")])
def test_a_grace_beyond_its_bounds_is_refused(sessions: Sessions, grace: float) -> None:
    with pytest.raises(RequestInvalid):
        sessions.open(ID, SessionTerms("engine", grace))
    assert len(sessions) == 0


@pytest.mark.parametrize("name", ["a" * 201, "two\nlines", "\0"])
def test_a_client_name_that_would_break_a_log_is_refused(sessions: Sessions, name: str) -> None:
    with pytest.raises(RequestInvalid):
        sessions.open(ID, SessionTerms(name, 10))


def test_sessions_and_mappings_are_bounded(sessions: Sessions) -> None:
    session = sessions.open(ID, SessionTerms("engine", 10))
    sessions.open(SessionId("two"), SessionTerms("engine", 10))
    with pytest.raises(CapacityExceeded):
        sessions.open(SessionId("three"), SessionTerms("engine", 10))
    for mapping_id in (1, 2):
        sessions.check_room(session, mapping_id)
        session.mappings[mapping_id] = Mapping(mapping_id, Folded.of(()), Epoch("e"), 1)
    sessions.check_room(session, 2)
    with pytest.raises(CapacityExceeded):
        sessions.check_room(session, 3)
    with pytest.raises(MappingNotFound):
        session.mapping(3)
