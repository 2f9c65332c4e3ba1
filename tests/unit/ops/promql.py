"""Whether an expression of PromQL asks for what is exported: metrics of the catalogue, with labels that they have."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import promql_parser
from slotcar_sidecar.ops.catalogue import CATALOGUE

DASHBOARD = Path(__file__).resolve().parents[3] / "deploy" / "grafana" / "slotcar.json"
# What Prometheus itself gives to every sample of a target, and to `up`.
TARGET_LABELS = frozenset({"job", "instance"})
# What Grafana puts in the place of its variables, so that an expression can be read.
_GRAFANA = {"$__rate_interval": "5m", "$instance": ".*"}


def queries() -> list[tuple[str, str]]:
    """Each panel's title with each of its expressions."""
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", ())]


def exported() -> dict[str, frozenset[str]]:
    """The labels of each sample, by its name."""
    labels = {name: TARGET_LABELS | set(one.labels) for one in CATALOGUE for name in one.sample_names}
    buckets = {name: labels[name] | {"le"} for name in labels if name.endswith("_bucket")}
    return labels | buckets | {"up": TARGET_LABELS}


def filled_in(expression: str) -> str:
    """As Grafana asks it."""
    for variable, value in _GRAFANA.items():
        expression = expression.replace(variable, value)
    return expression


def parsed(expression: str) -> promql_parser.Expr:
    """Raises ValueError for what is no PromQL."""
    return promql_parser.parse(filled_in(expression))


def selectors(tree: promql_parser.Expr) -> list[promql_parser.VectorSelector]:
    """Every metric that is asked for, in order."""
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(tree, visit)
    return found


def faults(expression: str, recorded: Collection[str] = ()) -> Iterator[str]:
    """What it asks for that is not there; metrics that rules record have the labels that the rules leave them."""
    known, tree = exported(), parsed(expression)
    asked = selectors(tree)
    for selector in asked:
        if selector.name not in known and selector.name not in recorded:
            yield f"{selector.name} is no metric"
    labels = [known[selector.name] for selector in asked if selector.name in known]
    for selector in asked:
        for matcher in selector.matchers.matchers:
            if selector.name in known and matcher.name not in known[selector.name]:
                yield f"{selector.name} has no label {matcher.name}"
    for label in _grouped(tree):
        if any(label not in each for each in labels):
            yield f"no label {label} to group by"


def _grouped(tree: promql_parser.Expr) -> set[str]:
    """The labels that aggregations name."""
    found: set[str] = set()

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            found.update(node.modifier.labels)

    promql_parser.walk(tree, visit)
    return found
