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
_STYLE = {
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
_MICROSECONDS = "µs"

Name = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True)
class Chart:
    """Bars by group; `group` and the names of the two sides are made from a line's case and its "peer"."""

    title: str
    group: Name
    ours: Name
    peer: Name
    value: str = "median"
    ratio: bool = False
    linear: bool = False

    def draw(self, lines: Sequence[Line], path: Path) -> None:
        """Writes the chart of all lines of a benchmark."""
        groups: dict[str, dict[str, float]] = {}
        for line in lines:
            case = {**line["case"], "peer": line["peer"]}
            bars = groups.setdefault(self.group(case), {})
            if self.ratio:
                bars[self.peer(case)] = line["ratio"]
            else:
                bars[self.ours(case)] = line[f"ours_{self.value}"]
                bars[self.peer(case)] = line[f"peer_{self.value}"]
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
    if not chart.linear:
        axes.set_xscale("log")
        axes.set_xlim(left=10 ** math.floor(math.log10(min(min(bars.values()) for bars in groups.values()))))
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    axes.set_title(chart.title, loc="left", size=10)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend([handles[name] for name in names], names, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _short(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _plane(case: Mapping[str, Any]) -> str:
    return f"slotcar {case['plane']}"


def _peer(case: Mapping[str, Any]) -> str:
    return str(case["peer"])


CHARTS: Mapping[str, Chart] = {
    "kernels": Chart(
        "Kernel: how many times faster than each peer",
        group=lambda case: (
            f"{case['dtype']}, rank {case['rank']}, {case['tokens']} tokens, {case['adapters']} adapters"
        ),
        ours=lambda case: "slotcar",
        peer=_peer,
        ratio=True,
    ),
    "planes": Chart(
        f"One Forward, {_MICROSECONDS}",
        group=lambda case: f"{case['work']}, {case['bytes'] >> 10} KiB, cores: {case['cores']}",
        ours=lambda case: "guarded kernel" if case["call"] == "kernel" else _plane(case),
        peer=lambda case: "unguarded kernel" if case["call"] == "kernel" else _peer(case),
    ),
    "step": Chart(
        f"A decode step of 128 Forwards, {_MICROSECONDS}",
        group=lambda case: str(case["dtype"]),
        ours=_plane,
        peer=lambda case: f"in process, {case['peer_memory']} memory",
        linear=True,
    ),
    "load": Chart(
        f"Loading an adapter, {_MICROSECONDS} of CPU time",
        group=lambda case: f"{case['what']}, {case['mib']} MiB, {case['dtype']} to {case['slot_dtype']}",
        ours=lambda case: "slotcar",
        peer=_peer,
        value="cpu_median",
    ),
    "mapping": Chart(
        f"SetMapping of 256 entries, {_MICROSECONDS} of CPU time",
        group=lambda case: str(case["work"]),
        ours=lambda case: f"{case['registered']:,} adapters",
        peer=lambda case: "10 adapters",
        value="cpu_median",
    ),
    "clients": Chart(
        f"A Forward of 16 KiB beside others, {_MICROSECONDS}, 99th percentile",
        group=lambda case: f"{case['clients']} clients",
        ours=_plane,
        peer=_peer,
        value="p99",
    ),
    "e2e": Chart(
        f"A decode step of 32 rows, {_MICROSECONDS}",
        group=lambda case: str(case["model"]),
        ours=lambda case: case["plane"] if case["plane"] == "in-process" else _plane(case),
        peer=_peer,
        linear=True,
    ),
}
