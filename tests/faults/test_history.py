"""Random clients against one real server: every Forward that was answered is recomputed offline from its digests.

Threads with a client each load, replace, unload, force, keep, hold, map, wait and compute on few slots, without any
order between them; others send whatever generation they ever saw. What each did is a trace: its seed and its steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
import slotcar_client
import torch
from slotcar_client import Client, Hold, Session, SlotcarError, SlotsExhausted

from tests.faults.oracle import Library, spec_file
from tests.faults.raw import CALL_SECONDS, RawEngine, array, refusal
from tests.planes.stub import PLANES
from tests.server import SidecarProcess
from tests.waiting import eventually

SLOTS = 3
STEPS = int(os.environ.get("HISTORY_STEPS", "600"))
SEED = int(os.environ.get("HISTORY_SEED", "20"))
NAMES = ("a", "b", "c", "d")
KEPT, TAKEN = ("a", "b"), "c"
VERSIONS = (1, 2)
# Wide enough that a fill and a kernel take a while, and that they meet.
FEATURES = 512
SITES = {f"layer.{index}": (FEATURES, FEATURES) for index in range(4)}
OPERATORS = frozenset({"ADAPTER_CONFLICT", "ADAPTER_NOT_FOUND", "ADAPTER_NOT_RESIDENT", "SLOTS_EXHAUSTED"})
ENGINES = frozenset({"ADAPTER_NOT_FOUND", "ADAPTER_NOT_RESIDENT", "SLOTS_EXHAUSTED"})
LATE = frozenset({"LAYOUT_STALE", "MAPPING_NOT_FOUND", "SESSION_NOT_FOUND"})


@dataclass
class Actor:
    """One client with its random choices. `steps` says what it did and how that ended, `rows` what it had computed."""

    number: int
    target: str
    library: Library
    over: threading.Event
    plane: str
    rows: int = 0
    steps: list[tuple[object, ...]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    fault: BaseException | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(f"{SEED} {self.number}")
        self.generator = torch.Generator().manual_seed(SEED * 100 + self.number)

    def run(self) -> None:
        try:
            self.act()
        except BaseException as error:
            self.fault = error

    def act(self) -> None:
        raise NotImplementedError

    def entries(self) -> list[str]:
        """A few names and, as an empty one, the base model; more names than two are seldom all resident."""
        names = self.random.sample(NAMES, self.random.choice((1, 1, 2)))
        return [self.random.choice((*names, "")) for _ in range(self.random.randint(1, 5))]

    def counts(self, entries: int) -> tuple[int, ...]:
        return tuple(self.random.randint(0, 4) for _ in range(entries))

    def input(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, FEATURES, generator=self.generator)

    def computed(
        self, digests: Sequence[str], counts: Sequence[int], site: str, x: torch.Tensor, found: torch.Tensor
    ) -> None:
        """Recomputes an answer from the digests that it reports."""
        wrong = self.library.wrong_rows(digests, counts, site, x, found)
        assert not wrong, f"rows {wrong} of {counts} at {site} are not those of {digests}"
        self.rows += x.shape[0]

    def note(self, *step: object) -> None:
        self.steps.append(step)

    def refused(self, reason: str, allowed: frozenset[str]) -> None:
        step = self.steps[-1]
        self.note("refused", reason)
        self.reasons[reason] += 1
        assert reason in allowed, f"{step} was refused with {reason}"


class Tenant(Actor):
    """Operator and engine in one, with the real client."""

    def act(self) -> None:
        verbs = [self.load] * 3 + [self.replace] * 2 + [self.decode] * 10 + [self.hold] * 2
        verbs += [self.keep, self.to_host, self.unload, self.force, self.release, self.release_hold, self.reopen]
        with slotcar_client.connect(self.target) as client:
            self.client: Client = client
            self.open()
            for _ in range(STEPS):
                verb = self.random.choice(verbs)
                self.attempt(verb, OPERATORS if verb != self.decode else ENGINES)
            for name in NAMES:
                self.attempt(lambda name=name: self.client.release_keep(name), OPERATORS)  # type: ignore[misc]
            self.close()

    def open(self) -> None:
        """Sometimes with a slot of its own, if there is one."""
        name, reserved = f"tenant {self.number}", int(self.random.random() < 0.2)
        self.note("open", reserved)
        try:
            self.session: Session = self.client.session(
                name, grace_seconds=0.2, reserved_slots=reserved, transport=self.plane
            )
        except SlotsExhausted as error:
            self.refused(error.reason, OPERATORS)
            self.session = self.client.session(name, grace_seconds=0.2, transport=self.plane)
        self.holds: dict[int, Hold] = {}

    def close(self) -> None:
        self.reasons.update({f"recovered from {reason}": n for reason, n in self.session.recoveries.items()})
        self.session.close()

    def attempt(self, verb: Callable[[], object], allowed: frozenset[str]) -> None:
        try:
            verb()
        except SlotcarError as error:
            self.refused(error.reason, allowed)
            # A hold that cannot be taken again after the session's end is in the way of every call, until it goes.
            lost = self.holds.pop(int(error.metadata.get("hold_id", "0")), None)
            if lost is not None:
                self.session.release_hold(lost)

    def source(self, name: str) -> Path:
        return self.library.root / f"{name}{self.random.choice(VERSIONS)}"

    def load(self) -> None:
        name = self.random.choice(NAMES)
        source = self.random.choice((self.source(name), None))
        self.note("load", name, source and source.name)
        self.client.load(name, source, keep=self.random.random() < 0.1)

    def to_host(self) -> None:
        """Into memory and no slot; a mapping with `load` finds it there. Refused for what is kept."""
        name, source = self.random.choice(NAMES), self.source(self.random.choice(NAMES))
        self.note("load to host", name, source.name)
        with contextlib.suppress(slotcar_client.RequestInvalid):
            self.client.load(name, source, tier="host")

    def replace(self) -> None:
        name = self.random.choice(NAMES)
        source = self.source(self.random.choice(NAMES))
        self.note("replace", name, source.name)
        self.client.load(name, source, replace=True)

    def unload(self) -> None:
        name = self.random.choice(NAMES)
        self.note("unload", name)
        self.client.unload(name)

    def force(self) -> None:
        name = self.random.choice(NAMES)
        self.note("unload --force", name)
        self.client.unload(name, force=True)

    def keep(self) -> None:
        name = self.random.choice(NAMES)
        self.note("keep", name)
        self.client.keep(name)

    def hold(self) -> None:
        name, hold_id = self.random.choice(NAMES), self.random.randint(1, 3)
        seconds, slot = self.random.choice((None, 0.2)), self.random.random() < 0.5
        self.note("hold", hold_id, name, seconds, slot)
        self.holds[hold_id] = self.session.hold(name, hold_id=hold_id, seconds=seconds, slot=slot)

    def release_hold(self) -> None:
        if self.holds:
            hold_id = self.random.choice(sorted(self.holds))
            self.note("release hold", hold_id)
            self.session.release_hold(self.holds.pop(hold_id))

    def release(self) -> None:
        name = self.random.choice(NAMES)
        self.note("release", name)
        self.client.release_keep(name)

    def reopen(self) -> None:
        """The session ends, or its stream breaks: it is resumed, or opened again and mapped by digest."""
        if self.random.random() < 0.5:
            self.note("cut")
            assert self.session._stream is not None
            self.session._stream.cancel()
        else:
            self.note("reopen")
            self.close()
            self.open()

    def decode(self) -> None:
        """A new mapping now and then, and some Forwards with the last."""
        if self.session.mapping is None or self.random.random() < 0.4:
            entries, load, wait = self.entries(), self.random.random() < 0.5, self.random.choice((0.0, 0.0, 0.1))
            self.note("map", load, wait, *entries)
            wanted = [entry or slotcar_client.BASE for entry in entries]
            self.session.set_mapping(wanted, load=load, wait_seconds=wait)
        mapping = self.session.mapping
        assert mapping is not None
        for _ in range(3):
            counts = self.counts(len(mapping.entries))
            site = self.random.choice(tuple(SITES))
            x = self.input(sum(counts))
            self.note("forward", site, counts)
            found = self.session.forward({site: x}, counts)[site]
            # The client has checked that the answer has these digests.
            self.computed(mapping.entry_digests, counts, site, x, found)


class Saboteur(Actor):
    """An operator who takes the slot of a name away by force and at once fills it with other bytes, again and again."""

    def act(self) -> None:
        with slotcar_client.connect(self.target) as client:
            for _ in range(STEPS // 2):
                version = self.random.choice(VERSIONS)
                self.note("load", TAKEN, version)
                client.load(TAKEN, self.library.root / f"{TAKEN}{version}", replace=True)
                self.note("unload --force", TAKEN)
                client.unload(TAKEN, force=True)


class Rude(Actor):
    """An engine that goes on with any mapping and generation that it ever had.

    It asks for much at a time, so that its kernels are under way, or wait for a thread, while others change slots.
    """

    def act(self) -> None:
        with RawEngine(self.target, self.plane) as engine:
            engine.open(grace_seconds=0.2)
            known: list[tuple[int, int, tuple[str, ...]]] = []
            while not self.over.is_set():
                try:
                    self.map(engine, known)
                    self.forward(engine, *known[-1])
                    self.forward(engine, *self.random.choice(known[-4:]))
                except grpc.RpcError as error:
                    self.refused(refusal(error).reason, ENGINES | LATE)

    def map(self, engine: RawEngine, known: list[tuple[int, int, tuple[str, ...]]]) -> None:
        entries, mapping_id = self.entries(), self.random.randint(1, 2)
        load, wait = self.random.random() < 0.3, self.random.choice((0.0, 0.0, 0.1))
        self.note("map", mapping_id, load, wait, *entries)
        response = engine.map(*entries, mapping_id=mapping_id, load=load, wait_seconds=wait)
        known.append((mapping_id, response.generation, tuple(entry.digest for entry in response.entries)))

    def forward(self, engine: RawEngine, mapping_id: int, generation: int, promised: tuple[str, ...]) -> None:
        counts = tuple(self.random.choice((0, 1, 100)) for _ in promised)
        x = self.input(sum(counts))
        self.note("forward", mapping_id, generation, counts)
        request = engine.request(generation, counts, dict.fromkeys(SITES, x.numpy()), mapping_id)
        flying = [engine.engine.Forward.future(request, timeout=CALL_SECONDS) for _ in range(4)]
        errors = [future.exception() for future in flying]
        for future, error in zip(flying, errors, strict=True):
            answer = None if error else future.result()
            assert answer is None or tuple(answer.digests) == promised
            for site, output in zip(SITES, answer.outputs if answer else (), strict=answer is not None):
                self.computed(promised, counts, site, x, torch.from_numpy(array(output)))
        for error in filter(None, errors):
            raise error


class Robbed(Rude):
    """One whose adapter the Saboteur takes away."""

    def entries(self) -> list[str]:
        return [TAKEN, "", KEPT[0]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Two versions of each name; each has one site that the others of its name lack."""
    library = Library(tmp_path_factory.mktemp("adapters"), SITES)
    for number, name in enumerate(NAMES):
        for version in VERSIONS:
            sites = [site for index, site in enumerate(SITES) if index != (number + version) % len(SITES)]
            library.write(f"{name}{version}", seed=10 * number + version, sites=sites, rank=4 * (number + version))
    return library


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory, library: Library) -> Iterator[SidecarProcess]:
    folder = tmp_path_factory.mktemp("s")
    extra = ("--model-spec", str(spec_file(folder, SITES)))
    with SidecarProcess(folder, library.root, slots=SLOTS, max_rank=32, extra=extra) as sidecar:
        yield sidecar


