"""Prints the name, type and labels of every metric that a server shows once it has been used: the golden file.

.venv/bin/python -m tests.conformance.metric_names > tests/golden/metrics.txt
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from slotcar.v1 import engine_service_pb2

from tests.conformance.items import forward, item
from tests.conformance.target import Streamed, Target, start

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "metrics.txt"
# What a histogram's samples have beside their own labels.
_OF_TYPE = {"le"}


def describe(text: str) -> Iterator[str]:
    """One line per metric in `text`; labels are those of its samples."""
    for family in sorted(text_string_to_metric_families(text), key=lambda family: family.name):
        labels = {label for sample in family.samples for label in sample.labels} - _OF_TYPE
        yield " ".join([family.name, family.type, *sorted(labels)])


def use(target: Target) -> None:
    """Lets every metric have a sample."""
    target.load("sql")
    stream = Streamed(target)  # not each plane's Forwards are counted when they have been answered
    with target.session() as session:
        request = forward(session, session.set_mapping("sql").generation, [1], item(target, 1))
        stream.ask(engine_service_pb2.ForwardStreamRequest(forward=request))
        stream.send(None)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for name in ("s", "root"):
            (Path(folder) / name).mkdir()
        target = start(stack, Path(folder) / "s", Path(folder) / "root").learn()
        use(target)
        sys.stdout.write("".join(f"{line}\n" for line in describe(target.metrics_text())))
