"""Which version each of vLLM's ids stands for, and the holds that keep a version's bytes while the engine wants it.

Invariants: an id stands for one version, until a load in place moves it; what a version is computed with is named by
its digest alone. Held are the versions that unfinished requests are for, and of the others the last `most` that were
admitted. Every rank knows the same ids; rank 0 has the holds.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from vllm.lora.request import LoRARequest

from slotcar_client.client import Client
from slotcar_client.engines.vllm.deltas import Sites
from slotcar_client.engines.vllm.ranks import Ranks
from slotcar_client.engines.vllm.requests import Asked, asked_by, plain_name, version_ref
from slotcar_client.errors import AdapterNotFound, RequestInvalid, SlotcarError, Unavailable
from slotcar_client.recovery import is_away
from slotcar_client.session import Hold, Session

_MAX_NAME = 160  # so that what is added to a name keeps it a name

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Version:
    """One version of an adapter: `ref` is name@digest, `sites` where it has weights, `source` where it came from."""

    ref: str
    sites: Sites
    source: str


class EngineAdapters:
    """The versions of one engine, as one of its ranks knows them."""

    def __init__(self, ranks: Ranks, keeper: Keeper | None, most: int) -> None:
        """`keeper` is there at rank 0."""
        self._ranks = ranks
        self._keeper = keeper
        self._most = most
        self._ids: dict[int, str] = {}  # the last admitted last
        self._versions: dict[str, Version] = {}
        self._in_use: frozenset[str] = frozenset()

    @property
    def ids(self) -> set[int]:
        return set(self._ids)

    @property
    def sites(self) -> dict[str, Sites]:
        """By version."""
        return {ref: version.sites for ref, version in self._versions.items()}

    def ref_of(self, number: int) -> str | None:
        return self._ids.get(number)

    def admit(self, request: LoRARequest) -> str:
        """The version that the request is for from now on, held. The same on every rank.

        Raises RequestInvalid when its id stands for another one, or why the sidecar does not give it.
        """
        number, asked = request.lora_int_id, asked_by(request)
        ref = self._ids.get(number)
        if ref is not None and not asked.replace:
            _check_same(number, ref, asked)
            asked = Asked(ref)
        version = self._ranks.decided(lambda: self._taken(asked))
        self._ids.pop(number, None)
        self._ids[number] = version.ref
        self._versions[version.ref] = version
        self._retain()
        return version.ref

    def use(self, refs: Iterable[str]) -> None:
        """These versions are those of unfinished requests."""
        in_use = frozenset(refs)
        if in_use != self._in_use:
            self._in_use = in_use
            self._retain()

    def drop(self, number: int) -> bool:
        """Forgets an id; its version is held for as long as requests use it. Whether it was known."""
        known = self._ids.pop(number, None) is not None
        self._retain()
        return known

    def _taken(self, asked: Asked) -> Version:
        assert self._keeper is not None
        return self._keeper.take(asked)

    def _retain(self) -> None:
        while len(others := [number for number, ref in self._ids.items() if ref not in self._in_use]) > self._most:
            del self._ids[others[0]]
        wanted = self._in_use.union(self._ids.values())
        self._versions = {ref: version for ref, version in self._versions.items() if ref in wanted}
        if self._keeper is not None:
            self._keeper.retain(wanted)


class _Held(NamedTuple):
    """A version with its hold, the session that has it, and the epoch of the sidecar."""

    version: Version
    hold: Hold
    session_id: str
    epoch: str


class Keeper:
    """Takes and releases the holds of rank 0."""

    def __init__(self, client: Client, session: Session) -> None:
        self._client = client
        self._session = session
        self._held: dict[str, _Held] = {}

    def take(self, asked: Asked) -> Version:
        """Holds what is asked for, and loads it before if it has a source. Raises SlotcarError."""
        try:
            return self._take(asked)
        except SlotcarError as error:
            if "hold_id" not in error.metadata:
                raise
        self.renew()  # it was about a version that another life of the sidecar had
        return self._take(asked)

    def _take(self, asked: Asked) -> Version:
        ref = asked.ref
        if asked.source:
            report = self._client.load(asked.name, asked.source, replace=asked.replace, tier="host")
            ref = version_ref(asked.name, report.digest)
        if ref in self._held:
            return self._held[ref].version
        hold = self._session.hold(ref)
        if hold.ref in self._held:
            self._release(hold)
            return self._held[hold.ref].version
        version = self._described(hold.ref)
        self._note(version, hold)
        return version

    def entry(self, ref: str) -> str:
        """What to ask for in a mapping: the digest of `ref`, by the name under which it is held."""
        return self._held[ref].hold.ref if ref in self._held else ref

    def retain(self, wanted: Iterable[str]) -> None:
        """Releases all others."""
        for ref in self._held.keys() - set(wanted):
            self._release(self._held.pop(ref).hold)

    def renew(self, wanted: Iterable[str] = ()) -> dict[str, SlotcarError]:
        """Takes every hold again that may be gone; returns the versions that cannot be had any more, and why.

        Those in `wanted` are held afterwards, or among them.

        In a new life of the sidecar it loads a version again from where it was, if the digest is still the same there.
        What was unloaded in this life stays so. Raises what says that the sidecar is away, or has not restored all.
        """
        self._reach()
        lost: dict[str, SlotcarError] = {}
        for ref in dict.fromkeys([*self._held, *wanted]):
            held = self._held.get(ref)
            try:
                if held is None:
                    self._take(Asked(ref))
                    continue
                again = self._again(held)
            except SlotcarError as error:
                if is_away(error):
                    raise
                lost[ref] = error
                continue
            self._note(held.version, again)
            self._release(held.hold)
        for ref in lost.keys() & self._held.keys():
            self._release(self._held.pop(ref).hold)
        return lost

    def _note(self, version: Version, hold: Hold) -> None:
        session = self._session
        self._held[version.ref] = _Held(version, hold, session.session_id, session.layout.version.epoch)

    def _reach(self) -> None:
        """Asks for a sign of life; forgets the holds of a session that is gone, which the client would take again."""
        try:
            self._session.fence()
        except SlotcarError as error:  # of a hold that cannot be had again
            if is_away(error):
                raise
        for held in self._held.values():
            if held.session_id != self._session.session_id:
                self._release(held.hold)

    def _again(self, held: _Held) -> Hold:
        version = held.version
        try:
            return self._session.hold(version.ref)
        except AdapterNotFound:
            if held.epoch == self._session.layout.version.epoch:
                raise
            if self._client.capacity().restoring:
                raise Unavailable(f"the sidecar has begun anew, and {version.ref} is not back yet") from None
            if not version.source:
                raise
        return self._reloaded(version)

    def _reloaded(self, version: Version) -> Hold:
        """The same bytes under a name that nobody else uses: which version the adapter's own name has is not ours."""
        name, _, digest = version.ref.partition("@")
        ours = f"{name[:_MAX_NAME]}.{digest.partition(':')[2][:16]}"
        _log.info("loading %s again from %s", version.ref, version.source)
        hold = self._session.load_held(ours, version.source, digest=digest, tier="host")
        with contextlib.suppress(AdapterNotFound):
            self._client.unload(ours)
        return hold

    def _described(self, ref: str) -> Version:
        """With its sites and its source, if its name is still there to ask for."""
        try:
            adapter = self._client.get(ref)
        except AdapterNotFound:
            return Version(ref, None, "")
        return Version(ref, frozenset(adapter.sites), adapter.source)

    def _release(self, hold: Hold) -> None:
        with contextlib.suppress(SlotcarError):  # the session's grace ends it too
            self._session.release_hold(hold)


def _check_same(number: int, ref: str, asked: Asked) -> None:
    same = asked.ref == ref if asked.fixed else asked.name == plain_name(ref)
    if not same:
        raise RequestInvalid(
            f"lora_int_id {number} stands for {ref}, the request says {asked.ref}: give each version an id of its own",
            field="lora_int_id",
            found=asked.ref,
            wanted=ref,
        )