@pytest.mark.parametrize("plane", PLANES)
def test_no_row_of_any_history_is_wrong(sidecar: SidecarProcess, library: Library, tmp_path: Path, plane: str) -> None:
    """To see it fail: drop both calls of check_current in AdapterCache._forward."""
    actors = play((Tenant, Tenant, Tenant, Rude), sidecar, library, (tmp_path, plane))
    reasons = sum((actor.reasons for actor in actors), Counter[str]())
    for reason in ("LAYOUT_STALE", "SLOTS_EXHAUSTED", "recovered from LAYOUT_STALE", "recovered from STREAM_ENDED"):
        assert reasons[reason] > 0, reasons
    _nothing_is_left(sidecar, library)


@pytest.mark.parametrize("plane", PLANES)
def test_no_row_is_wrong_whose_slot_is_taken_while_it_is_computed(
    sidecar: SidecarProcess, library: Library, tmp_path: Path, plane: str
) -> None:
    """All other slots are kept, so that each load writes where kernels may still read.

    To see it fail: drop the second check_current in AdapterCache._forward, and the wait for readers in _fill.
    """
    with slotcar_client.connect(sidecar.target) as client:
        for adapter in client.list():
            client.unload(adapter.name, force=True)
        for name in KEPT:
            client.load(name, library.root / f"{name}1", keep=True)
        actors = play((Robbed, Robbed, Saboteur), sidecar, library, (tmp_path, plane))
        assert min(actor.reasons["LAYOUT_STALE"] for actor in actors[:2]) > 0
        for name in KEPT:
            client.release_keep(name)
    _nothing_is_left(sidecar, library)


