"""The panels of the dashboard that show an alert: those whose queries ask for the metrics that its rule asks for."""

from __future__ import annotations

import functools
import re
import runpy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import promql_parser
import yaml

from tests.golden.dashboard import DASHBOARD
from tests.ops.gameday.pace import Pace
from tests.ops.prometheus import RULES, Labels, Prometheus
from tests.unit.ops.promql import parsed, selectors


@dataclass(frozen=True, slots=True)
class Value:
    """One line of a panel now, with its legend."""

    legend: str
    value: float


@dataclass(frozen=True, slots=True)
class Shown:
    """A panel, and what it shows of the sidecar now."""

    title: str
    values: tuple[Value, ...]


@functools.cache
def _rules() -> list[dict[str, str]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def metrics_of(alert: str) -> frozenset[str]:
    """The exported metrics that an alert is about, whether it asks for them itself or for what is recorded of them."""
    recorded = {rule["record"]: rule["expr"] for rule in _rules() if "record" in rule}
    (expression,) = (rule["expr"] for rule in _rules() if rule.get("alert") == alert)

    def names(tree: promql_parser.Expr) -> Iterator[str]:
        for selector in selectors(tree):
            if selector.name in recorded:
                yield from names(parsed(recorded[selector.name]))
            else:
                yield selector.name

    return frozenset(names(parsed(expression)))


def panels_of(alert: str) -> list[Any]:
    """Of dashboard.PANELS those that ask for the most of its metrics; among equals, for the fewest others."""
    wanted = metrics_of(alert)

    def fit(panel: Any) -> tuple[int, int]:
        asked = {s.name for expression, _ in panel.queries for s in selectors(parsed(expression))}
        return len(wanted & asked), -len(asked - wanted)

    panels = runpy.run_path(str(DASHBOARD))["PANELS"]
    best = max(map(fit, panels))
    return [panel for panel in panels if best[0] and fit(panel) == best]


def look(prometheus: Prometheus, pace: Pace, alert: str, labels: Mapping[str, str]) -> tuple[Shown, ...]:
    """The alert's panels, without lines of other labels than the alert's, and without those that say nothing.

    0 says nothing, but of a target that does not answer. Panels without a line are left out.
    """
    found, says_zero = [], "up" in metrics_of(alert)
    for panel in panels_of(alert):
        values = []
        for expression, legend in panel.queries:
            answer = prometheus.query(_filled(expression, pace, labels["instance"]))
            said = {each: value for each, value in answer.items() if value == value and (value or says_zero)}
            fitting = {each: value for each, value in said.items() if _concerns(each, labels)}
            values += [Value(_legend(legend, each, labels), value) for each, value in fitting.items()]
        if values:
            found.append(Shown(panel.title, tuple(values)))
    return tuple(found)


def _filled(expression: str, pace: Pace, instance: str) -> str:
    """As Grafana asks it when the reader has chosen one sidecar."""
    expression = expression.replace("$instance", re.escape(instance).replace("\\", "\\\\"))
    return expression.replace("$__rate_interval", pace.rate_interval)


def _legend(legend: str, found: Labels, wanted: Mapping[str, str]) -> str:
    """As Grafana fills it in; a table has columns of labels in its place."""
    if not legend:
        return " ".join(f"{name}={value}" for name, value in found)
    known = dict(wanted) | dict(found)
    return re.sub(r"\{\{(\w+)\}\}", lambda name: known.get(name[1], ""), legend)


def _concerns(found: Labels, wanted: Mapping[str, str]) -> bool:
    return all(wanted.get(name, each) == each for name, each in found)
