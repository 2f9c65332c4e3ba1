"""What was seen: for a terminal, for programs, and for the documentation, where only values differ between runs."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.ops.gameday.pace import Pace
from tests.ops.gameday.stage import Sighting

_UNSAID = ("time", "level", "logger", "trace_id")
_PLACES = ("alert", "panel", "log", "status page")
# Of one machine, or of one run.
_OWN = (
    (re.compile(r"127\.0\.0\.1:\d+"), "SIDECAR"),
    (re.compile(r"(?:/[\w.-]+)+/scenario-\d+"), "/srv"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?([+-]\d\d:\d\d)?"), "TIME"),
    (re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{8,64}\b"), "ID"),
    (re.compile(r"\b(generation|number|process|pid)=\d+"), r"\1=N"),
)
_INTRODUCTION = """# Game day

Written by `make gameday`, which makes each trouble for real with a sidecar and a Prometheus on one machine, and fails
if one of four places does not name it: the alert of `deploy/prometheus/slotcar.rules.yaml`, the dashboard's panel, the
log, and the status page. Windows and `for` of the rules are {factor} times shorter there than in earnest; thresholds
are the same. What to do is in the [runbook](runbook.md), alert by alert.
"""


@dataclass(frozen=True, slots=True)
class Played:
    """A scenario: what was seen, or why it failed."""

    name: str
    does: str
    seconds: float
    sightings: tuple[Sighting, ...] = ()
    failure: str = ""


def _places(sighting: Sighting) -> tuple[str, ...]:
    """What each of _PLACES says, in lines."""
    alert = sighting.alert
    labels = " ".join(f"{name}={value}" for name, value in sorted(alert.labels.items()) if name != "job")
    panels = "\n".join(
        f"{panel.title}\n" + "\n".join(f"{each.legend}: {_number(each.value)}" for each in panel.values[:4])
        for panel in sighting.panels
    )
    log = f"{sighting.log['level']} {sighting.log['message']}\n" + _fields(sighting.log)
    return f"{alert.name}\n{labels}\n{alert.summary}", panels, log, f"{sighting.row.part}\n{sighting.row.text}"


def _number(value: float) -> str:
    """Two digits tell what is going on."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}"


def _fields(line: Mapping[str, Any]) -> str:
    said = {key: value for key, value in line.items() if key not in (*_UNSAID, "message") and value not in ("", None)}
    return " ".join(f"{key}={value}" for key, value in said.items())


def show(console: Console, played: Played) -> None:
    """The four places of one scenario, side by side."""
    if played.failure:
        console.print(Text(f"FAILED  {played.name}: {played.failure}", style="bold red"))
        return
    table = Table(title=f"{played.name}, {played.seconds:.0f} s", caption=played.does, show_lines=True, expand=True)
    for place in _PLACES:
        table.add_column(place, ratio=1, overflow="fold")
    for sighting in played.sightings:
        table.add_row(*map(Text, _places(sighting)))
    console.print(table)


def as_json(all_played: Sequence[Played], pace: Pace) -> str:
    scenarios = [dataclasses.asdict(played) for played in all_played]
    return json.dumps({"pace": pace.factor, "scenarios": scenarios}, indent=2, default=dict) + "\n"


def write_page(path: Path, all_played: Sequence[Played], pace: Pace) -> None:
    """The sample of the documentation, without what is of this machine or this run."""
    path.write_text(_INTRODUCTION.format(factor=pace.factor) + "".join(map(_section, all_played)), encoding="utf-8")


def _section(played: Played) -> str:
    rows = [row for sighting in played.sightings for row in _page_rows(sighting)]
    return f"\n## {played.name.capitalize()}\n\n{played.does}\n\n| where | what it says |\n|---|---|\n" + "".join(rows)


def _page_rows(sighting: Sighting) -> Iterator[str]:
    for place, text in zip(_PLACES, _places(sighting), strict=True):
        head, _, rest = normal(text).partition("\n")
        said = "<br>".join(line.replace("|", "\\|").replace("<", "&lt;") for line in rest.splitlines())
        yield f"| {place} | **{head}**<br>{said} |\n"


def normal(text: str) -> str:
    """The same for every run and every machine, but for values."""
    for pattern, instead in _OWN:
        text = pattern.sub(instead, text)
    return text
