"""Engines of a soak: sessions of one or two ranks that map, hold, wait and compute, break off, come back or vanish."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import grpc
from slotcar.v1 import adapter_pb2, adapter_service_pb2, error_pb2
from slotcar.v1 import engine_service_pb2 as pb

from tests.faults.raw import CALL_SECONDS, RawEngine, duration, entries
from tests.planes.stub import PLANES
from tests.soak.actor import Actor, ServerAway, SessionGone, World
from tests.soak.forwards import Asked, Known, ask
from tests.soak.plan import NAMES, UPLOADED, VERSIONS

VANISHED = 77
"""The exit code of a process that an engine ended."""

_MAP = frozenset(
    {"ADAPTER_NOT_FOUND", "ADAPTER_NOT_RESIDENT", "SLOTS_EXHAUSTED", "CAPACITY_EXCEEDED", "MAPPING_NOT_FOUND"}
)
_FORWARD = frozenset({"LAYOUT_STALE", "MAPPING_NOT_FOUND"})
_HOLD = frozenset({"ADAPTER_NOT_FOUND", "CAPACITY_EXCEEDED"})
_LOAD = frozenset({"ADAPTER_NOT_FOUND", "ADAPTER_CONFLICT", "SLOTS_EXHAUSTED", "CAPACITY_EXCEEDED", "REQUEST_INVALID"})


class Engine(Actor):
    """One engine. It reads nothing but what it was answered, and goes on with any mapping that it ever had."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.past: deque[Known] = deque(maxlen=8)
        self.ranks = 1
        self.session = self.epoch = ""

    def live(self) -> None:
        with contextlib.ExitStack() as wires:
            self.plane = self.random.choice(PLANES)
            self.wire = wires.enter_context(RawEngine(self.world.target, self.plane))
            self.wires = [self.wire]
            self.known: deque[Known] = deque(maxlen=5)
            self.digests: dict[str, str] = {}
            if not self.open():
                self.pause(0.05, 0.3)
                return
            try:
                if self.ranks == 2:
                    self.wires.append(wires.enter_context(RawEngine(self.world.target, self.plane)))
                    self.join()
                for _ in range(self.random.randint(20, 200)):
                    if self.world.over.is_set():
                        break
                    self.act()
                self.leave()
            except SessionGone:
                self.past.extend(self.known)

    # The session

    def open(self, resume: str = "") -> bool:
        self.ranks = self.ranks if resume else self.random.choice((1, 1, 1, 2))
        reserved = self.random.choice((0, 0, 0, 0, 1))
        grace = self.random.choice((0.2, 1.0, 3.0))

        def call() -> pb.OpenSessionResponse:
            request = pb.OpenSessionRequest(client_name=self.name, resume_session=resume, grace=duration(grace))
            request.ranks, request.reserved_slots = self.ranks, reserved
            self.stream = self.wire.engine.OpenSession(request)
            first: pb.OpenSessionResponse = next(self.stream)
            return first

        verb = "resume" if resume else "open"
        first = self.attempt(verb, call, frozenset({"SLOTS_EXHAUSTED"}), ranks=self.ranks, reserved=reserved)
        if first is None:
            return False
        self.session, self.epoch = first.opened.session, first.version.epoch
        if resume and self.session != resume:
            self.fault("a resumed session has another id")
        self.watch(self.stream, first.version.generation)
        return True

    def join(self) -> None:
        def call() -> pb.JoinSessionResponse:
            stream = self.wires[1].engine.JoinSession(pb.JoinSessionRequest(session=self.session, rank=1))
            first: pb.JoinSessionResponse = next(stream)
            self.watch(stream, first.version.generation)
            return first

        self.attempt("join", call, frozenset())

    def watch(self, stream: Any, generation: int) -> None:
        """Reads a session's stream in a thread of its own: its versions must not go back."""
        epoch = self.epoch

        def read() -> None:
            newest = generation
            with contextlib.suppress(grpc.RpcError):
                for message in stream:
                    if message.version.epoch != epoch:
                        self.fault(f"a stream went from epoch {epoch} to {message.version.epoch} (I3)")
                    if message.version.generation < newest:
                        self.fault(f"a stream went from generation {newest} to {message.version.generation} (I3)")
                    newest = message.version.generation

        threading.Thread(target=read, daemon=True).start()

    def leave(self) -> None:
        """Ends the session, or goes without a word."""
        self.past.extend(self.known)
        if self.random.random() < 0.5:
            request = pb.CloseSessionRequest(session=self.session)
            self.attempt("close", lambda: self.wire.engine.CloseSession(request, timeout=CALL_SECONDS), frozenset())
        elif self.random.random() < 0.02:
            self.step("die", "OK")
            os._exit(VANISHED)
        else:
            self.step("vanish", "OK")

    def cut(self) -> None:
        """The stream breaks; the session is resumed, perhaps too late."""
        self.stream.cancel()
        self.step("cut", "OK")
        self.pause(0.0, 0.6)
        self.open(self.session)

    # Steps

    def act(self) -> None:
        verbs: dict[Callable[[], None], float] = {
            self.map: 5,
            self.forward: 8,
            self.burst: 4,
            self.pipeline: 4,
            self.hold: 2,
            self.release_hold: 1,
        }
        verbs |= {self.release: 1, self.fence: 1, self.map_behind: 1, self.load_held: 1, self.haunt: 1}
        verbs |= {self.cut: 0.4, self.idle: 0.15, self.look: 0.5}
        (verb,) = self.random.choices(tuple(verbs), tuple(verbs.values()))
        if not self.known and verb in (self.forward, self.burst, self.pipeline):
            verb = self.map
        verb()

    def refs(self) -> tuple[str, ...]:
        """A few names, some of them twice, and the base model."""
        names = self.random.sample((*NAMES, *UPLOADED), self.random.choice((1, 1, 2, 3)))
        chosen = [self.random.choice((*names, "")) for _ in range(self.random.randint(1, 6))]
        if self.ranks > 1:
            if not self.digests:
                self.look()
            return tuple(self.with_digest(name) for name in chosen)
        return tuple(self.with_digest(name) if self.random.random() < 0.2 else name for name in chosen)

    def with_digest(self, name: str) -> str:
        digest = self.digests.get(name)
        if digest is None:
            return "" if self.ranks > 1 else name
        return f"{name}@{digest}"

    def look(self) -> None:
        """Learns digests of names."""
        request = adapter_service_pb2.ListAdaptersRequest()
        answer = self.attempt(
            "list", lambda: self.wire.adapters.ListAdapters(request, timeout=CALL_SECONDS), frozenset()
        )
        if answer is not None:
            self.digests = {adapter.name: adapter.digest for adapter in answer.adapters}

    def map_request(self) -> pb.SetMappingRequest:
        request = pb.SetMappingRequest(
            session=self.session,
            mapping_id=self.random.randint(1, 3),
            entries=entries(self.refs()),
            load=self.random.random() < 0.5,
        )
        if self.random.random() < 0.4:
            request.wait.CopyFrom(duration(self.random.uniform(0.05, 1.5)))
        return request

    def map(self) -> None:
        """Each rank sets the same mapping."""
        request = self.map_request()
        for wire in self.wires:
            answer = self.attempt(
                "map", partial(wire.engine.SetMapping, request, timeout=CALL_SECONDS), _MAP, **_told(request)
            )
            if answer is not None:
                self.mapped(request, answer)

    def map_behind(self) -> None:
        """A mapping is set, perhaps in a queue, while Forwards of those before go on; sometimes it is given up."""
        request = self.map_request()
        future = self.wire.engine.SetMapping.future(request, timeout=CALL_SECONDS)
        floor, start = self.versions.floor(), time.monotonic()
        for _ in range(self.random.randint(0, 3)):
            if self.known:
                self.forward()
        if self.random.random() < 0.3:
            future.cancel()
            self.step("map_behind", "GIVEN_UP", **_told(request))
            return
        error = future.exception()
        if error is not None:
            self.refused("map_behind", error, (start, _MAP), **_told(request))
            return
        self.saw(future.result(), floor)
        self.step("map_behind", "OK", **_told(request))
        self.mapped(request, future.result())

    def mapped(self, request: pb.SetMappingRequest, answer: pb.SetMappingResponse) -> None:
        digests = tuple(entry.digest for entry in answer.entries)
        known = Known(self.epoch, self.session, request.mapping_id, answer.generation, digests)
        facts = {
            "epoch": known.epoch,
            "session": known.session,
            "mapping_id": known.mapping_id,
            "generation": known.generation,
            "refs": [entry.ref for entry in request.entries],
            "digests": list(digests),
            "answer_epoch": answer.layout.epoch,
            "answer_generation": answer.layout.generation,
        }
        self.world.journal.append("map", facts)
        self.known.append(known)

    def release(self) -> None:
        mapping_id = self.random.randint(1, 3)
        request = pb.ReleaseMappingRequest(session=self.session, mapping_id=mapping_id)
        self.attempt("release", lambda: self.wire.engine.ReleaseMapping(request, timeout=CALL_SECONDS), frozenset())

    # Forwards

    def ask(self, known: Known | None = None, *, is_wide: bool = False) -> Asked:
        """For the last mapping as a rule, else for one that may have been replaced."""
        if known is None:
            known = self.known[-1] if self.random.random() < 0.8 else self.random.choice(self.known)
        rank = self.random.randrange(self.ranks) if known.session == self.session else 0
        return ask(self.random, self.world.pools, known, rank, is_wide=is_wide)

    def forward(self) -> None:
        self.send(self.ask(), "forward", _FORWARD)

    def haunt(self) -> None:
        """A Forward of a session of before, perhaps of another life of the server."""
        if self.past:
            self.send(self.ask(self.random.choice(self.past)), "haunt", _FORWARD | {"SESSION_NOT_FOUND"})

    def send(self, asked: Asked, verb: str, allowed: frozenset[str]) -> None:
        wire = self.wires[min(asked.request.rank, len(self.wires) - 1)]
        answer = self.attempt(verb, lambda: wire.engine.Forward(asked.request, timeout=CALL_SECONDS), allowed)
        if answer is not None:
            self.answered(asked, answer, self.plane)

    def burst(self) -> None:
        """Several at a time, some of which are given up."""
        flying, is_wide = [], self.random.random() < 0.15
        floor, start = self.versions.floor(), time.monotonic()
        for _ in range(self.random.randint(2, 6)):
            asked = self.ask(is_wide=is_wide)
            flying.append((asked, self.wire.engine.Forward.future(asked.request, timeout=CALL_SECONDS)))
            if self.random.random() < 0.1:
                flying.pop()[1].cancel()
                self.step("burst", "GIVEN_UP")
        failed = None
        for asked, future in flying:
            error = future.exception()
            if error is None:
                self.saw(future.result(), floor)
                self.step("burst", "OK")
                self.answered(asked, future.result(), self.plane)
            else:
                failed = error
        if failed is not None:
            self.refused("burst", failed, (start, _FORWARD))

    def pipeline(self) -> None:
        """A stream of Forwards that are sent ahead; sometimes its answers are not all read."""
        asked = [self.ask() for _ in range(self.random.randint(1, 12))]
        most = self.random.choice((len(asked), len(asked), self.random.randint(0, len(asked))))
        floor, start = self.versions.floor(), time.monotonic()
        wire = self.random.choice(self.wires)
        answers = wire.engine.ForwardStream(iter(_streamed(asked)), timeout=CALL_SECONDS)
        try:
            for one, _ in zip(asked, range(most), strict=False):
                self.next_of(answers, one, floor)
        except StopIteration:
            self.fault("a stream ended before its last answer")
        except grpc.RpcError as error:
            self.refused("pipeline", error, (start, frozenset()))
        finally:
            answers.cancel()

    def next_of(self, answers: Any, asked: Asked, floor: tuple[str, int]) -> None:
        answer = next(answers)
        if answer.HasField("forward"):
            self.saw(answer.forward, floor)
            self.step("pipeline", "OK")
            self.answered(asked, answer.forward, "stream")
            return
        reason = error_pb2.ErrorReason.Name(answer.error.reason).removeprefix("ERROR_REASON_")
        self.step("pipeline", reason)
        if reason == "SHUTTING_DOWN":
            raise ServerAway
        if reason == "SESSION_NOT_FOUND":
            raise SessionGone
        if reason not in _FORWARD:
            self.fault(f"pipeline ended with {reason}: {answer.error.message}")

    def answered(self, asked: Asked, answer: pb.ForwardResponse, plane: str) -> None:
        fault = asked.fault(answer)
        if fault:
            self.fault(fault)
        self.world.journal.append("forward", *asked.record(answer, plane))

    # Holds and rests

    def hold(self) -> None:
        name = self.random.choice((*NAMES, *UPLOADED))
        request = pb.HoldAdapterRequest(session=self.session, hold_id=self.random.randint(1, 3), ref=name)
        if self.random.random() < 0.6:
            request.duration.CopyFrom(duration(self.random.uniform(0.05, 2.0)))
        request.tier = self.random.choice((adapter_pb2.TIER_HOST, adapter_pb2.TIER_DEVICE))
        self.attempt("hold", lambda: self.wire.engine.HoldAdapter(request, timeout=CALL_SECONDS), _HOLD, name=name)

    def release_hold(self) -> None:
        request = pb.ReleaseHoldRequest(session=self.session, hold_id=self.random.randint(1, 3))
        self.attempt("release_hold", lambda: self.wire.engine.ReleaseHold(request, timeout=CALL_SECONDS), frozenset())

    def load_held(self) -> None:
        """A load that holds in the same step."""
        name = self.random.choice(NAMES)
        source = self.world.adapters / f"{name}{self.random.choice(VERSIONS)}"
        request = adapter_service_pb2.LoadAdapterRequest(ref=name, source=str(source))
        request.target_tier = self.random.choice((adapter_pb2.TIER_HOST, adapter_pb2.TIER_DEVICE))
        request.hold.session, request.hold.hold_id = self.session, self.random.randint(1, 3)
        if self.random.random() < 0.7:
            request.hold.duration.CopyFrom(duration(self.random.uniform(0.05, 2.0)))
        call = lambda: self.wire.adapters.LoadAdapter(request, timeout=CALL_SECONDS)  # noqa: E731
        self.attempt("load_held", call, _LOAD, name=name)

    def fence(self) -> None:
        request = pb.FenceRequest(session=self.session)
        self.attempt("fence", lambda: self.wire.engine.Fence(request, timeout=CALL_SECONDS), frozenset())

    def idle(self) -> None:
        """Longer than a mapping keeps its pins."""
        self.pause(1.0, 2.0)
        self.step("idle", "OK")


def _told(request: pb.SetMappingRequest) -> dict[str, Any]:
    wait = request.wait.ToNanoseconds() / 1e9
    refs = [f"{name}@{digest[7:15]}" if digest else name for name, _, digest in _parts(request)]
    return {"id": request.mapping_id, "refs": refs, "load": request.load, "wait": round(wait, 2)}


def _parts(request: pb.SetMappingRequest) -> Iterable[tuple[str, str, str]]:
    return (entry.ref.partition("@") for entry in request.entries)


def _streamed(asked: Iterable[Asked]) -> list[pb.ForwardStreamRequest]:
    return [pb.ForwardStreamRequest(forward=one.request) for one in asked]
