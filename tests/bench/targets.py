"""What the project wants of its measurements, each with the lines that speak of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["TARGETS", "Line", "Target"]

Line: TypeAlias = Mapping[str, Any]
"""One Record as it was printed."""


@dataclass(frozen=True)
class Measure:
    """A number of a line, and the unit that is written behind it."""

    of: Callable[[Line], float]
    unit: str

    def text(self, value: float) -> str:
        return f"{value:.3g} {self.unit}"


FASTER = Measure(lambda line: line["peer_median"] / line["ours_median"], "×")
FASTER_CPU = Measure(lambda line: line["peer_cpu_median"] / line["ours_cpu_median"], "×")
SLOWER = Measure(lambda line: line["ours_median"] / line["peer_median"], "×")
SLOWER_CPU = Measure(lambda line: line["ours_cpu_median"] / line["peer_cpu_median"], "×")
LATER = Measure(lambda line: line["ours_median"] - line["peer_median"], "µs")
WORK = Measure(lambda line: line["ours_cpu_median"], "µs")


@dataclass(frozen=True)
class Target:
    """On each line of `bench` that is marked and fits `where`, `measure` is at least `bound`, or with `most` at most.

    `where` is given the fields of the line's case, and its "peer".
    """

    bench: str
    text: str
    measure: Measure
    bound: float
    where: Callable[[Mapping[str, Any]], bool]
    most: bool = False

    @property
    def wanted(self) -> str:
        return f"{'≤' if self.most else '≥'} {self.measure.text(self.bound)}"

    def values(self, lines: Sequence[Line]) -> list[float]:
        """What the lines have that speak of it, the worst first."""
        mine = (line for line in lines if line["bench"] == self.bench and line["case"].get("target"))
        found = [self.measure.of(line) for line in mine if self.where({**line["case"], "peer": line["peer"]})]
        return sorted(found, reverse=self.most)

    def is_met_by(self, value: float) -> bool:
        return value <= self.bound if self.most else value >= self.bound


def _of_kernels(dtype: str, small: float, large: float, roof: float) -> tuple[Target, ...]:
    """Against PEFT at decode batches; and the part of the roof, which bounds what can be gained over PEFT."""

    def against(peer: str, *ranks: int) -> Callable[[Mapping[str, Any]], bool]:
        return lambda case: case["dtype"] == dtype and case["peer"] == peer and case["rank"] in ranks

    def few_tokens(case: Mapping[str, Any]) -> bool:
        return against("roof", 8, 16, 64)(case) and case["tokens"] <= 2 * case["adapters"]

    def many_tokens(case: Mapping[str, Any]) -> bool:
        return against("roof", 8, 16, 64)(case) and case["tokens"] == 128

    def wide(case: Mapping[str, Any]) -> bool:
        return against("roof", 64)(case) and case["tokens"] <= 32

    return (
        Target("kernels", f"{dtype}, rank 8 to 16: over PEFT", FASTER, small, against("peft", 8, 16)),
        Target("kernels", f"{dtype}, rank 64: of what the roof allows over PEFT", FASTER, large, wide),
        Target("kernels", f"{dtype}, up to two tokens per adapter: of the roof", FASTER, roof, few_tokens),
        Target("kernels", f"{dtype}, 128 tokens: of the roof", FASTER, 0.45, many_tokens),
    )


def _on(plane: str, **fields: Any) -> Callable[[Mapping[str, Any]], bool]:
    """The lines of a plane on which these fields are so."""
    wanted = {"plane": plane, **fields}
    return lambda case: {name: case.get(name) for name in wanted} == wanted


def _is(name: str, value: Any) -> Callable[[Mapping[str, Any]], bool]:
    return lambda case: case.get(name) == value


TARGETS = (
    *_of_kernels("float32", small=5, large=0.8, roof=0.8),
    *_of_kernels("bfloat16", small=10, large=0.65, roof=0.7),
    Target("planes", "ring, 16 KiB echo: over two C processes", SLOWER, 2.5, _on("ring", peer="eventfd"), most=True),
    Target("planes", "ring, 16 KiB echo: less than gRPC unary", FASTER, 20, _on("ring", peer="grpc-unary")),
    Target("planes", "direct: over a local call", LATER, 1, _on("direct", peer="in-process", call="kernel"), most=True),
    Target("step", "direct: over shared pages", SLOWER, 1.05, _on("direct", peer_memory="shared"), most=True),
    Target("step", "direct: over anonymous memory", SLOWER, 1.12, _on("direct", peer_memory="anonymous"), most=True),
    Target("step", "ring: over shared pages", SLOWER, 1.6, _on("ring", peer_memory="shared"), most=True),
    Target("load", "a slot's A: over memcpy", SLOWER, 1.6, _is("what", "fill of A"), most=True),
    Target(
        "load", "a slot: over memcpy", SLOWER, 2.2, lambda c: c["what"] == "fill" and c["peer"] == "memcpy", most=True
    ),
    Target("load", "CPU time, less than PEFT load_adapter", FASTER_CPU, 12, _is("peer", "peft")),
    Target("mapping", "in the core: work", WORK, 100, _is("work", "core"), most=True),
    Target("mapping", "through the ring: work", WORK, 100, _is("work", "ring"), most=True),
    Target("mapping", "100,000 adapters: over 10", SLOWER_CPU, 1.2, _is("peer", "ten-adapters"), most=True),
    Target("e2e", "direct: of the same kernels in process", FASTER, 0.97, _on("direct", peer="in-process")),
    Target("e2e", "direct: over PEFT's mixed batch", FASTER, 1, _on("direct", peer="peft")),
)
