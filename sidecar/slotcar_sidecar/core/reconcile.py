"""The declared set against what there is: which entries there are, whose turn it is, and what is under way.

Invariant: a name has at most one action out, whatever becomes of its entry meanwhile.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from slotcar_sidecar.core.desired import (
    Action,
    Cause,
    DesiredSet,
    Entry,
    EntryState,
    Load,
    Look,
    Malformed,
    Outcome,
    Unload,
    Want,
    Wanted,
    World,
)
from slotcar_sidecar.core.errors import Reason
from slotcar_sidecar.core.ids import AdapterName

_REACHED = (EntryState.READY, EntryState.ABSENT)


@dataclass(frozen=True, slots=True)
class FileStatus:
    """The file that declares. `version` is a digest of the text that is in force, empty for none yet; `cause` says
    why what is in the file now is not in force."""

    path: str
    version: str
    prune: bool
    cause: Cause | None


@dataclass(frozen=True, slots=True)
class EntryStatus:
    """An entry for others to see: `want` is None for one that is malformed, which `place` and `name` tell.

    Times are in seconds from now: how long it is in its state, and until it is tried again by itself.
    """

    place: str
    name: str
    want: Want | None
    state: EntryState
    cause: Cause | None
    attempts: int = 0
    next_try_seconds: float | None = None
    since_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class DesiredStatus:
    """What is declared, and how far each entry is; `file` is None where nothing is declared by a file.

    `counts` says how many entries are in each state, also when `entries` are only some of them.
    """

    file: FileStatus | None = None
    entries: tuple[EntryStatus, ...] = ()
    counts: Mapping[EntryState, int] = field(default_factory=dict)


class Reconciliation:
    """`changed` is told of each entry that reached what was wanted, or failed in a new way."""

    def __init__(self, changed: Callable[[Entry], None]) -> None:
        self._changed = changed
        self._entries: dict[AdapterName, Entry] = {}
        self._malformed: tuple[Malformed, ...] = ()
        self._declared_at = 0.0
        self._position: dict[AdapterName, int] = {}
        self._ours: set[AdapterName] = set()
        self._left: set[AdapterName] = set()
        self._out: set[AdapterName] = set()
        self._begun: dict[AdapterName, Want] = {}
        self._untried: set[AdapterName] = set()
        self._timers: list[tuple[float, AdapterName]] = []
        self._shown: dict[AdapterName, EntryState] = {}
        self._counts: Counter[EntryState] = Counter()

    # What is declared

    def declare(self, desired: DesiredSet, now: float) -> frozenset[AdapterName]:
        """Puts a set in place of the one before; returns the names to judge. Entries that are the same go on."""
        wants = {want.name: want for want in desired.wants}
        self._ours |= {want.name for want in desired.wants if want.state is not Wanted.ABSENT}
        if desired.prune and all(each.name for each in desired.malformed):
            gone = self._ours - wants.keys() - _names(desired.malformed)
            self._left |= gone
            self._ours -= gone
        self._left -= wants.keys() | _names(desired.malformed)
        for name in self._entries.keys() - wants.keys():
            self._drop(name)
        for name, want in wants.items():
            if name not in self._entries or self._entries[name].want != want:
                self._put(Entry(want, now))
        self._position = {name: index for index, name in enumerate(wants)}
        self._malformed, self._declared_at = desired.malformed, now
        return frozenset(self._entries) | self._left

    @property
    def names(self) -> frozenset[AdapterName]:
        """All names that are declared, or that a set left behind."""
        return frozenset(self._entries) | self._left

    # Whose turn it is

    def judge(self, names: Iterable[AdapterName], world: World) -> list[Action]:
        """What to do now about these names, in the order in which they are declared.

        Loads and looks are out until `begin` refuses or `end` ends them.
        """
        actions: list[Action] = []
        for name in sorted(names, key=lambda name: self._position.get(name, -1)):
            action = None if name in self._out else self._judge(name, world)
            if isinstance(action, Load | Look):
                self._out.add(name)
            if action is not None:
                actions.append(action)
        return actions

    def _judge(self, name: AdapterName, world: World) -> Action | None:
        entry = self._entries.get(name)
        if entry is not None:
            entry, action = entry.judge(world)
            self._put(entry)
            return action
        if name in self._left:
            if world.seen(name) is not None:
                return Unload(name)
            self._left.discard(name)
        return None

    def due(self, now: float) -> frozenset[AdapterName]:
        """The names whose time has come."""
        names: set[AdapterName] = set()
        while self._timers and self._timers[0][0] <= now:
            names.add(heapq.heappop(self._timers)[1])
        return frozenset(names)

    @property
    def next_due(self) -> float | None:
        """When `due` has the next."""
        return self._timers[0][0] if self._timers else None

    def waiting_for(self, reason: Reason) -> frozenset[AdapterName]:
        """The names that are not what is wanted for this reason."""
        return frozenset(name for name, each in self._entries.items() if each.cause and each.cause.reason is reason)

    # What is under way

    def begin(self, action: Load | Look) -> bool:
        """Whether the action is still wanted; if not, its name is to be judged again."""
        name = action.want.name
        entry = self._entries.get(name)
        if entry is None or entry.want != action.want:
            self._out.discard(name)
            return False
        if isinstance(action, Load):
            self._begun[name] = action.want
            self._show(name)
        return True

    def end(self, action: Load | Look, outcome: Outcome, now: float) -> None:
        """How an action that began ended; its name is to be judged again."""
        name = action.want.name
        self._out.discard(name)
        self._begun.pop(name, None)
        entry = self._entries.get(name)
        if entry is not None and entry.want == action.want:
            self._put(entry.end(outcome, now))
        self._show(name)

    # What others see

    @property
    def is_settled(self) -> bool:
        """Each entry was tried since the set was declared."""
        return not self._untried and not self._left

    @property
    def declared_at(self) -> float:
        return self._declared_at

    def counts(self) -> Mapping[EntryState, int]:
        """How many entries are in each state."""
        return {state: self._counts[state] for state in EntryState} | {EntryState.INVALID: len(self._malformed)}

    def status(self, now: float) -> tuple[EntryStatus, ...]:
        """Every entry, in order of the names; those without one come last."""
        found = [*(self._status_of(name, now) for name in self._entries), *self._broken(now)]
        return tuple(sorted(found, key=lambda each: (not each.name, each.name)))

    def worst(self, now: float, most: int) -> tuple[EntryStatus, ...]:
        """At most so many entries: those that are malformed or have failed, then those on their way, then others."""
        found = list(islice(self._broken(now), most))
        for states in ((EntryState.FAILED,), (EntryState.LOADING, EntryState.PENDING), _REACHED):
            names = (name for name, state in self._shown.items() if state in states)
            found += [self._status_of(name, now) for name in islice(names, most - len(found))]
        return tuple(found)

    def _status_of(self, name: AdapterName, now: float) -> EntryStatus:
        entry = self._entries[name]
        return EntryStatus(
            *("", str(name), entry.want, self._shown[name], entry.cause, entry.attempts),
            None if entry.next_try is None else max(0.0, entry.next_try - now),
            now - entry.since,
        )

    def _broken(self, now: float) -> Iterator[EntryStatus]:
        since = now - self._declared_at
        for each in self._malformed:
            yield EntryStatus(each.place, each.name, None, EntryState.INVALID, each.cause, since_seconds=since)

    # Steps

    def _put(self, entry: Entry) -> None:
        name, before = entry.want.name, self._entries.get(entry.want.name)
        self._entries[name] = entry
        if entry.is_tried:
            self._untried.discard(name)
        else:
            self._untried.add(name)
        if entry.due is not None and (before is None or before.due != entry.due):
            heapq.heappush(self._timers, (entry.due, name))
        self._show(name)
        is_told = entry.state in (EntryState.READY, EntryState.ABSENT, EntryState.FAILED)
        if is_told and before is not None and (before.state, before.cause) != (entry.state, entry.cause):
            self._changed(entry)

    def _drop(self, name: AdapterName) -> None:
        del self._entries[name]
        self._untried.discard(name)
        self._counts[self._shown.pop(name)] -= 1

    def _show(self, name: AdapterName) -> None:
        entry = self._entries.get(name)
        if entry is None:
            return
        state = EntryState.LOADING if self._begun.get(name) == entry.want else entry.state
        before = self._shown.get(name)
        if before is not None:
            self._counts[before] -= 1
        self._counts[state] += 1
        self._shown[name] = state

    def check_integrity(self) -> None:
        """Asserts the invariants of this table."""
        assert self._begun.keys() <= self._out
        assert self._shown.keys() == self._entries.keys()
        assert +self._counts == Counter(self._shown.values())
        assert self._untried == {name for name, entry in self._entries.items() if not entry.is_tried}
        timers = set(self._timers)
        for name, entry in self._entries.items():
            assert entry.want.name == name
            is_waiting = entry.refused is not None and name not in self._out
            assert not is_waiting or (entry.due, name) in timers, f"{name} is never tried again"


def _names(malformed: Iterable[Malformed]) -> frozenset[AdapterName]:
    return frozenset(AdapterName(each.name) for each in malformed if each.name)
