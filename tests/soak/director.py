"""The director of a soak: kills, stops and starts server and clients by a timetable that follows from the seed."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.faults.gauges import rss_bytes
from tests.soak import aftermath
from tests.soak.checker import Checker
from tests.soak.engine import VANISHED
from tests.soak.library import write_library
from tests.soak.outcome import Outcome
from tests.soak.plan import Gap, Plan, Pools
from tests.soak.processes import Client, Server
from tests.soak.reader import Reader

_TICK_SECONDS = 0.05
# Often, as what is under way makes single samples vary by some percent.
_SAMPLE_SECONDS = 0.5
_CHECK_SECONDS = 120.0
_TOLD_SECONDS = 60.0
_MOST_STOPPED = 2
_PATIENCE_SECONDS = 60.0
_DECK = ("kill -9",) * 11 + ("SIGTERM",) * 3 + ("SIGSTOP",) * 5 + ("long SIGSTOP",)
"""What is done to clients, each so often before all begins again."""


class Due:
    """One line of the timetable: an act, again and again after a random gap."""

    def __init__(self, seed: str, gap: Gap, act: Callable[[random.Random], None]) -> None:
        self._random = random.Random(seed)
        self._gap = gap
        self._act = act
        self._at = time.monotonic() + self._random.uniform(*gap)

    def look(self) -> None:
        """Acts if it is time; the gap counts from the end of the act."""
        if time.monotonic() >= self._at:
            self._act(self._random)
            self._at = time.monotonic() + self._random.uniform(*self._gap)


class Director:
    """Runs one soak in `folder`, which it does not delete."""

    def __init__(self, plan: Plan, folder: Path, tell: Callable[[str], None] = lambda line: None) -> None:
        self.plan = plan
        self.folder = folder
        self._tell = tell
        self.done: Counter[str] = Counter()
        self.faults: list[str] = []
        self._clients: list[Client] = []
        self._deck: list[str] = []
        self._started = self._hurt = 0
        self._resume_server_at = 0.0
        plan.write(folder)
        pools = Pools.make(plan.seed)
        pools.write(folder)
        self.library = write_library(folder, plan.seed)
        self.reader = Reader(Checker(self.library, pools))
        self.server = Server(folder)

    def run(self) -> Outcome:
        """To the end, or to the first finding. Every process that it started is gone then."""
        try:
            self.server.start()
            fresh = aftermath.exercise(self.server, self.library, self.folder)
            start = time.monotonic()
            calm_at = start + self.plan.seconds - self.plan.calm_seconds
            self._act_until(start, calm_at)
            self.reader.check()
            left: list[str] = []
            if not self._failed():
                left = self._end(fresh)
            return Outcome(
                self.plan,
                self.done,
                self.reader.checker.tally,
                [*self.faults, *self.server.faults, *left],
                self.reader.checker.findings,
                self.server,
                self._calm_samples(calm_at + self.plan.warm_up_seconds),
            )
        finally:
            for client in self._clients:
                client.end()
            if self.server.is_running:
                self.server.kill()
            if self._failed():
                self.reader.save(self.folder)

    def _failed(self) -> bool:
        return bool(self.reader.failed or self.faults or self.server.faults)

    # The timetable

    def _act_until(self, start: float, calm_at: float) -> None:
        plan = self.plan
        clients = Due(f"{plan.seed} clients", plan.client_fault_gap, self._hurt_client)
        server = [
            Due(f"{plan.seed} server's deaths", plan.server_death_gap, self._end_server),
            Due(f"{plan.seed} server's pauses", plan.server_pause_gap, self._pause_server),
        ]
        sample_at = told_at = start
        while not self._failed() and self._goes_on((now := time.monotonic()) - start):
            for due in (clients, *(server if now < calm_at else ())):
                due.look()
            self._resume(now)
            self._bury()
            while len(self._clients) < plan.clients:
                self._start_client()
            if now >= sample_at:
                sample_at = now + _SAMPLE_SECONDS
                self.server.life.rss.append((now, rss_bytes(self.server.process)))
            if now >= told_at:
                told_at = now + 30.0
                self._tell(f"{now - start:5.0f} s: {self.reader.checker.tally.rows} rows checked, {dict(self.done)}")
            time.sleep(_TICK_SECONDS)

    def _goes_on(self, seconds: float) -> bool:
        plan = self.plan
        late = self._hurt < plan.least_client_faults and seconds < plan.seconds + _PATIENCE_SECONDS
        return late or seconds < plan.seconds

    def _end_server(self, random: random.Random) -> None:
        if random.random() < 0.9:
            self.server.kill()
            self.done["server kill -9"] += 1
        else:
            self.server.stop()
            self.done["server SIGTERM"] += 1
        self.server.start()

    def _pause_server(self, random: random.Random) -> None:
        self.server.pause()
        self.done["server SIGSTOP"] += 1
        self._resume_server_at = time.monotonic() + random.uniform(0.5, 4.0)

    def _hurt_client(self, random: random.Random) -> None:
        clients = [client for client in self._clients if client.told_at is None]
        if not clients:
            return
        if not self._deck:
            self._deck = random.sample(_DECK, len(_DECK))
        verb, client, now = self._deck.pop(), random.choice(clients), time.monotonic()
        seconds = random.uniform(0.5, 5.0) if verb == "SIGSTOP" else random.uniform(21.0, 26.0)
        if verb == "kill -9":
            client.kill()
        elif verb == "SIGTERM":
            client.resume()
            client.terminate(now)
        elif sum(other.stop_until is not None for other in self._clients) < min(_MOST_STOPPED, len(clients)):
            client.pause(now + seconds)
        else:
            return
        self.done[f"client {verb}"] += 1
        self._hurt += 1

    # What follows from it

    def _start_client(self) -> None:
        self._started += 1
        client = Client(self.folder, self._started, self.server.target)
        self._clients.append(client)
        self.reader.add(client.folder)

    def _resume(self, now: float) -> None:
        if self.server.is_stopped and now >= self._resume_server_at:
            self.server.resume()
        self.server.check()
        for client in self._clients:
            if client.stop_until is not None and now >= client.stop_until:
                client.resume()
            if client.told_at is not None and now > client.told_at + _TOLD_SECONDS and not client.is_dead:
                self.faults.append(f"{client.name} did not end in {_TOLD_SECONDS:g} s after SIGTERM")
                client.kill()

    def _bury(self) -> None:
        """Takes the dead away, so that their records are read to the end."""
        for client in [client for client in self._clients if client.is_dead]:
            self._clients.remove(client)
            if client.process.returncode == VANISHED:
                self.done["client vanished"] += 1
            elif client.process.returncode == 0 and client.told_at is None:
                self.faults.append(f"{client.name} ended though nobody told it to")
            if client.process.returncode >= 0 and (why := client.fault()):
                self.faults.append(why)
            self.reader.died(client.folder)

    def _end(self, fresh: Counter[str]) -> list[str]:
        """Ends half of the clients well and half of them not; returns what is left over then."""
        if self.server.is_stopped:
            self.server.resume()
        for index, client in enumerate(self._clients):
            client.resume()
            if index % 2:
                client.kill()
            else:
                client.terminate(time.monotonic())
        for client in self._clients:
            client.process.wait(_TOLD_SECONDS)
        self._bury()
        self.reader.end(_CHECK_SECONDS)
        left = aftermath.leftovers(self.server, self.folder)
        after = aftermath.exercise(self.server, self.library, self.folder)
        left += [f"{kind}: {after[kind]} descriptors, {fresh[kind]} when fresh" for kind in after - fresh]
        left += aftermath.leftovers(self.server, self.folder)
        self.server.stop()
        return left

    def _calm_samples(self, start: float) -> list[tuple[float, int]]:
        return [(at, size) for at, size in self.server.life.rss if at >= start]
