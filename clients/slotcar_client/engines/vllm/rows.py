"""Which version each row of a step is for, as runs of neighbours: one entry of a mapping for each run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple


class Scheduled(NamedTuple):
    """One request of a step: `ref` is its version, None for the base model; how many rows it has in each matrix."""

    request_id: str
    ref: str | None
    tokens: int
    samples: int


@dataclass(frozen=True, slots=True)
class Rows:
    """`refs` of each run, with its rows in the layers (`tokens`) and in the head (`samples`)."""

    refs: tuple[str | None, ...] = ()
    tokens: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()

    @property
    def versions(self) -> tuple[str, ...]:
        """Each once, in the order of the rows."""
        return tuple(dict.fromkeys(ref for ref in self.refs if ref is not None))


def rows_of(batch: Iterable[Scheduled], served: Callable[[str], bool]) -> Rows:
    """The runs of a step's requests; what is not `served` counts as the base model."""
    runs = [
        (ref, list(requests))
        for ref, requests in groupby(
            batch, lambda request: request.ref if request.ref and served(request.ref) else None
        )
    ]
    return Rows(
        tuple(ref for ref, _ in runs),
        tuple(sum(request.tokens for request in requests) for _, requests in runs),
        tuple(sum(request.samples for request in requests) for _, requests in runs),
    )
