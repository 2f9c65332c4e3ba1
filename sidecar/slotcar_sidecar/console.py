"""What the command line prints: tables for people, or one JSON value."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from slotcar_client import AdapterInfo, Estimate, LoadReport, SlotcarError, Snapshot, UnloadReport

from slotcar_sidecar.doctor import Check

_MAX_SITES = 10
_FACTS = ("adapters", "entries", "source", "file", "field", "tensor", "found", "wanted")
_AFTER_UNLOAD = {
    None: "it was in no slot",
    "free": "its slot is free",
    "draining": "its slot drains until its mappings are gone",
    "occupied": "its slot stays, as another name has the same bytes",
}
_MARKS = {"ok": "[green]✓[/]", "note": "[yellow]·[/]", "missing": "[red]✗[/]"}


def human_bytes(count: int) -> str:
    """1536 → "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _short(digest: str) -> str:
    return digest[:19]


class Output:
    """Prints results to standard output and everything else to standard error."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._out = Console(highlight=False, emoji=False, soft_wrap=True)
        self._err = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """A progress bar on a terminal while the body runs."""
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._err, transient=True, disable=not self._err.is_terminal) as progress:
            progress.add_task(what, total=None)
            yield

    def refusal(self, error: SlotcarError) -> None:
        """A refusal: reason, sentence and facts."""
        if self._as_json:
            facts = {"reason": error.reason, "message": error.message, "metadata": dict(error.metadata)}
            self._json({"error": facts})
            return
        self._err.print(error.reason, style="bold red", end=" ", markup=False)
        self._err.print(error.message, markup=False)
        for key in sorted(error.metadata, key=lambda key: (_FACTS.index(key) if key in _FACTS else len(_FACTS), key)):
            value = error.metadata[key]
            self._err.print(f"  {key}: {value}", markup=False)

    def hint(self, text: str) -> None:
        """What a person may do about a refusal."""
        if not self._as_json:
            self._err.print(text, markup=False)

    def load_report(self, report: LoadReport) -> None:
        if self._as_json:
            self._json({**dataclasses.asdict(report), "sites_matched": report.sites_matched})
            return
        what = "is resident already" if report.already_resident else "loaded"
        slot = f"slot {report.adapter.slot}" if report.adapter.slot is not None else "no slot"
        self._print(f"{report.name} {what}: {slot}, generation {report.generation}, {_short(report.digest)}")
        self._print(self._sizes(report))
        for warning in report.warnings:
            self._print(f"  warning: {warning}")

    def unload_report(self, name: str, report: UnloadReport) -> None:
        if self._as_json:
            self._json(dataclasses.asdict(report))
            return
        slot = _AFTER_UNLOAD.get(report.slot_state, f"its slot is {report.slot_state}")
        stale = f", mappings that became stale: {report.pins_ended}" if report.pins_ended else ""
        self._print(f"{name} unloaded: {slot}{stale}")

    def adapter(self, adapter: AdapterInfo, *, sites: bool = False) -> None:
        if self._as_json:
            self._json(dataclasses.asdict(adapter))
            return
        for key, value in dataclasses.asdict(adapter).items():
            if key != "sites":
                shown = human_bytes(value) if key == "bytes" else value
                self._print(f"{key:>8}  {'-' if value is None else shown}")
        if sites:
            self._print_sites("site", adapter.sites)

    def snapshot(self, snapshot: Snapshot) -> None:
        if self._as_json:
            self._json(dataclasses.asdict(snapshot))
            return
        table = Table("NAME", "TIER", "SLOT", "RANK", "SIZE", "PINS", "KEEP", "DIGEST", box=None, header_style="bold")
        for a in snapshot.adapters:
            slot = "-" if a.slot is None else str(a.slot)
            keep = "yes" if a.keep else "-"
            table.add_row(
                a.name, a.tier, slot, str(a.rank), human_bytes(a.bytes), str(a.pins), keep, _short(a.digest)
            )  # fmt: skip
        for row in snapshot.layout.slots:
            if row.state == "draining":
                table.add_row("(draining)", "device", str(row.index), "", "", "", "-", _short(row.digest))
        self._out.print(table)
        states = [slot.state for slot in snapshot.layout.slots]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        version = snapshot.layout.version
        self._print(f"{len(states)} slots: {counts}; generation {version.generation} of epoch {version.epoch}")

    def estimate(self, estimate: Estimate) -> None:
        if self._as_json:
            self._json({**dataclasses.asdict(estimate), "sites_matched": estimate.sites_matched})
            return
        self._print("fits" if estimate.fits else f"does not fit: {estimate.why_not}")
        self._print(self._sizes(estimate))
        self._print(f"  {human_bytes(estimate.device_bytes)} of a slot, {_short(estimate.digest)}")

    def checks(self, checks: Sequence[Check]) -> None:
        if self._as_json:
            self._json([dataclasses.asdict(check) for check in checks])
            return
        for check in checks:
            self._out.print(f"{_MARKS[check.state]} {check.what}: ", end="")
            self._out.print(check.found, markup=False)

    @staticmethod
    def _sizes(report: LoadReport | Estimate) -> str:
        sites = f"{len(report.sites_matched)} sites with weights, {len(report.sites_zero)} without"
        return f"  rank {report.rank}, {human_bytes(report.bytes)} of {report.file_dtype}; {sites}"

    def _print_sites(self, title: str, sites: Sequence[str]) -> None:
        for site in sites[:_MAX_SITES]:
            self._print(f"  {title}: {site}")
        if len(sites) > _MAX_SITES:
            self._print(f"  and {len(sites) - _MAX_SITES} more (--json lists them all)")

    def _print(self, text: str) -> None:
        self._out.print(text, markup=False)

    def _json(self, value: Any) -> None:
        self._out.print(json.dumps(value, default=str), markup=False)
