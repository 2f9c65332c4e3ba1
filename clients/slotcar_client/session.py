"""A session: one engine's presence at a sidecar, which maps adapters to rows and computes their LoRA."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from slotcar_client import verbs
from slotcar_client.entries import Entries, Entry, parse_entries
from slotcar_client.errors import RequestInvalid, SessionNotFound, SlotcarError
from slotcar_client.options import SessionOptions
from slotcar_client.protocol import MappingWish
from slotcar_client.rpc import Rpc
from slotcar_client.session_base import MappedSession
from slotcar_client.session_state import ROWS_MAPPING_ID
from slotcar_client.values import Held, Mapping

RowsFollower = Callable[[Mapping | None], None]


@dataclass(frozen=True, slots=True, eq=False)
class Hold(Held):
    """Made by `Session.hold`; a context that releases the hold, also when its session or the server is gone."""

    _session: Session = field(repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What ended the block is worth more than a server that is away now; its grace ends the hold.
        with contextlib.suppress(SlotcarError):
            self._session.release_hold(self)


class Session(MappedSession):
    """Made by `Client.session`; a context that ends the session. Safe to use from threads, one call at a time."""

    def __init__(self, rpc: Rpc, options: SessionOptions, socket_path: str | None = None) -> None:
        self._rows: Mapping | None = None
        self._follower: RowsFollower | None = None
        super().__init__(rpc, options, socket_path)

    # Holds

    def hold(self, ref: str, *, hold_id: int | None = None, seconds: float | None = None, slot: bool = False) -> Hold:
        """Keeps an adapter's bytes from leaving, until the hold is released, its time is over, or the session ends.

        hold_id: the caller's, such as a request's number, whose hold is replaced; by default one of its own.
        seconds: how long, more than 0 and at most a day. slot: also keep its slot, if the session's reservation has
        room for it; `tier` says whether it has.
        When the session had to be opened anew, its next call takes the holds again by digest, for the rest of their
        time, before it does anything else. A refusal is raised by that call, with the `hold_id` in its metadata, and by
        each one after it until the adapter is back or the hold is released. Raises SlotcarError.
        """
        return self._run(self._state.hold(ref, hold_id, seconds, slot, self._hold))

    def load_held(
        self,
        name: str,
        source: str | os.PathLike[str] | None = None,
        *,
        digest: str | None = None,
        seconds: float | None = None,
        slot: bool = False,
        tier: str = "device",
    ) -> Hold:
        """`Client.load` and `hold` in one step, so that the adapter cannot leave in between. Raises SlotcarError."""
        request = verbs.load_request(name, source, digest, tier=tier)
        return self._run(self._state.load_held(request, seconds, slot, self._hold))

    def release_hold(self, hold: Held) -> None:
        """Ends a hold. Idempotent; a session that is gone is no error, and a hold that was replaced stays replaced."""
        with contextlib.suppress(SessionNotFound):
            self._run(self._state.release_hold(hold))

    def _hold(self, hold_id: int, ref: str, tier: str) -> Hold:
        return Hold(hold_id, ref, tier, self)

    def fence(self) -> None:
        """Returns when no Forward that the session sent before still runs at the server. Raises SlotcarError."""
        self._run(self._state.fence())

    # Rows

    @contextlib.contextmanager
    def rows(self, entries: Iterable[Entry] | Mapping) -> Iterator[Mapping]:
        """Says which adapter each sequence of a batch uses, for the model that `attach` connected to this session.

        entries: one per sequence, as for `set_mapping`; names become digests here, once, and the mapping is released
        at the end. Or a mapping that `set_mapping` returned, which stays. Raises SlotcarError.
        """
        if self._rows is not None:
            raise RequestInvalid(
                "rows is in use: leave it before entering it again", field="rows", found="nested", wanted="one"
            )
        lent = isinstance(entries, Mapping)
        if isinstance(entries, Mapping):
            mapping = self._state.current(entries)
        else:
            mapping = self._set_mapping(ROWS_MAPPING_ID, parse_entries(entries))
        self._rows = mapping
        try:
            self._tell_follower(mapping)
            yield mapping
        finally:
            self._rows = None
            self._tell_follower(None)
            if not lent:
                # What ended the block is worth more than a server that is away now; its grace ends the pins.
                with contextlib.suppress(SlotcarError):
                    self.release_mapping(mapping)

    def follow_rows(self, follower: RowsFollower) -> None:
        """Calls `follower` with the mapping when a `rows` block begins, now if one is open, and with None at its end.

        Raises RequestInvalid when there is a follower already, and what `follower` raises.
        """
        if self._follower is not None:
            raise RequestInvalid(
                "the session has an attached model: detach it first", field="session", found=1, wanted=0
            )
        follower(self._rows)
        self._follower = follower

    def unfollow_rows(self) -> None:
        """Ends `follow_rows`. Idempotent."""
        self._follower = None

    def sites_of(self, mapping: Mapping) -> tuple[frozenset[str], ...]:
        """The sites of the model at which each entry's adapter has weights; none for BASE. Cached by digest."""
        return tuple(known.adapted for known in self._run(self._state.sites_of(mapping)))

    def sites_needing_base(self, mapping: Mapping) -> tuple[frozenset[str], ...]:
        """Those of them at which `forward` needs the base model's output, as `base` or as `aux`."""
        return tuple(known.needing_base for known in self._run(self._state.sites_of(mapping)))

    def _set_mapping(self, mapping_id: int, entries: Entries) -> Mapping:
        return self._run(self._state.map(MappingWish(mapping_id, entries)))

    def _tell_follower(self, mapping: Mapping | None) -> None:
        if self._follower is not None:
            self._follower(mapping)


class RankSession(MappedSession):
    """One rank of another process's session, made by `Client.join`; closing it does not end the session.

    Every rank sets the same mappings, with the same ids, by digest; the server records the first answer for the others.
    A session that is gone is the caller's error: only its owner opens it anew, under a new id.
    """

    @property
    def rank(self) -> int:
        """The rank of this process, below `ranks`."""
        return self._state.options.rank
