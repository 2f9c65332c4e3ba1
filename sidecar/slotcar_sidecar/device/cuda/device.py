"""Slots in the memory of a GPU, filled from host weights and computed with by slotcar's Triton kernels.

Invariant: a Forward waits for no load, and its results leave only after the event behind its last kernel (I2); a GPU
that is lost is asked nothing more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from slotcar.shm.slots import EPOCH_BYTES
from slotcar_kernels.buffers import DTYPES
from slotcar_kernels.moved import Moved
from slotcar_kernels.seed import GAIN
from torch import Tensor

from slotcar_sidecar.core.errors import DeviceLost, RequestInvalid
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.layout import Layout
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.ports import Batch, HostAdapter
from slotcar_sidecar.core.tensor import Matrix
from slotcar_sidecar.device.cuda.exports import SlotsMemory
from slotcar_sidecar.device.cuda.lane import Lane, SiteRows
from slotcar_sidecar.device.cuda.machine import Machine
from slotcar_sidecar.device.cuda.slots import DeviceSlots
from slotcar_sidecar.device.cuda.uploads import Uploads
from slotcar_sidecar.device.fits import Fits
from slotcar_sidecar.device.leaves import NOTHING, LeafArrays, SlotParts, flags_of, parts_of, slot_holds
from slotcar_sidecar.device.matrices import to_matrix, to_tensor, to_tensor_or_none
from slotcar_sidecar.device.slots_file import SlotsFile
from slotcar_sidecar.device.weights import host_tensors

__all__ = ["CudaBatch", "CudaDevice"]


@dataclass(frozen=True, slots=True, eq=False)
class CudaBatch:
    """A prepared Forward: each execution reads the bytes of its items, and the slots, as they are then."""

    slots: Sequence[int]
    sites: Sequence[SiteRows]
    outputs: tuple[Matrix, ...]


class CudaDevice:
    """S slots; tensors of Forwards come from the host's memory, and go back there.

    With `poison`, whatever no fill has written is NaN, so that reading the wrong place shows.
    """

    kernel = "triton"

    def __init__(
        self,
        machine: Machine,
        slots: int,
        max_rank: int,
        slot_dtype: str = "float32",
        poison: bool = False,
        epoch: str = "0" * EPOCH_BYTES,
    ) -> None:
        self.slots = slots
        self.max_rank = max_rank
        self.slot_dtype = slot_dtype
        self.lost = ""
        """Why the GPU computes no more; empty while it does."""
        self.when_lost: list[Callable[[], object]] = []
        """Called, in any thread, once it does not."""
        self._machine = machine
        self._poison = poison
        self._epoch = epoch
        self._file: SlotsFile | None = None
        self._fits: Fits | None = None
        self._slots: DeviceSlots | None = None
        self._uploads: Uploads | None = None
        # Taken and given back by threads without a lock: each operation of a deque is one.
        self._lanes: deque[Lane] = deque()
        # Per slot; a fill replaces its slot's parts, and only fills of different slots run at one time.
        self._parts: list[SlotParts] = [{} for _ in range(slots)]

    def shape(self, model: ModelSpec) -> None:
        """Makes the slots for `model`. Raises CapacityExceeded."""
        assert self._slots is None, "a device is shaped once"
        stream, shape = self._machine.stream(), (self.slots, self.max_rank, self.slot_dtype)
        with stream.current():
            made = DeviceSlots(model, shape, self._machine, self._poison)
        stream.event().wait()
        if made.memory.place is not None:
            self._file = SlotsFile(made.geometry, self._epoch, made.memory.place)
        self._fits = Fits(model, self.max_rank, self.slot_dtype)
        self._uploads, self._slots = Uploads(self._machine, made, self._poison), made

    def warm_up(self, lanes: int, is_over: Callable[[], bool]) -> None:
        """Compiles and captures what Forwards in the slots' dtype will need, for so many of them side by side.

        What is not warm is made by the first Forward that needs it, which takes seconds. `is_over` is asked before each
        kind of launch whether to make no more. Raises DeviceLost.
        """
        assert self._slots is not None
        made = [Lane(self._machine, self._slots) for _ in range(lanes)]
        for lane in made:
            self._asked(partial(lane.warm_up, DTYPES[self.slot_dtype], is_over))
        self._lanes.extend(made)

    def slot_bytes(self) -> int:
        """Size of one slot over all sites, in bytes; 0 before `shape`."""
        model = self._slots.model if self._slots is not None else None
        return model.slot_bytes(self.max_rank, DTYPES[self.slot_dtype].itemsize) if model is not None else 0

    @property
    def file(self) -> SlotsFile | None:
        """What clients of the direct plane map beside `memory`; None before `shape`, and where they cannot have it."""
        return self._file

    @property
    def memory(self) -> SlotsMemory | None:
        """What the slots lie in; None before `shape`."""
        return None if self._slots is None else self._slots.memory

    def publish(self, layout: Layout) -> None:
        """Tells readers in other processes which slots begin to change."""
        if self._file is not None:
            self._file.publish(layout)

    def close(self) -> None:
        """Tells readers in other processes that nobody looks after the slots any more. Idempotent."""
        if self._file is not None:
            self._file.close()

    def losses(self, weights: HostAdapter) -> tuple[str, ...]:
        """What a cast to the slot dtype makes zero, for people. Raises what `check` raises."""
        assert self._fits is not None, "a device is shaped before it is filled"
        return self._fits.losses(weights)

    def check(self, weights: HostAdapter) -> None:
        """Raises AdapterInvalid unless the adapter fits the model, and its values fit the slot dtype."""
        assert self._fits is not None, "a device is shaped before it is filled"
        self._fits.check(weights)

    def fill(self, slot: SlotId, weights: HostAdapter) -> None:
        """Writes what CpuDevice.fill writes, on a stream of its own, and returns once it is there.

        Raises DeviceLost, or what `check` raises, and has written nothing then.
        """
        self.check(weights)
        assert self._slots is not None
        assert self._uploads is not None
        host, uploads = host_tensors(weights), self._uploads
        parts = parts_of(self._slots.model, host)
        self._parts[slot] = {}
        if self._file is not None:
            written = (parts.get(leaf.name, (NOTHING,) * leaf.experts) for leaf in self._slots.model.leaves)
            self._file.write_parts(slot, chain.from_iterable(written))
        self._asked(lambda: uploads.fill(slot, host, parts))
        self._parts[slot] = parts

    def prepare(
        self, entries: Sequence[tuple[SlotId | None, int]], items: Sequence[ForwardItem], rank: int = 0
    ) -> CudaBatch:
        """Says which slot each row uses; ranks and scales are what the slots have when it is executed.

        Raises RequestInvalid for an item that needs the base model's output and has none.
        """
        slots = [-1 if slot is None else slot for slot, count in entries for _ in range(count)]
        used = sorted({slot for slot in slots if slot >= 0})
        sites = [self._site_rows(index, item, used, (len(slots), rank)) for index, item in enumerate(items)]
        outputs = [item.out or to_matrix(site.out) for item, site in zip(items, sites, strict=True)]
        return CudaBatch(slots, sites, tuple(outputs))

    def execute(self, batch: Batch) -> tuple[Matrix, ...]:
        """Computes one [rows, out] matrix per item, in the item's dtype: base + delta, or the delta.

        Raises RequestInvalid for ids or experts that there are not; then nothing was written. Raises DeviceLost.
        """
        assert isinstance(batch, CudaBatch)
        indices = _checked_indices(batch.sites)

        def compute() -> None:
            lane = self._lane()
            lane.compute(batch.slots, batch.sites, indices)
            self._lanes.append(lane)  # one that has failed is not used again

        self._asked(compute)
        return batch.outputs

    def matches(self, slot: SlotId, weights: HostAdapter) -> bool:
        """Whether the slot is, bit for bit, what a fill with `weights` writes (invariant I1)."""
        assert self._slots is not None
        shape = self._slots.model, self.max_rank
        return slot_holds(slot, self._arrays, self._parts[slot], shape, host_tensors(weights))

    @property
    def _arrays(self) -> Mapping[str, LeafArrays]:
        assert self._slots is not None
        return self._slots.arrays

    def _lane(self) -> Lane:
        assert self._slots is not None
        try:
            return self._lanes.pop()
        except IndexError:
            return Lane(self._machine, self._slots)

    def _asked(self, work: Callable[[], None]) -> None:
        """Does work on the GPU. Raises DeviceLost if it is lost, or is found to be."""
        if self.lost:
            raise DeviceLost(self.lost)
        try:
            work()
        except RuntimeError as error:
            if not self._machine.is_lost():
                raise
            self.lost = str(error) or type(error).__name__
            for tell in tuple(self.when_lost):
                tell()
            raise DeviceLost(self.lost) from error

    def _site_rows(self, index: int, item: ForwardItem, used: Sequence[int], of: tuple[int, int]) -> SiteRows:
        """The item's tensors; `of` is how many rows there are, and which rank's they are."""
        assert self._slots is not None
        (rows, rank), model = of, self._slots.model
        site = model.by_name[item.site]
        base, aux = to_tensor_or_none(item.base), to_tensor_or_none(item.aux)
        is_by_aux = site.kind != "linear"
        y = aux if base is None and not is_by_aux else base
        moved = self._moved(item.site, used, rank)
        if y is None and any(flag & GAIN for part in moved for flag in part.flags.values()):
            wanted = "the base model's output, which an adapter of the mapping needs here"
            raise RequestInvalid(f"items[{index}].aux", found="nothing", wanted=wanted)
        if item.out is not None:
            out = to_tensor(item.out)
        else:
            out = torch.empty(rows, model.rank_features(item.site)[1], dtype=DTYPES[item.dtype])
        count = {"embedding": site.in_features, "experts": site.experts}.get(site.kind, 0)
        x, aux = to_tensor_or_none(item.x), aux if is_by_aux else None
        return SiteRows(item.site, rank, x, base, aux, y, out, count, moved)

    def _moved(self, site: str, used: Sequence[int], rank: int) -> list[Moved]:
        """The parts of a site whose used slots have vectors."""
        assert self._slots is not None
        model, found, start = self._slots.model, [], 0
        for leaf in (model.leaves[index] for index in model.leaves_of[site]):
            arrays = self._slots.arrays[leaf.name].of_rank(model, leaf, rank)
            stop = start + arrays.b.shape[-1]
            parts = {slot: part[0] for slot in used if (part := self._parts[slot].get(leaf.name))}
            flags = {slot: flags for slot, part in parts.items() if (flags := flags_of(part, leaf, rank))}
            if flags and arrays.vectors is not None:
                found.append(Moved(slice(start, stop), arrays.vectors, flags))
            start = stop
        return found


def _checked_indices(sites: Sequence[SiteRows]) -> dict[int, Tensor]:
    """Private copies of what aux says of tokens and experts now, by the site's index. Raises RequestInvalid."""
    indices = {index: site.aux.clone() for index, site in enumerate(sites) if site.aux is not None}
    for index, found in indices.items():
        count = sites[index].index_count
        for extreme in map(int, torch.aminmax(found)) if len(found) else ():
            if not 0 <= extreme < count:
                raise RequestInvalid(f"items[{index}].aux", found=extreme, wanted=f"0 to {count - 1}")
    return indices
