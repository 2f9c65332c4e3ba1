"""What engines and operators of a soak have in common: random choices, calls that are written down, and their rules."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
from slotcar.v1 import engine_service_pb2, layout_pb2

from tests.faults.raw import refusal
from tests.planes.errors import PlaneError
from tests.soak.plan import Plan, Pools
from tests.soak.records import Journal

T = TypeVar("T")

CANCELLED = "CANCELLED"
_TICK_SECONDS = 0.1
_GAP_SECONDS = 1.0
_STREAMED = (engine_service_pb2.OpenSessionResponse, engine_service_pb2.JoinSessionResponse)


class ServerAway(Exception):
    """The server is dead, or about to end."""


class SessionGone(Exception):
    """The server does not know the session any more."""


class Pulse:
    """Notices that this process was stopped, and that its parent is gone, which it does not outlive."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._last_tick = self._last_gap = time.monotonic()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while True:
            time.sleep(_TICK_SECONDS)
            now = time.monotonic()
            if now - self._last_tick > _GAP_SECONDS:
                self._last_gap = now
            self._last_tick = now
            if os.getppid() != self._parent:
                os._exit(1)

    def stopped_since(self, start: float) -> bool:
        now = time.monotonic()
        return self._last_gap >= start or now - self._last_tick > _GAP_SECONDS


@dataclass(frozen=True)
class World:
    """What the actors of one process share. `over` is set when they shall come to an end."""

    target: str
    plan: Plan
    adapters: Path
    pools: Pools
    journal: Journal
    over: threading.Event = field(default_factory=threading.Event)
    pulse: Pulse = field(default_factory=Pulse)


class Versions:
    """The layout versions that one connection saw. An epoch that gave way to another must not come back."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._current = ""

    def floor(self) -> tuple[str, int]:
        """What an answer to a call that is sent now may not be older than."""
        return self._current, self._newest.get(self._current, 0)

    def fault(self, version: layout_pb2.LayoutVersion, floor: tuple[str, int]) -> str:
        """What is wrong with an answer to a call that was sent at `floor`; "" if nothing is."""
        epoch, generation = floor
        known = version.epoch in self._newest
        if version.epoch != self._current and not known:
            self._current = version.epoch
        self._newest[version.epoch] = max(self._newest.get(version.epoch, 0), version.generation)
        if version.epoch != epoch and known and epoch == self._current:
            return f"epoch {version.epoch} came back after {epoch} (I3)"
        if version.epoch == epoch and version.generation < generation:
            return f"generation {version.generation} came after {generation} (I3)"
        return ""


class Actor:
    """One thread of a client process. `live` is one life of it, with a connection of its own."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.random = random.Random(f"{world.plan.seed} {name}")
        self.versions = Versions()

    def run(self) -> None:
        """Lives again and again. A fault of the actor's own is recorded as one of the run."""
        try:
            while not self.world.over.is_set():
                self.versions = Versions()
                try:
                    self.live()
                except ServerAway:
                    self.pause(0.05, 0.3)
        except Exception as error:
            self.fault(f"{type(error).__name__}: {error}")
            raise

    def live(self) -> None:
        raise NotImplementedError

    def pause(self, least: float, most: float) -> None:
        self.world.over.wait(self.random.uniform(least, most))

    # Calls

    def attempt(self, verb: str, call: Callable[[], T], allowed: frozenset[str], **facts: Any) -> T | None:
        """The call's answer; None when it was refused with one of `allowed`. Raises ServerAway and SessionGone."""
        floor, start = self.versions.floor(), time.monotonic()
        try:
            answer = call()
        except grpc.RpcError as error:
            self.refused(verb, error, (start, allowed), **facts)
            return None
        self.saw(answer, floor)
        self.step(verb, "OK", **facts)
        return answer

    def saw(self, answer: Any, floor: tuple[str, int]) -> None:
        """Checks the layout version of an answer to a call that was sent at `floor`."""
        fault = self.versions.fault(version_of(answer), floor)
        if fault:
            self.fault(fault)

    def refused(self, verb: str, error: Exception, when: tuple[float, frozenset[str]], **facts: Any) -> None:
        """Judges how a call failed that was sent at a time with some allowed reasons."""
        start, allowed = when
        assert isinstance(error, grpc.RpcError), repr(error)
        found = refusal(error)
        result = found.reason or found.code.name
        self.step(verb, result, **facts)
        # gRPC's core answers CANCELLED to calls that reach a server while it stops; the outcome checks that it did.
        if result in ("UNAVAILABLE", "SHUTTING_DOWN", CANCELLED):
            raise ServerAway
        if found.reason in allowed:
            return
        if found.reason == "SESSION_NOT_FOUND":
            raise SessionGone
        if result == "DEADLINE_EXCEEDED" and self.world.pulse.stopped_since(start):
            return
        assert isinstance(error, grpc.Call | PlaneError)
        self.fault(f"{verb} {facts} ended with {result} after {time.monotonic() - start:.1f} s: {error.details()}")

    # What is written down

    def step(self, verb: str, result: str, **facts: Any) -> None:
        self.world.journal.append("step", {"actor": self.name, "verb": verb, "result": result} | facts)

    def fault(self, why: str) -> None:
        self.world.journal.append("fault", {"actor": self.name, "why": why})


def version_of(answer: Any) -> layout_pb2.LayoutVersion:
    """The layout version that every answer has."""
    version = answer.version if isinstance(answer, _STREAMED) else answer.layout
    found = version.version if isinstance(version, layout_pb2.Layout) else version
    assert isinstance(found, layout_pb2.LayoutVersion)
    return found
