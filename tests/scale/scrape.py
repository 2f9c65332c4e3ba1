"""What a scrape of /metrics costs a server that knows many adapters: `python -m tests.scale.scrape`.

The residents have long names, and one is mapped. CPU time is all that the sidecar takes while it is scraped.
"""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass

import torch

from tests.bench.sides import cpu_nanoseconds
from tests.bench.stage import Site, adapter_weights, serving, write_adapter

MOST_BYTES = 100_000
_SITE = Site("layer.proj", 16, 16)
_RANK = 4


@dataclass(frozen=True)
class Cost:
    """Of one scrape of a server with so many adapters."""

    registered: int
    residents: int
    series: int
    bytes: int
    cpu_ms: float

    def __str__(self) -> str:
        known = f"{self.registered} adapters, {self.residents} of them resident"
        return f"{known}: {self.series} series, {self.bytes} bytes, {self.cpu_ms:.1f} ms of CPU a scrape"


def measure(registered: int, residents: int, scrapes: int) -> Cost:
    """Starts a server and scrapes it so many times."""
    program = ("tests.bench.registered", str(registered - residents))
    extra = ("--metrics", "127.0.0.1:0")
    with serving([_SITE], slots=residents, rank=_RANK, extra=extra, program=program) as stage:
        names = [f"customers/{number:04}/a-name-of-some-length-{number}" for number in range(residents)]
        for number, name in enumerate(names):
            weights = adapter_weights([_SITE], rank=_RANK, dtype=torch.float32, seed=number)
            stage.client.load(name, write_adapter(stage.root / name, weights))
        match = re.search(r"at=(http://\S+/metrics)", stage.sidecar.log)
        assert match is not None, stage.sidecar.log
        with stage.client.session() as session:
            session.set_mapping(names)
            _scrape(match[1])
            before = cpu_nanoseconds(stage.pid)
            texts = [_scrape(match[1]) for _ in range(scrapes)]
            cpu_ms = (cpu_nanoseconds(stage.pid) - before) / scrapes / 1e6
    series = sum(not line.startswith(b"#") for line in texts[-1].splitlines())
    return Cost(registered, residents, series, max(map(len, texts)), cpu_ms)


def _scrape(url: str) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urllib.request.urlopen(request, timeout=30) as response:
        text: bytes = response.read()
        return text


if __name__ == "__main__":
    print(measure(10_000, 64, scrapes=100))
