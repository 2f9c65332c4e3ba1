"""Draws measurements as SVG files that can be read on light and on dark pages, the same bytes for the same lines."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from tests.bench.targets import Line

__all__ = ["CHARTS", "Chart"]

_INK = "#808080"
_COLOURS = ("#2f81c7", "#d9742b", "#3f9f5f", "#a86fc9", "#c94f6d", "#8a8f2a", "#4aa6a6", "#9a7b5a")
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "slotcar",
    "font.size": 9,
    "font.family": "sans-serif",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "grid.color": _INK,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Chart:
    """Bars in groups: each line adds those of its two sides to its group."""

    title: str
    group: Callable[[Mapping[str, Any]], str]
    bars: Callable[[Line], Mapping[str, float]]
    linear: bool = False

    def draw(self, lines: Sequence[Line], path: Path) -> None:
        """Writes the chart of all lines of a benchmark."""
        groups: dict[str, dict[str, float]] = {}
        for line in lines:
            groups.setdefault(self.group(line["case"]), {}).update(self.bars(line))
        with mpl.rc_context(_STYLE):
            _bars(groups, self).savefig(path, format="svg", metadata={"Date": None}, bbox_inches="tight")


def _bars(groups: Mapping[str, Mapping[str, float]], chart: Chart) -> Figure:
    """A bar per name in each group, in the same order and colours, on the whole the longest first."""
    logarithms: dict[str, list[float]] = {}
    for bars in groups.values():
        for name, value in bars.items():
            logarithms.setdefault(name, []).append(math.log(value))
    names = sorted(logarithms, key=lambda name: -statistics.fmean(logarithms[name]))
    count = sum(len(bars) for bars in groups.values())
    figure = Figure(figsize=(8, 0.8 + 0.17 * count + 0.12 * len(groups)))
    axes = figure.subplots()
    place, ticks = 0.0, []
    for bars in groups.values():
        start = place
        for name in filter(bars.__contains__, names):
            axes.barh(place, bars[name], height=0.85, color=_COLOURS[names.index(name) % len(_COLOURS)], label=name)
            axes.annotate(f" {_short(bars[name])}", (bars[name], place), va="center", size=7)
            place += 1
        ticks.append((start + place - 1) / 2)
        place += 0.7
    axes.set_yticks(ticks, list(groups))
    axes.set_ylim(place - 0.7, -1)
    values = [value for bars in groups.values() for value in bars.values()]
    if chart.linear:
        axes.set_xlim(0, 1.1 * max(values))
    else:
        axes.set_xscale("log")
        axes.set_xlim(10 ** math.floor(math.log10(min(values))), 2 * max(values))
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    axes.set_title(chart.title, loc="left", size=10)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend([handles[name] for name in names], names, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _short(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _times(line: Line) -> dict[str, float]:
    """The medians of a plane and its peer, in microseconds."""
    return {f"slotcar {line['case']['plane']}": line["ours_median"], line["peer"]: line["peer_median"]}


def _planes(line: Line) -> dict[str, float]:
    if line["case"]["call"] == "client":
        return _times(line)
    return {"kernel, guarded": line["ours_median"], "kernel, unguarded": line["peer_median"]}


def _step(line: Line) -> dict[str, float]:
    peer = f"in process, {line['case']['peer_memory']} memory, prepared {line['case']['peer_prepared']}"
    return {f"slotcar {line['case']['plane']}": line["ours_median"] / 1e3, peer: line["peer_median"] / 1e3}


def _load(line: Line) -> dict[str, float]:
    return {"slotcar": line["ours_cpu_median"] / 1e3, line["peer"]: line["peer_cpu_median"] / 1e3}


def _hits(line: Line) -> dict[str, float]:
    return {line["ours"]: 100 * line["case"]["hit_ratio"], "belady": 100 * line["case"]["belady"]}


def _beside(line: Line) -> dict[str, float]:
    return {"beside loads": line["ours_cpu_median"], "alone": line["peer_cpu_median"]}


def _mapping(line: Line) -> dict[str, float]:
    registered = f"{line['case']['registered']:,} adapters"
    return {registered: line["ours_cpu_median"], "10 adapters": line["peer_cpu_median"]}


def _rates(name: str) -> Callable[[Line], dict[str, float]]:
    def rates(line: Line) -> dict[str, float]:
        case = line["case"]
        ours = case["plane"] if case["plane"] == "in-process" else f"slotcar {case['plane']}"
        return {ours: case[name], line["peer"]: case[f"peer_{name}"]}

    return rates


CHARTS: Mapping[str, Chart] = {
    "kernels": Chart(
        "Kernels: how many times as fast as each peer",
        lambda case: (
            f"{case['dtype']}, {case['hidden']} features, rank {case['rank']}, {case['tokens']} tokens, "
            f"{case['adapters']} adapters {case['popularity']}"
        ),
        lambda line: {line["peer"]: line["ratio"]},
    ),
    "planes": Chart(
        "One Forward, µs", lambda case: f"{case['work']}, {case['bytes'] >> 10} KiB, cores: {case['cores']}", _planes
    ),
    "step": Chart("A decode step of 128 Forwards, ms", lambda case: str(case["dtype"]), _step, linear=True),
    "load": Chart(
        "Loading an adapter, ms of CPU time",
        lambda case: f"{case['what']}, {case['mib']} MiB, {case['dtype']} to {case['slot_dtype']}",
        _load,
    ),
    "beside": Chart(
        "CPU time of a Forward, µs", lambda case: f"{case['plane']}, {case['rows']} rows", _beside, linear=True
    ),
    "hits": Chart(
        "Requests whose adapter is in its tier, %",
        lambda case: f"{case['trace']}, {case['tier']}: {case['room']}",
        _hits,
        linear=True,
    ),
    "mapping": Chart("SetMapping of 256 entries, µs of CPU time", lambda case: str(case["work"]), _mapping),
    "clients": Chart(
        "Forwards of 16 KiB a second, of all clients together",
        lambda case: f"clients: {case['clients']}",
        _rates("calls_per_s"),
    ),
    "e2e": Chart("Tokens a second", lambda case: str(case["model"]), _rates("tokens_per_s"), linear=True),
}
