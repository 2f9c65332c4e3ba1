"""The judge of records: each answered Forward is recomputed from its digests, and told apart from every other.

It knows nothing but what clients were told and the adapters' files.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.faults.oracle import Library
from tests.soak.actor import CANCELLED
from tests.soak.plan import SITES, Pools
from tests.soak.records import Record

_MOST_MAPPINGS = 20_000
DTYPES = {"float32": torch.float32, "float16": torch.float16}

Key = tuple[str, str, int, int]
"""Epoch, session, mapping_id, generation: what names a mapping."""


class Finding(NamedTuple):
    """Something that must not be: why, and the records that show it."""

    client: str
    why: str
    records: tuple[Record, ...]


@dataclass
class Tally:
    """What was checked; a row is one line of one output, a token one line of an input.

    `cancelled` has when calls ended with CANCELLED that this side had not given up.
    """

    forwards: int = 0
    tokens: int = 0
    rows: int = 0
    base_rows: int = 0
    wrong_rows: int = 0
    mappings: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    epochs: Counter[str] = field(default_factory=Counter)
    planes: Counter[str] = field(default_factory=Counter)
    cancelled: list[float] = field(default_factory=list)


class Checker:
    """Takes records in the order in which each client wrote them."""

    def __init__(self, library: Library, pools: Pools) -> None:
        self._library = library
        self._x, self._base = torch.from_numpy(pools.x), torch.from_numpy(pools.base)
        self._mappings: OrderedDict[Key, Record] = OrderedDict()
        self.tally = Tally()
        self.findings: list[Finding] = []

    def check(self, client: str, record: Record) -> None:
        """Counts the record, and adds what is wrong with it to `findings`."""
        faults: dict[str, Any] = {"map": self._map, "forward": self._forward, "step": self._step, "fault": self._fault}
        for why, *others in faults[record.kind](record):
            self.findings.append(Finding(client, why, (*others, record)))

    def _step(self, record: Record) -> Iterator[tuple[Any, ...]]:
        verb, result = record.facts["verb"], record.facts["result"]
        self.tally.steps[verb] += 1
        if result == CANCELLED:
            self.tally.cancelled.append(record.facts["t"])
        if result != "OK":
            self.tally.refused[f"{verb} {result}"] += 1
        yield from ()

    def _fault(self, record: Record) -> Iterator[tuple[Any, ...]]:
        yield (str(record.facts["why"]),)

    def _map(self, record: Record) -> Iterator[tuple[Any, ...]]:
        facts = record.facts
        self.tally.mappings += 1
        key = _key(facts)
        before = self._mappings.get(key)
        self._mappings[key] = record
        if len(self._mappings) > _MOST_MAPPINGS:
            self._mappings.popitem(last=False)
        if before is not None and before.facts["digests"] != facts["digests"]:
            yield "one generation names two mappings (I10)", before
        if facts["answer_epoch"] != facts["epoch"]:
            yield ("a mapping is of another epoch than its session (I3)",)
        if facts["generation"] > facts["answer_generation"]:
            yield ("a mapping is newer than its answer",)
        if len(facts["refs"]) != len(facts["digests"]):
            yield ("a mapping has not one digest per entry",)
        for ref, digest in zip(facts["refs"], facts["digests"], strict=False):
            wanted = ref.partition("@")[2]
            if bool(ref) != bool(digest) or (wanted and wanted != digest):
                yield (f"{ref or 'BASE'} became {digest or 'BASE'}",)
            elif digest and digest not in self._library.parts:
                yield (f"{ref} became {digest}, which nobody wrote",)

    def _forward(self, record: Record) -> Iterator[tuple[Any, ...]]:
        facts, tally = record.facts, self.tally
        tally.forwards += 1
        tally.planes[facts["plane"]] += 1
        tally.epochs[facts["answer_epoch"]] += 1
        mapping = self._mappings.get(_key(facts))
        if mapping is None:
            yield ("an answer is of a mapping that was never made (I3)",)
            return
        if facts["answer_epoch"] != facts["epoch"]:
            yield "an answer is of another epoch than its mapping (I3)", mapping
        if facts["answer_generation"] < facts["generation"]:
            yield "an answer is older than its mapping (I3)", mapping
        if facts["digests"] != mapping.facts["digests"]:
            yield "a Forward reports other digests than SetMapping did (I8)", mapping
            return
        tally.tokens += sum(facts["counts"])
        for why in self._rows(facts, record.payload):
            yield why, mapping

    def _rows(self, facts: dict[str, Any], payload: bytes) -> Iterator[str]:
        """Recomputes every output from the digests that the Forward reported."""
        digests, counts, dtype = facts["digests"], facts["counts"], DTYPES[facts["dtype"]]
        rows, at = sum(counts), 0
        start = facts["x"]
        of_base = sum(count for digest, count in zip(digests, counts, strict=True) if not digest)
        for site, is_added in facts["items"]:
            inputs, outputs = SITES[site]
            size = rows * outputs * dtype.itemsize
            data = payload[at : at + size]
            at += size
            if len(data) != size:
                yield f"{site}: the output has {len(data)} bytes, not {size}"
                return
            found = torch.from_numpy(np.frombuffer(data, dtype=facts["dtype"]).reshape(rows, outputs).copy())
            x = self._x[start : start + rows, :inputs].to(dtype)
            base = self._base[start : start + rows, :outputs].to(dtype) if is_added else None
            wrong = self._wrong_rows(digests, counts, site, (x, found, base))
            self.tally.rows += rows
            self.tally.base_rows += of_base
            self.tally.wrong_rows += len(wrong)
            if wrong:
                yield f"{site}: rows {wrong[:20]} of {counts} are not those of {digests} (I8)"
        if at != len(payload):
            yield f"the outputs have {len(payload) - at} bytes too many"

    def _wrong_rows(
        self,
        digests: Sequence[str],
        counts: Sequence[int],
        site: str,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    ) -> list[int]:
        x, found, base = tensors
        if any(digest and digest not in self._library.parts for digest in digests):
            return list(range(x.shape[0]))
        return self._library.wrong_rows(digests, counts, site, x, found, base)


def _key(facts: dict[str, Any]) -> Key:
    return facts["epoch"], facts["session"], facts["mapping_id"], facts["generation"]
