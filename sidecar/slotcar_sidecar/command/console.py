"""What the command line prints: tables for people, or JSON, one value or one object a line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from slotcar_client import (
    AdapterInfo,
    Capacity,
    DesiredSet,
    Estimate,
    Event,
    LoadReport,
    Prefetched,
    SessionInfo,
    SlotcarError,
    Snapshot,
    UnloadReport,
)

from slotcar_sidecar.command import tables
from slotcar_sidecar.command.doctor import Check
from slotcar_sidecar.command.tables import Rows

_MAX_SITES = 10
# No table is wider, and a console of this width cuts nothing.
_ANY_WIDTH = 1 << 20
_GAP = 2
_LEAST_COLUMN = 8
_FACTS = ("adapters", "entries", "source", "file", "field", "tensor", "found", "wanted")
_AFTER_UNLOAD = {
    None: "it was in no slot",
    "free": "its slot is free",
    "draining": "its slot drains until its mappings and holds are gone",
    "occupied": "its slot stays, as another name has the same bytes",
}
_MARKS = {"ok": "[green]✓[/]", "note": "[yellow]·[/]", "missing": "[red]✗[/]"}


class _Console(Console):
    """A reader that has seen enough, such as `head`, ends the command without a complaint."""

    def on_broken_pipe(self) -> NoReturn:
        with suppress(SystemExit):
            super().on_broken_pipe()
        raise SystemExit(0)


class Output:
    """Prints results to standard output and everything else to standard error."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._out = _Console(highlight=False, emoji=False, soft_wrap=True)
        self._err = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)

    @property
    def is_live(self) -> bool:
        """Somebody watches a terminal, which can be drawn anew."""
        return self._out.is_terminal and not self.as_json

    @property
    def height(self) -> int:
        return self._out.height

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """A progress bar on a terminal while the body runs."""
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._err, transient=True, disable=not self._err.is_terminal) as progress:
            progress.add_task(what, total=None)
            yield

    @contextmanager
    def live(self) -> Iterator[Live]:
        """A screen of its own until the body ends."""
        with Live(console=self._out, screen=True, auto_refresh=False) as live:
            yield live

    def refusal(self, error: SlotcarError) -> None:
        """A refusal: reason, sentence and facts."""
        if self.as_json:
            self.json({"error": _error(error)})
            return
        self._err.print(error.reason, style="bold red", end=" ", markup=False)
        self._err.print(error.message, markup=False)
        for key in sorted(error.metadata, key=lambda key: (_FACTS.index(key) if key in _FACTS else len(_FACTS), key)):
            value = error.metadata[key]
            self._err.print(f"  {key}: {value}", markup=False)

    def hint(self, text: str) -> None:
        """What a person may do about a refusal."""
        if not self.as_json:
            self._err.print(text, markup=False)

    def load_report(self, report: LoadReport) -> None:
        if self.as_json:
            self.json({**dataclasses.asdict(report), "sites_matched": report.sites_matched})
            return
        what = "is there already" if report.already_resident else "loaded"
        slot = f"slot {report.adapter.slot}" if report.adapter.slot is not None else f"tier {report.adapter.tier}"
        self.line(f"{report.name} {what}: {slot}, generation {report.generation}, {tables.short(report.digest)}")
        self.line(self._sizes(report))
        for warning in report.warnings:
            self.line(f"  warning: {warning}")

    def unload_report(self, name: str, report: UnloadReport) -> None:
        if self.as_json:
            self.json(dataclasses.asdict(report))
            return
        slot = _AFTER_UNLOAD.get(report.slot_state, f"its slot is {report.slot_state}")
        stale = f", mappings and holds that it ended: {report.pins_ended}" if report.pins_ended else ""
        self.line(f"{name} unloaded: {slot}{stale}")

    def adapter(self, adapter: AdapterInfo, *, sites: bool = False) -> None:
        if self.as_json:
            self.json(dataclasses.asdict(adapter))
            return
        for key, value in dataclasses.asdict(adapter).items():
            if key not in ("sites", "history"):
                shown = tables.human_bytes(value) if key == "bytes" else value
                self.line(f"{key:>8}  {'-' if value is None else shown}")
        for digest in adapter.history:
            self.line(f"{'before':>8}  {digest}")
        if sites:
            self._print_sites("site", adapter.sites)

    def snapshot(self, snapshot: Snapshot, sessions: Sequence[SessionInfo]) -> None:
        pins = tables.pins_of(sessions, snapshot.layout)
        if self.as_json:
            self.json({**dataclasses.asdict(snapshot), "pins": [dataclasses.asdict(pin) for pin in pins]})
            return
        self.rows(tables.adapters(snapshot, pins))
        version, slots = snapshot.layout.version, snapshot.layout.slots
        counts = tables.slot_counts(snapshot.layout)
        self.line(f"{len(slots)} slots: {counts}; generation {version.generation} of epoch {version.epoch}")

    def sessions(self, sessions: Sequence[SessionInfo], snapshot: Snapshot) -> None:
        """Each session, then what it has, then who pins which slot."""
        if self.as_json:
            self.json([dataclasses.asdict(session) for session in sessions])
            return
        self.rows(tables.sessions(sessions))
        for session in sessions:
            if session.mappings or session.holds:
                self.line(f"\n{session.session} {session.client_name}")
                for rows in filter(lambda rows: rows.rows, (tables.mappings(session), tables.holds(session))):
                    self.rows(rows, indent=2)
        self.line("")
        self.rows(tables.slots(snapshot, tables.pins_of(sessions, snapshot.layout)))

    def capacity(self, capacity: Capacity) -> None:
        if self.as_json:
            self.json(dataclasses.asdict(capacity))
            return
        for line in tables.capacity(capacity):
            self.line(line)

    def event(self, event: Event) -> None:
        if self.as_json:
            self.json(dataclasses.asdict(event))
        else:
            self.line(tables.event(event))

    def estimate(self, estimate: Estimate) -> None:
        if self.as_json:
            self.json({**dataclasses.asdict(estimate), "sites_matched": estimate.sites_matched})
            return
        self.line("fits" if estimate.fits else f"does not fit: {estimate.why_not}")
        self.line(self._sizes(estimate))
        self.line(f"  {tables.human_bytes(estimate.device_bytes)} of a slot, {tables.short(estimate.digest)}")

    def prefetched(self, found: Sequence[Prefetched]) -> None:
        if self.as_json:
            self.json([dataclasses.asdict(each) for each in found])
            return
        self.rows(tables.prefetched(found))

    def desired(self, desired: DesiredSet) -> None:
        if self.as_json:
            self.json(dataclasses.asdict(desired))
            return
        if desired.file is None:
            self.line("the server follows no file of adapters: serve with --adapters FILE")
            return
        self.rows(tables.desired(desired.adapters))
        for line in tables.desired_file(desired):
            self.line(line)

    def checks(self, checks: Sequence[Check]) -> None:
        if self.as_json:
            self.json([dataclasses.asdict(check) for check in checks])
            return
        for check in checks:
            self._out.print(f"{_MARKS[check.state]} {check.what}: ", end="")
            self._out.print(check.found, markup=False)

    # Parts

    def rows(self, rows: Rows, indent: int = 0) -> None:
        """A table as wide as it must be; on a terminal that is narrower, a block of lines for each row."""
        table = _table(rows)
        needed = self._width_of(table) + indent
        if not rows.rows:
            self.line(f"no {rows.headers[0].lower()}")
        elif self._out.is_terminal and needed > self._out.width:
            self._print_blocks(rows, " " * indent)
        else:
            if not self._out.is_terminal:
                self._out.width = max(needed, self._out.width)  # where there is no edge, nothing is cut at one
            self._out.print(Padding(table, (0, 0, 0, indent), expand=False))

    def fitted(self, rows: Rows) -> RenderableType:
        """The first columns that the terminal has room for, of which the last may be cut."""
        count = next(n for n in range(len(rows.headers), 0, -1) if n == 1 or self._left(rows, n) >= _LEAST_COLUMN)
        table = _table(rows, count)
        table.columns[-1].max_width = self._left(rows, count)
        return table

    def _left(self, rows: Rows, count: int) -> int:
        """What the first of `count` columns leave to the last of them."""
        return self._out.width - (self._width_of(_table(rows, count - 1)) + _GAP if count > 1 else 0)

    def line(self, text: str) -> None:
        self._out.print(text, markup=False)

    def json(self, value: Any) -> None:
        self._out.print(json.dumps(value, default=str), markup=False)

    def _width_of(self, table: Table) -> int:
        return self._out.measure(table, options=self._out.options.update(width=_ANY_WIDTH)).maximum

    def _print_blocks(self, rows: Rows, indent: str) -> None:
        width = max(map(len, rows.headers[1:]))
        for first, *others in rows.rows:
            self.line(f"{indent}{rows.headers[0].lower()} {first}")
            for header, cell in zip(rows.headers[1:], others, strict=True):
                self.line(f"{indent}  {header.lower():<{width}} {cell}")

    @staticmethod
    def _sizes(report: LoadReport | Estimate) -> str:
        sites = f"{len(report.sites_matched)} sites with weights, {len(report.sites_zero)} without"
        return f"  rank {report.rank}, {tables.human_bytes(report.bytes)} of {report.file_dtype}; {sites}"

    def _print_sites(self, title: str, sites: Sequence[str]) -> None:
        for site in sites[:_MAX_SITES]:
            self.line(f"  {title}: {site}")
        if len(sites) > _MAX_SITES:
            self.line(f"  and {len(sites) - _MAX_SITES} more (--json lists them all)")


def lines(*parts: RenderableType) -> RenderableType:
    """Parts below each other; texts are cut at the edge of the terminal, and have no markup."""
    return Group(*(Text(p, no_wrap=True, overflow="ellipsis") if isinstance(p, str) else p for p in parts))


def _table(rows: Rows, columns: int | None = None) -> Table:
    table = Table(*rows.headers[:columns], box=None, header_style="bold", pad_edge=False, padding=(0, _GAP, 0, 0))
    for column in table.columns:
        column.no_wrap = True
    for row in rows.rows:
        table.add_row(*(Text(cell) for cell in row[:columns]))
    return table


def _error(error: SlotcarError) -> dict[str, Any]:
    return {"reason": error.reason, "message": error.message, "metadata": dict(error.metadata)}
