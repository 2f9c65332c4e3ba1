"""A reconciler without I/O: the table of what is declared, over names and sources that a test changes as it likes."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

from slotcar_sidecar.core.desired import (
    Cause,
    DesiredSet,
    Entry,
    Load,
    Loaded,
    Look,
    Looked,
    Outcome,
    Refused,
    Release,
    Seen,
    Unload,
    Want,
    Wanted,
)
from slotcar_sidecar.core.errors import Reason
from slotcar_sidecar.core.ids import AdapterName, Digest
from slotcar_sidecar.core.reconcile import Reconciliation

SOURCES = ["/x", "/y", "/z"]
SLOTS = 3
MOST_AT_A_TIME = 2


def digest_of(source: str, version: int) -> Digest:
    return Digest("sha256:" + hashlib.sha256(f"{source} {version}".encode()).hexdigest())


@dataclass
class Content:
    """What is at a source: its version, and with which reason a load of it fails."""

    version: int = 0
    fails: Reason | None = None

    @property
    def stamp(self) -> Hashable:
        """What a look tells of it."""
        return self.version, self.fails


class FakeWorld:
    """Names, keeps and sources as the cache has them; slots only as the bound on keeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.model_known = True
        self.names: dict[AdapterName, Seen] = {}
        self.sources = {source: Content() for source in SOURCES}

    def seen(self, name: AdapterName) -> Seen | None:
        return self.names.get(name)

    def room(self, wanted: Wanted) -> int:
        return SLOTS - 1 - len(self.kept) if wanted is Wanted.KEEP else SLOTS - len(self.kept)

    @property
    def kept(self) -> set[AdapterName]:
        return {name for name, seen in self.names.items() if seen.kept}

    def load(self, want: Want, before: Hashable) -> Outcome:
        """With the stamp of the source when the load began."""
        content = self.sources[want.source]
        digest = digest_of(want.source, content.version)
        keep = want.state is Wanted.KEEP and self.model_known
        reason = content.fails
        if reason is None and want.digest not in (None, digest):
            reason = Reason.DIGEST_MISMATCH
        if reason is None and keep and len(self.kept | {want.name}) >= SLOTS:
            reason = Reason.SLOTS_EXHAUSTED
        if reason is not None:
            return Refused(Cause(reason, "no"), before if content.stamp == before else None, self.room(want.state))
        before = self.names.get(want.name)
        self.names[want.name] = Seen(digest, keep or (before is not None and before.kept))
        return Loaded(digest, want.in_slot and self.model_known)


class Loop:
    """Does what a reconciler does, one step at a time."""

    def __init__(self) -> None:
        self.world = FakeWorld()
        self.told: list[Entry] = []
        self.table = Reconciliation(self.told.append)
        self.waiting: deque[Load | Look] = deque()
        self.begun: list[Load | Look] = []
        self.before: dict[AdapterName, Hashable] = {}
        self.loads = 0

    def declare(self, desired: DesiredSet) -> None:
        self.judge(self.table.declare(desired, self.world.now))

    def judge(self, names: Iterable[AdapterName]) -> int:
        """Returns how many actions there were."""
        names, count = set(names), 0
        while names:
            actions = self.table.judge(names, self.world)
            count += len(actions)
            names = set()
            for action in actions:
                if isinstance(action, Load | Look):
                    self.waiting.append(action)
                    continue
                names.add(action.name)
                if isinstance(action, Unload):
                    del self.world.names[action.name]
                elif isinstance(action, Release):
                    self.world.names[action.name] = replace(self.world.names[action.name], kept=False)
        self.start()
        return count

    def start(self) -> None:
        while self.waiting and len(self.begun) < MOST_AT_A_TIME:
            action = self.waiting.popleft()
            if self.table.begin(action):
                self.begun.append(action)
                self.before[action.want.name] = self.world.sources[action.want.source].stamp
            else:
                self.judge({action.want.name})

    def finish(self, index: int) -> None:
        action = self.begun.pop(index % len(self.begun))
        if isinstance(action, Load):
            self.loads += 1
            outcome = self.world.load(action.want, self.before[action.want.name])
        else:
            outcome = Looked(self.world.sources[action.want.source].stamp)
        self.table.end(action, outcome, self.world.now)
        self.judge({action.want.name})

    def advance(self, seconds: float) -> None:
        self.world.now += seconds
        self.judge(self.table.due(self.world.now))

    def finish_all(self) -> None:
        while self.begun:
            self.finish(0)
