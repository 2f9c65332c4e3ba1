"""One Forward after the other, in a stream, graphs and memory of their own: threads each have a lane.

Invariant: nothing leaves before the event behind its last kernel, and no memory is written before its last use is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from slotcar_kernels.moved import Moved, move
from slotcar_kernels.triton.tiles import BUCKETS, MOST_ROWS
from torch import Tensor

from slotcar_sidecar.device.cuda.launches import BucketPlan, Kind, SiteLaunch
from slotcar_sidecar.device.cuda.machine import Machine
from slotcar_sidecar.device.cuda.slots import DeviceSlots

__all__ = ["Lane", "SiteRows"]


@dataclass(frozen=True, slots=True, eq=False)
class SiteRows:
    """One site's tensors in the host's memory: x, base, y (the base's output) [rows, …], None where there are none.

    `out` is written whole. `index_count` is how many tokens or experts there are for aux to name.
    """

    site: str
    rank: int
    x: Tensor | None
    base: Tensor | None
    aux: Tensor | None
    y: Tensor | None
    out: Tensor
    index_count: int
    moved: Sequence[Moved]

    @property
    def adds(self) -> bool:
        """Whether the kernels add to what is in `out` on the device."""
        return self.base is not None or bool(self.moved)


class Lane:
    """Used by one thread at a time."""

    def __init__(self, machine: Machine, slots: DeviceSlots) -> None:
        self._machine = machine
        self._slots = slots
        self._stream = machine.stream()
        self._plans: dict[int, BucketPlan] = {}
        self._launches: dict[Kind, SiteLaunch] = {}
        self._by_site: dict[tuple[int, str, int, torch.dtype, bool], SiteLaunch] = {}

    def compute(self, slots: Sequence[int], sites: Sequence[SiteRows], indices: Mapping[int, Tensor]) -> None:
        """Writes every site's `out`; `slots` of each row, -1 for BASE; `indices`: checked aux, by the site's index."""
        for start in range(0, len(slots), MOST_ROWS):
            rows = slice(start, min(start + MOST_ROWS, len(slots)))
            with self._stream.current():
                self._piece(slots[rows], rows, sites, indices)

    def warm_up(self, dtype: torch.dtype, is_over: Callable[[], bool]) -> None:
        """Compiles and captures what batches of a dtype will need, until `is_over`."""
        model = self._slots.model
        kinds = product(BUCKETS, model.by_name, range(model.tensor_parallel), (False, True))
        with self._stream.current():
            for bucket, site, rank, adds in kinds:
                if not is_over():
                    self._launch(bucket, site, rank, dtype, adds)

    def _piece(
        self, slots: Sequence[int], rows: slice, sites: Sequence[SiteRows], indices: Mapping[int, Tensor]
    ) -> None:
        bucket = next(size for size in BUCKETS if size >= len(slots))
        launches = [self._launch(bucket, site.site, site.rank, site.out.dtype, site.adds) for site in sites]
        self._plan(bucket).execute(slots)
        pending: dict[SiteLaunch, Tensor] = {}
        for index, (site, launch) in enumerate(zip(sites, launches, strict=True)):
            if launch in pending:
                self._finish(pending)
            self._give(launch, site, slots, rows)
            if launch.aux is not None:
                launch.aux.give(indices[index][rows])
            launch.execute((site.site, site.rank), self._slots.parts(site.site, site.rank))
            launch.out.take(len(slots))
            pending[launch] = site.out[rows]
        self._finish(pending)

    def _give(self, launch: SiteLaunch, site: SiteRows, slots: Sequence[int], rows: slice) -> None:
        """Enqueues the copies of x and of what the delta is added to."""
        out = launch.out.on_device[: len(slots)]
        if site.x is not None:
            assert launch.x is not None
            launch.x.give(site.x[rows])
        if site.base is not None:
            launch.out.give(site.base[rows])
        elif site.moved:
            out.zero_()
        y = out if site.y is site.base or site.y is None else site.y[rows].to(out.device)
        for moved in site.moved:
            move(moved, slots, out[:, moved.columns], y[:, moved.columns])

    def _finish(self, pending: dict[SiteLaunch, Tensor]) -> None:
        """Waits for the work so far, and hands over what it gave."""
        self._stream.event().wait()
        for launch, out in pending.items():
            out.copy_(launch.out.pinned[: len(out)])
        pending.clear()

    def _plan(self, bucket: int) -> BucketPlan:
        found = self._plans.get(bucket)
        if found is None:
            found = self._plans[bucket] = BucketPlan(bucket, self._slots.count, self._machine, self._stream)
        return found

    def _launch(self, bucket: int, site: str, rank: int, dtype: torch.dtype, adds: bool) -> SiteLaunch:
        wanted = bucket, site, rank, dtype, adds
        if wanted in self._by_site:
            return self._by_site[wanted]
        parts = self._slots.parts(site, rank)
        is_embedding = self._slots.model.by_name[site].kind == "embedding"
        kind = Kind.of(bucket, dtype, adds, is_embedding, parts)
        found = self._launches.get(kind)
        if found is None:
            plan = self._plan(bucket).plan
            found = self._launches[kind] = SiteLaunch(kind, plan, parts, self._machine, self._stream)
        self._by_site[wanted] = found
        return found
