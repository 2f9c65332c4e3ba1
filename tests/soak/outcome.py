"""What came of a soak: figures, goals in proportion to its length, and what was found."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.soak.checker import Finding, Tally
from tests.soak.plan import Plan
from tests.soak.processes import Server
from tests.soak.slope import Slope, least, slope

_ROWS_PER_SECOND, _SERVER_KILLS_PER_SECOND, _CLIENT_DEATHS_PER_SECOND = 1_000_000 / 1800, 20 / 1800, 100 / 1800
_LATE_SECONDS = 30.0  # as long as a client is stopped
_MOST_PERCENT, _JUDGED_SECONDS = 1.0, 400.0
_TRIM_SECONDS = 20.0  # how often the server returns what is free


@dataclass(frozen=True)
class Outcome:
    """`faults` and `findings` are empty after a good run. `calm` has (seconds, bytes) of the server's memory."""

    plan: Plan
    done: Counter[str]
    tally: Tally
    faults: list[str]
    findings: list[Finding]
    server: Server
    calm: list[tuple[float, int]]

    @property
    def epochs(self) -> frozenset[str]:
        return frozenset(life.epoch for life in self.server.lives)

    @property
    def server_kills(self) -> int:
        return self.done["server kill -9"]

    @property
    def client_deaths(self) -> int:
        return sum(self.done[f"client {how}"] for how in ("kill -9", "SIGTERM", "vanished"))

    @property
    def growth(self) -> Slope | None:
        """Of the memory that stays."""
        return slope(least(self.calm, _TRIM_SECONDS))

    def problems(self) -> list[str]:
        """Everything that was wrong, whatever the goals."""
        strange = [f"answers of epoch {epoch}, which no server had" for epoch in self.tally.epochs.keys() - self.epochs]
        strange += [
            "a call ended with CANCELLED though no server was told to end"
            for at in self.tally.cancelled
            if not any(start <= at <= end + _LATE_SECONDS for start, end in self.server.ends)
        ]
        return [f"{finding.client}: {finding.why}" for finding in self.findings] + self.faults + strange

    def missed(self) -> Iterator[str]:
        """Goals that a run of this length did not reach."""
        seconds = self.plan.seconds
        for what, found, per_second in (
            ("rows", self.tally.rows, _ROWS_PER_SECOND),
            ("server kills", self.server_kills, _SERVER_KILLS_PER_SECOND),
            ("client deaths", self.client_deaths, _CLIENT_DEATHS_PER_SECOND),
        ):
            if found < int(per_second * seconds):
                yield f"{found} {what}, fewer than {int(per_second * seconds)}"
        growth = self.growth
        if growth is not None and growth.seconds >= _JUDGED_SECONDS and growth.percent >= _MOST_PERCENT:
            yield f"memory grows by {growth.percent:.2f} % per 10 minutes, {_MOST_PERCENT:g} % is the most"

    def figures(self) -> dict[str, Any]:
        growth = self.growth
        tally = {item.name: getattr(self.tally, item.name) for item in dataclasses.fields(self.tally)}
        tally |= {"epochs": len(self.tally.epochs), "cancelled": len(self.tally.cancelled)}
        return {
            "seed": self.plan.seed,
            "seconds": self.plan.seconds,
            "server_kills": self.server_kills,
            "client_deaths": self.client_deaths,
            "lives": len(self.epochs),
            "done": dict(sorted(self.done.items())),
            **{key: dict(sorted(value.items())) if isinstance(value, dict) else value for key, value in tally.items()},
            "rss": None if growth is None else {name: round(value, 3) for name, value in growth._asdict().items()},
            "problems": len(self.problems()),
        }

    def table(self) -> str:
        """The figures for a person, one a line."""
        lines = []
        for name, value in self.figures().items():
            if isinstance(value, dict):
                lines += [f"{name}:", *(f"  {key:<44} {count:>12}" for key, count in value.items())]
            else:
                lines.append(f"{name:<46} {value!s:>12}")
        return "\n".join(lines)

    def line(self) -> str:
        return json.dumps(self.figures())
