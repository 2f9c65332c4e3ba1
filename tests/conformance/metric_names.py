"""What a server exports once it has been used, to compare with the golden names of tests/golden/metrics.txt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from prometheus_client.openmetrics.parser import text_string_to_metric_families
from slotcar.v1 import engine_service_pb2

from tests.conformance.items import forward, item
from tests.conformance.target import Streamed, Target

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "metrics.txt"
# What a histogram's samples have beside their own labels.
_OF_TYPE = {"le"}


class Shown(NamedTuple):
    """A metric's name, type, unit ("-" for none) and labels."""

    name: str
    type: str
    unit: str
    labels: frozenset[str]


def golden() -> dict[str, Shown]:
    """By name; `make golden` writes them from the catalogue."""
    words = (line.split() for line in GOLDEN.read_text(encoding="utf-8").splitlines())
    return {name: Shown(name, kind, unit, frozenset(labels)) for name, kind, unit, *labels in words}


def exported(openmetrics: str) -> Iterator[tuple[Shown, bool]]:
    """Every metric of a text, and whether it has a sample; one without has no labels to see."""
    for family in text_string_to_metric_families(openmetrics):
        labels = frozenset(label for sample in family.samples for label in sample.labels) - _OF_TYPE
        yield Shown(family.name, family.type, family.unit or "-", labels), bool(family.samples)


def use(target: Target) -> None:
    """Lets every metric have a sample, but those of remote sources."""
    target.load("sql")
    stream = Streamed(target)  # not each plane's Forwards are counted when they have been answered
    with target.session() as session:
        request = forward(session, session.set_mapping("sql").generation, [1], item(target, 1))
        stream.ask(engine_service_pb2.ForwardStreamRequest(forward=request))
        stream.send(None)
