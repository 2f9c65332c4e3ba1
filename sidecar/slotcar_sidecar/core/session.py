"""Sessions: each is one engine's presence, alive while its stream lives and for a grace after it.

         open                     grace passes, or close
─────────────────▶ attached ───────────────────────────────▶ ended
                    │    ▲                                     ▲
             detach │    │ resume                              │
                    ▼    │       grace passes, or close        │
                   detached ───────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from slotcar_sidecar.core.errors import CapacityExceeded, MappingNotFound, RequestInvalid, SessionNotFound
from slotcar_sidecar.core.ids import SessionId
from slotcar_sidecar.core.mapping import Mapping

MAX_GRACE_SECONDS = 3600.0
MAX_RANKS = 1024
DEFAULT_GRACE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """What an engine asks of its session, and which client of the policy it is; "" without one."""

    client_name: str = ""
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    ranks: int = 1
    reserved_slots: int = 0
    owner: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.grace_seconds <= MAX_GRACE_SECONDS:
            raise RequestInvalid("grace", found=self.grace_seconds, wanted=f"0 to {MAX_GRACE_SECONDS:g} seconds")
        if len(self.client_name) > 200 or not self.client_name.isprintable():
            found = self.client_name[:200]
            raise RequestInvalid("client_name", found=found, wanted="at most 200 printable characters")
        if not 1 <= self.ranks <= MAX_RANKS:
            raise RequestInvalid("ranks", found=self.ranks, wanted=f"1 to {MAX_RANKS}")


@dataclass(slots=True, eq=False)
class Session:
    """`attachment` names the stream that keeps it alive, None when there is none and `expires_at` counts.

    `last_generation` is the generation of the newest mapping; no two mappings of a session have the same. `last_used`
    has the time at which each mapping was used, `joined` the stream of each rank that joined, `running` its Forwards,
    `planes` the plane of each rank that is connected to shared memory.
    """

    session_id: SessionId
    terms: SessionTerms
    attachment: int | None = None
    expires_at: float | None = None
    last_generation: int = 0
    mappings: dict[int, Mapping] = field(default_factory=dict)
    last_used: dict[int, float] = field(default_factory=dict)
    joined: dict[int, int] = field(default_factory=dict)
    running: set[Any] = field(default_factory=set)
    planes: dict[int, str] = field(default_factory=dict)

    def check_rank(self, rank: int) -> None:
        """Raises RequestInvalid unless the session has such a rank."""
        if rank >= self.terms.ranks:
            raise RequestInvalid("rank", found=rank, wanted=f"less than {self.terms.ranks}, the session's ranks")

    def mapping(self, mapping_id: int) -> Mapping:
        try:
            return self.mappings[mapping_id]
        except KeyError:
            raise MappingNotFound(mapping_id) from None


class Sessions:
    """All live sessions. Times are seconds of one monotonic clock, given by the caller."""

    def __init__(self, max_sessions: int, max_mappings: int) -> None:
        self._max_sessions = max_sessions
        self._max_mappings = max_mappings
        self._sessions: dict[SessionId, Session] = {}
        self._attachments = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def peek(self, session_id: SessionId) -> Session | None:
        return self._sessions.get(session_id)

    def __contains__(self, session: object) -> bool:
        return isinstance(session, Session) and self._sessions.get(session.session_id) is session

    def get(self, session_id: SessionId) -> Session:
        try:
            return self._sessions[session_id]
        except KeyError:
            raise SessionNotFound from None

    @property
    def max_mappings(self) -> int:
        """The most mappings of one session."""
        return self._max_mappings

    @property
    def capacity(self) -> int:
        return self._max_sessions

    def find(self, short: str) -> Session | None:
        """The session whose id others see as `short`, or None."""
        return next((session for session in self if session.session_id.short == short), None)

    def open(self, session_id: SessionId, terms: SessionTerms) -> Session:
        """A new session, attached to a new stream."""
        if len(self._sessions) >= self._max_sessions:
            raise CapacityExceeded(
                f"the server has {self._max_sessions} sessions already", found=len(self), wanted=self._max_sessions
            )
        session = Session(session_id, terms)
        self._sessions[session_id] = session
        return self._attach(session)

    def join(self, session: Session, rank: int) -> int:
        """A stream of the rank's own; an older one of the rank is no longer its stream."""
        session.check_rank(rank)
        self._attachments += 1
        session.joined[rank] = self._attachments
        return self._attachments

    def leave(self, session: Session, rank: int, attachment: int) -> None:
        """The rank's stream is gone. Nothing happens when a newer stream has taken over."""
        if session.joined.get(rank) == attachment:
            del session.joined[rank]

    def resume(self, session_id: SessionId) -> Session:
        """The session, attached to a new stream; an older stream is no longer its life."""
        return self._attach(self.get(session_id))

    def _attach(self, session: Session) -> Session:
        self._attachments += 1
        session.attachment, session.expires_at = self._attachments, None
        return session

    def detach(self, session: Session, attachment: int, now: float) -> None:
        """The stream `attachment` is gone. Nothing happens when a newer stream has taken over."""
        if session.attachment == attachment:
            session.attachment, session.expires_at = None, now + session.terms.grace_seconds

    def expired(self, now: float) -> list[Session]:
        """The sessions whose grace has passed."""
        return [s for s in self._sessions.values() if s.expires_at is not None and s.expires_at <= now]

    def end(self, session_id: SessionId) -> Session | None:
        """Removes the session and returns it, or None when it is gone already."""
        return self._sessions.pop(session_id, None)

    def check_room(self, session: Session, mapping_id: int) -> None:
        """Raises CapacityExceeded when the session has all the mappings that it may have."""
        if mapping_id not in session.mappings and len(session.mappings) >= self._max_mappings:
            raise CapacityExceeded(
                f"the session has {self._max_mappings} mappings already: release one",
                found=len(session.mappings),
                wanted=self._max_mappings,
            )