def play(
    kinds: Sequence[type[Actor]], sidecar: SidecarProcess, library: Library, where: tuple[Path, str]
) -> list[Actor]:
    """Lets actors of these kinds act at the same time, those that are Rude until the others are done.

    `where`: the folder for what is found, and the plane.
    """
    tmp_path, plane = where
    over = threading.Event()
    actors = [kind(number, sidecar.target, library, over, plane) for number, kind in enumerate(kinds)]
    threads = {actor.number: threading.Thread(target=actor.run) for actor in actors}
    for thread in threads.values():
        thread.start()
    for actor in sorted(actors, key=lambda actor: isinstance(actor, Rude)):
        if isinstance(actor, Rude):
            over.set()
        threads[actor.number].join()

    trace = tmp_path / "trace.json"
    steps = {actor.number: actor.steps for actor in actors}
    trace.write_text(json.dumps({"seed": SEED, "steps": steps}), encoding="utf-8")
    for actor in actors:
        if actor.fault is not None:
            replay = f"HISTORY_SEED={SEED} HISTORY_STEPS={STEPS} choose the same steps; what was done is in {trace}"
            raise AssertionError(f"actor {actor.number}, {type(actor).__name__}: {replay}") from actor.fault
    assert sum(actor.rows for actor in actors) > STEPS
    return actors


def _nothing_is_left(sidecar: SidecarProcess, library: Library) -> None:
    """No pin, no keep, and every slot can be filled and emptied."""
    with slotcar_client.connect(sidecar.target) as client:
        eventually(lambda: _is_quiet(client), "the end of all pins")
        for adapter in client.list():
            assert not adapter.keep
            client.unload(adapter.name)
        assert {slot.state for slot in client.snapshot().layout.slots} == {"free"}
        digests = {client.load(name, library.root / f"{name}1").digest for name in NAMES[:SLOTS]}
        assert {slot.digest for slot in client.snapshot().layout.slots} == digests
    assert "fault in " not in sidecar.log


def _is_quiet(client: Client) -> bool:
    """Nothing is pinned: neither what has a name, nor what a slot drains for."""
    snapshot = client.snapshot()
    return not any(adapter.pins for adapter in snapshot.adapters) and not any(
        slot.state == "draining" for slot in snapshot.layout.slots
    )
