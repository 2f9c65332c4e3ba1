"""Where a scenario plays: a sidecar with what it serves, a Prometheus that watches it, and the four places to look at.

What is looked for is waited for, and its absence ends the scenario with `Missing`.
"""

from __future__ import annotations

import contextlib
import html
import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import slotcar_client
from slotcar_client import Client

from tests.faults.oracle import Library, spec_file
from tests.ops.gameday import panels
from tests.ops.gameday.pace import Pace
from tests.ops.gameday.panels import Shown
from tests.ops.prometheus import Prometheus
from tests.ports import free_port
from tests.server import SidecarProcess

T = TypeVar("T")
Record = Mapping[str, Any]

SITES = {f"model.layers.{layer}.self_attn.q_proj": (256, 256) for layer in range(4)}
_LOOK_SECONDS, _PATIENCE_SECONDS = 0.25, 30.0
_ALERT_SECONDS = 120.0


class Missing(Exception):
    """One of the four places does not say what it should."""


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    labels: Mapping[str, str]
    summary: str


@dataclass(frozen=True, slots=True)
class Row:
    """What the status page has, and in which part of it."""

    part: str
    text: str


@dataclass(frozen=True, slots=True)
class Sighting:
    """What the four places say of one trouble at a time."""

    alert: Alert
    panels: tuple[Shown, ...]
    log: Record
    row: Row


class Worker:
    """Does a step over and over in a thread of its own; what it raises, leaving the context raises."""

    def __init__(self, step: Callable[[], object], pause_seconds: float) -> None:
        self._step, self._pause_seconds = step, pause_seconds
        self._end, self._error = threading.Event(), list[BaseException]()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        if self._error:
            raise self._error[0]

    def _run(self) -> None:
        try:
            while not self._end.wait(self._pause_seconds):
                self._step()
        except BaseException as error:
            self._error.append(error)


@dataclass
class Stage:
    """`folder` is the scenario's own. `begin` starts sidecar and Prometheus, which end with `resources`."""

    folder: Path
    pace: Pace
    binary: str
    resources: ExitStack
    library: Library = field(init=False)
    sidecar: SidecarProcess = field(init=False)
    prometheus: Prometheus = field(init=False)
    address: str = ""

    def __post_init__(self) -> None:
        self.library = Library(self.folder / "adapters", SITES)

    def write(self, *names: str) -> None:
        """Adapters for every site, each of another seed."""
        for name in names:
            self.library.write(name, len(self.library.parts), list(SITES), rank=16)

    def begin(self, *extra: str, slots: int = 2, environment: Mapping[str, str] | None = None) -> Client:
        home = self.folder / "server"
        home.mkdir()
        self.address = f"127.0.0.1:{free_port()}"
        settings = ("--model-spec", str(spec_file(home, SITES)), "--metrics", self.address, "--log-format", "json")
        self.sidecar = SidecarProcess(
            home, self.library.root, slots, extra=(*settings, *extra), environment=dict(environment or {})
        ).start()
        self.resources.callback(self._end)
        rules = self.folder / "rules.yaml"
        rules.write_text(self.pace.rules(), encoding="utf-8")
        watch = Prometheus(self.binary, self.folder, self.address, rules)
        self.prometheus = self.resources.enter_context(watch)
        self.prometheus.catch_up()
        return self.resources.enter_context(slotcar_client.connect(self.sidecar.target))

    def restart(self) -> None:
        """A new life of the sidecar, with the same flags."""
        self.sidecar = self.sidecar.again().start()

    def _end(self) -> None:
        """Of its last life."""
        with self.sidecar:
            pass

    # The four places

    def sight(self, alert: str, is_line: Callable[[Record], bool], row: Callable[[Any], Row | None]) -> Sighting:
        """All four of them, when the alert has fired."""
        fired = self.alert(alert)
        return Sighting(fired, self.panels(fired), self.line(is_line), self.row(row))

    def alert(self, name: str) -> Alert:
        """It as Prometheus tells it when it fires."""

        def firing() -> Alert | None:
            for each in self.prometheus.ask("alerts")["alerts"]:
                labels = dict(each["labels"])
                if labels.pop("alertname") == name and each["state"] == "firing":
                    return Alert(name, labels, each["annotations"]["summary"])
            return None

        return _found(firing, f"the alert {name}", _ALERT_SECONDS, self._pending)

    def _pending(self) -> str:
        alerts = self.prometheus.ask("alerts")["alerts"]
        return f"alerts are {[(each['labels']['alertname'], each['state']) for each in alerts]}"

    def panels(self, alert: Alert) -> tuple[Shown, ...]:
        def shown() -> tuple[Shown, ...]:
            return panels.look(self.prometheus, self.pace, alert.name, alert.labels)

        titles = [panel.title for panel in panels.panels_of(alert.name)]
        return _found(shown, f"a value in a panel of {titles}", _PATIENCE_SECONDS)

    def line(self, is_it: Callable[[Record], bool]) -> Record:
        """The latest line of the log that is it."""

        def found() -> Record | None:
            lines = [json.loads(line) for line in self.sidecar.log.splitlines() if line.startswith("{")]
            return next(filter(is_it, reversed(lines)), None)

        return _found(found, "the line in the log", _PATIENCE_SECONDS, lambda: self.sidecar.log[-2000:])

    def row(self, pick: Callable[[Any], Row | None]) -> Row:
        """What `pick` finds in the state, once the page shows it too."""

        def found() -> Row | None:
            row = pick(json.loads(self._page("debug/state.json")))
            page = " ".join(re.sub(r"<[^>]*>", " ", html.unescape(self._page(""))).split())
            pieces = row.text.split(" | ") if row else []
            return row if row and all(" ".join(piece.split()) in page for piece in pieces) else None

        return _found(found, "the row on the status page", _PATIENCE_SECONDS)

    def _page(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.address}/{path}", timeout=_PATIENCE_SECONDS) as answer:
            text: str = answer.read().decode()
            return text

    def must_be_away(self) -> None:
        """Nothing answers where the page was."""
        with contextlib.suppress(OSError):
            self._page("")
            raise Missing("the status page answers, though its server was killed")


@contextlib.contextmanager
def stage(folder: Path, pace: Pace, binary: str) -> Iterator[Stage]:
    """One in a new `folder`; all that it began ends with the context."""
    folder.mkdir(parents=True)
    with ExitStack() as resources:
        yield Stage(folder, pace, binary, resources)


def _found(look: Callable[[], T | None], what: str, seconds: float, why: Callable[[], str] = str) -> T:
    """What `look` finds, however often it has to look in these seconds. Raises Missing."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(_LOOK_SECONDS)
    raise Missing(f"{what} is missing after {seconds:g} s. {why()}")
