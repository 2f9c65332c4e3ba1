"""Visits every reachable state, nearest first, so that what it finds comes with one of the shortest ways to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.property.reader_writer.configurations import Configuration
from tests.property.reader_writer.model import Model
from tests.property.reader_writer.rules import Rules
from tests.property.reader_writer.state import State

Trace = tuple[str, ...]


@dataclass(slots=True)
class Exploration:
    """What was found: how much there is, what was reached, and which invariants are broken, each with its trace."""

    states: int = 0
    transitions: int = 0
    reached: dict[str, Trace] = field(default_factory=dict)
    broken: dict[str, Trace] = field(default_factory=dict)

    def __str__(self) -> str:
        """The counts, and for each broken invariant the steps that lead there."""
        traces = (f"\n{name} is broken by:" + "".join(f"\n  {step}" for step in t) for name, t in self.broken.items())
        return f"{self.states} states, {self.transitions} transitions" + "".join(traces)


class Explorer:
    """A breadth-first search; states are numbered in the order in which they are found."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._states: list[State] = []
        self._numbers: dict[State, int] = {}
        self._ways: list[tuple[int, str]] = []
        self._from: list[list[int]] = []
        self.found = Exploration()

    def run(self) -> Exploration:
        self._number(self._model.start, -1, "start")
        for number, state in enumerate(self._states):  # which grow meanwhile
            self._visit(number, state)
        stuck = self._first_stuck()
        if stuck is not None:
            self._record(self.found.broken, ("PROGRESS",), stuck, "nothing leads on")
        self.found.states = len(self._states)
        return self.found

    def _visit(self, number: int, state: State) -> None:
        model, found = self._model, self.found
        choices = model.choices(state)
        if model.is_blocked(state, choices):
            self._record(found.broken, ("PROGRESS",), number, "blocked")
        for actor in choices:
            for step in actor:
                found.transitions += 1
                self._from[self._number(step.after, number, step.name)].append(number)
                self._record(found.reached, step.reached, number, step.name)
                self._record(found.broken, model.broken_by(state, step), number, step.name)

    def _number(self, state: State, before: int, name: str) -> int:
        number = self._numbers.setdefault(state, len(self._states))
        if number == len(self._states):
            self._states.append(state)
            self._ways.append((before, name))
            self._from.append([])
            self._record(self.found.broken, self._model.broken(state), before, name)
        return number

    def _record(self, into: dict[str, Trace], what: Iterable[str], before: int, name: str) -> None:
        for key in what:
            if key not in into:
                into[key] = (*self._trace(before), name)

    def _trace(self, number: int) -> Trace:
        names = []
        while number > 0:
            number, name = self._ways[number]
            names.append(name)
        return tuple(reversed(names))

    def _first_stuck(self) -> int | None:
        """The first state from which no state can be reached where everybody is at rest."""
        pending = [number for number, state in enumerate(self._states) if self._model.is_quiet(state)]
        leads = bytearray(len(self._states))
        for number in pending:
            leads[number] = 1
        while pending:
            for before in self._from[pending.pop()]:
                if not leads[before]:
                    leads[before] = 1
                    pending.append(before)
        first = leads.find(0)
        return first if first >= 0 else None


def explore(configuration: Configuration, rules: Rules | None = None) -> Exploration:
    """Every state of the configuration, under all rules unless told otherwise."""
    return Explorer(Model(configuration, rules or Rules())).run()
