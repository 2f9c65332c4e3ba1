"""The operator's and the engine's way in: one channel to one sidecar."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Self, TypeVar, Unpack

from slotcar_client import convert, verbs
from slotcar_client.config import default_files, default_target, unix_path
from slotcar_client.credentials import Address, Credentials
from slotcar_client.effects import Plan, run
from slotcar_client.events import EventStream
from slotcar_client.options import RankSettings, SessionOptions, SessionSettings, checked_timeout
from slotcar_client.rpc import Rpc
from slotcar_client.session import RankSession, Session
from slotcar_client.session_base import MappedSession
from slotcar_client.upload import Upload
from slotcar_client.values import (
    AdapterInfo,
    Capacity,
    DesiredSet,
    Estimate,
    LoadReport,
    Prefetched,
    SessionInfo,
    Settings,
    Snapshot,
    UnloadReport,
)

T = TypeVar("T")
SessionT = TypeVar("SessionT", bound=MappedSession)

DEFAULT_TIMEOUT_SECONDS = 60.0


def connect(
    target: str | None = None,
    *,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    credentials: Credentials | None = None,
    affinity: str = "",
) -> Client:
    """A client of the sidecar at `target`: unix:///path, tcp://host:port or host:port; by default $SLOTCAR_TARGET.

    timeout_seconds: the deadline of each call. credentials: by default the files that $SLOTCAR_TLS_CA,
    $SLOTCAR_TLS_CERT, $SLOTCAR_TLS_KEY and $SLOTCAR_TOKEN_FILE name; at a unix socket none are needed. affinity: before
    a pool of sidecars, what its proxy chooses one of them by, such as the name of the adapter that the sessions of this
    client use. Nothing is sent before the first call. Raises RequestInvalid.
    """
    return Client(address(target, credentials, affinity), checked_timeout(timeout_seconds))


def address(target: str | None = None, credentials: Credentials | None = None, affinity: str = "") -> Address:
    """Where the sidecar is and what to show it, by default what the environment says. Raises RequestInvalid."""
    shown = credentials if credentials is not None else Credentials(**default_files())
    return Address(target if target is not None else default_target(), shown, affinity)


class Client:
    """Made by `connect`; a context that closes the channel and the sessions. Every method raises SlotcarError."""

    def __init__(self, address: Address, timeout_seconds: float) -> None:
        self.target = address.target
        self._rpc = Rpc(address, timeout_seconds)
        self._sessions: weakref.WeakSet[MappedSession] = weakref.WeakSet()

    # Adapters

    def load(
        self,
        name: str,
        source: str | os.PathLike[str] | None = None,
        *,
        replace: bool = False,
        keep: bool = False,
        digest: str | None = None,
        tier: str = "device",
    ) -> LoadReport:
        """Makes the adapter at `source` resident under `name`; returns when it can be mapped. Idempotent.

        source: as the server sees it; by default the one that the name was loaded from. replace: the name may move to
        other bytes. keep: it stays resident. digest: refuse bytes that have another one. tier: "device", or "host" for
        memory only, from which `set_mapping` with `load` makes it resident.
        """
        request = verbs.load_request(name, source, digest, replace=replace, keep=keep, tier=tier)
        return self._run(verbs.load(request))

    def upload(
        self,
        name: str,
        folder: str | os.PathLike[str],
        *,
        replace: bool = False,
        keep: bool = False,
        digest: str | None = None,
        tier: str = "device",
    ) -> LoadReport:
        """`load` for an adapter whose folder is on this machine: its two files travel with the call.

        Raises RequestInvalid, naming the file, unless both are regular files; SourceUnavailable, with no effect, when
        one changes while it is sent.
        """
        header = verbs.upload_header(name, digest, replace=replace, keep=keep, tier=tier)
        rpc = self._open()
        with Upload(folder, header) as upload:
            return convert.load_report(rpc.upload(upload))

    def unload(self, ref: str, *, force: bool = False) -> UnloadReport:
        """Takes the name and its keep away; its slot drains while pinned, or is freed at once with `force`."""
        return self._run(verbs.unload(ref, force))

    def keep(self, ref: str) -> AdapterInfo:
        """Asks for a resident adapter to stay resident. Idempotent."""
        return self._run(verbs.keep(ref))

    def release_keep(self, ref: str) -> AdapterInfo:
        """Ends a keep. Idempotent."""
        return self._run(verbs.release_keep(ref))

    def get(self, ref: str) -> AdapterInfo:
        """One adapter, with its sites."""
        return self._run(verbs.get(ref))

    def list(self) -> tuple[AdapterInfo, ...]:
        """All adapters, in order of their names, from one consistent snapshot."""
        return self.snapshot().adapters

    def snapshot(self) -> Snapshot:
        """All adapters with the layout at the same moment."""
        return self._run(verbs.snapshot())

    def estimate(self, source: str | os.PathLike[str]) -> Estimate:
        """What a load of `source` would take, and whether it would be accepted. Has no effect."""
        return self._run(verbs.estimate(source))

    def prefetch(self, refs: Iterable[str], *, tier: str = "device") -> tuple[Prefetched, ...]:
        """Brings adapters that the server knows nearer, each as far as that costs nobody anything.

        Into slots that are free or whose adapters nobody pins, keeps or has used meanwhile. One that gets no further is
        no error: `why_not` says why. It goes on at the server when the deadline of the call is over.
        """
        return self._run(verbs.prefetch(refs, tier))

    def desired(self) -> DesiredSet:
        """What the server's file of adapters declares, and how far each entry is."""
        return self._run(verbs.desired())

    def capacity(self) -> Capacity:
        """How full each tier is and what is promised to whom."""
        return self._run(verbs.capacity())

    def events(self, replay: int = 0) -> EventStream:
        """Everything that happens from this call on, after up to `replay` events of the past; close it to stop."""
        return EventStream(self._open(), replay)

    # The server itself

    def settings(self) -> Settings:
        """What the server's process is, and the settings in force."""
        return self._run(verbs.settings())

    def set_log_level(self, level: str) -> str:
        """Changes how much the server logs: "debug", "info", "warning" or "error". Returns the level before."""
        return self._run(verbs.set_log_level(level))

    def shut_down(self, deadline_seconds: float | None = None) -> float:
        """Ends the server as SIGTERM does; returns at once, with the seconds that sessions may go on computing.

        deadline_seconds: at most so long; by default what the server is set to. The nearest of several counts.
        """
        return self._run(verbs.shut_down(deadline_seconds))

    # Engines

    def session(self, name: str = "python", **settings: Unpack[SessionSettings]) -> Session:
        """Opens a session.

        name: for people. model_spec: the engine's model; the first that the server sees shapes its slots.
        grace_seconds: how long the session outlives a broken connection, 30 by default, at most 3600.
        transport: how Forwards travel: "direct" or "ring" in shared memory, "stream" or "unary" in messages; "auto",
        the default, is the fastest that both sides can. arena_bytes: room in shared memory for the tensors of the
        Forwards that are under way, 64 MiB by default. reserved_slots: slots that nobody else may take, 0 by default.
        ranks: how many processes compute for it, 1 by default; the others `join`.
        away: what calls do when the server is gone or shutting down: "fail" at once, the default, or "wait" until it
        is back, for at most `away_seconds` (60 by default) per call, this one too, and then go on by digest, or raise
        Unavailable. Nothing is ever computed as the base model instead. `close` ends a call that waits.
        on_stale: called in the calling thread with a mapping and the error that says why it is not current, each time
        before it is set again by digest. What it raises reaches the caller, and the mapping is left as it was: for an
        engine that must repeat a whole step. The next call of the session finds the mapping stale again.
        """
        return self._entered(Session(self._open(), SessionOptions(name, **settings), unix_path(self.target)))

    def join(self, session_id: str, rank: int, **settings: Unpack[RankSettings]) -> RankSession:
        """Joins another process's session as one of its ranks; the keyword arguments are those of `session`."""
        options = SessionOptions(join=session_id, rank=rank, **settings)
        return self._entered(RankSession(self._open(), options, unix_path(self.target)))

    def sessions(self) -> tuple[SessionInfo, ...]:
        """All sessions with their mappings and holds, and so who pins which slot."""
        return self._run(verbs.sessions())

    def end_session(self, session: str) -> bool:
        """Ends a session, by the short id that `sessions` shows, and all that it owns; False when there was none."""
        return self._run(verbs.end_session(session))

    # The end

    def close(self) -> None:
        """Closes the sessions, then the channel. Idempotent."""
        for session in tuple(self._sessions):
            session.close()
        self._rpc.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _entered(self, session: SessionT) -> SessionT:
        self._sessions.add(session)
        return session

    def _run(self, plan: Plan[T]) -> T:
        return run(plan, self._open().perform)

    def _open(self) -> Rpc:
        self._rpc.check_usable()
        return self._rpc
