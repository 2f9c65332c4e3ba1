"""The sidecar's slots in this process: the file of one epoch, mapped for reading, with the words that guard it.

Invariant: nothing can be written through it, and it stays mapped for as long as a tensor over it is used. The weights
are in it, or in the memory of a GPU, which is mapped for reading where the driver can do that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from slotcar.shm import region, slots
from slotcar.shm.slots import PART, WORD, BadSlotsFile, GpuPlace, SlotsGeometry
from slotcar.v1 import engine_service_pb2
from slotcar_kernels.buffers import DTYPES
from slotcar_kernels.forward import PartSlots
from slotcar_kernels.guard import Guard, GuardedForward, Watch, Words, WriterWords
from slotcar_kernels.sites import SiteSlots

from slotcar_client.convert import DTYPE_NAMES
from slotcar_client.errors import AuditFailed, ModelUnknown, RequestInvalid
from slotcar_client.sites import rank_sites
from slotcar_client.transports.connection import Connection
from slotcar_client.transports.gpus import GpuSlots, map_slots
from slotcar_client.transports.leaves import Leaf, RankLeaves, leaf_shapes, leaves_by_site

Integers: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.int64]]"

_PART_WORDS = PART.size // 4  # rank, scale, flags


class Parts(NamedTuple):
    """What slots say of each part: ranks, scales and flags [slots, P], of the slots in `used`, which are in order."""

    used: tuple[int, ...]
    ranks: Integers
    scales: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
    flags: Integers

    def rows(self, slots: Sequence[int]) -> list[int]:
        """Where these slots are."""
        return list(map(self.used.index, slots))

    def by_slot(self, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], slots: int) -> list[int | float]:
        """Values [used, parts of one leaf] of all slots, one slot after the other, zeros for those not used."""
        spread = np.zeros((slots, values.shape[1]), values.dtype)
        spread[list(self.used)] = values
        return spread.reshape(-1).tolist()


class LeafView(NamedTuple):
    """One leaf of every slot as a rank sees it, for PartSlots; `parts` is where its parts are among those of a slot."""

    leaf: Leaf
    at: RankLeaves
    parts: slice
    a: torch.Tensor
    b: torch.Tensor
    vectors: torch.Tensor | None


class SharedSlots:
    """What one connection of the direct plane gave. One thread at a time uses it."""

    def __init__(self, connection: Connection, opened: engine_service_pb2.SessionOpened) -> None:
        """Raises ModelUnknown, or AuditFailed when the file is not the one of this server, model and epoch, and
        RequestInvalid when the weights are on a GPU and this process cannot compute from there.
        """
        assert connection.slots is not None, "it was asked for the direct plane"
        geometry = _geometry(opened, on_gpu=connection.weights is not None)
        try:
            geometry.check(connection.slots, connection.epoch)
            place = GpuPlace.read(connection.slots, geometry) if geometry.on_gpu else None
        except BadSlotsFile as error:
            raise AuditFailed(str(error)) from error
        self.connection = connection
        self.sites = rank_sites(opened.model_spec)
        self.leaves = leaves_by_site(opened.model_spec)
        self._ranks = max(opened.model_spec.tensor_parallel, 1)
        self._geometry = geometry
        self._words: Words = np.frombuffer(connection.slots, np.uint64, geometry.parts_offset // WORD.size)
        shape = geometry.slots, geometry.parts, _PART_WORDS
        self._parts = np.frombuffer(connection.slots, np.uint32, math.prod(shape), geometry.parts_offset).reshape(shape)
        self.gpu: GpuSlots | None = None
        if place is not None and connection.weights is not None:
            self.gpu = map_slots(connection.weights, place)
            memory = self.gpu.bytes
        else:
            memory = torch.frombuffer(connection.slots, dtype=torch.uint8, offset=geometry.weights_offset)
        self._weights, self._vectors = memory.view(DTYPES[geometry.dtype]), memory.view(torch.float32)
        shared: Words = np.frombuffer(connection.region, np.uint64, connection.geometry.arena_offset // WORD.size)
        words = WriterWords(
            epoch=_at(self._words, slots.EPOCH_OFFSET, 2),
            slots_closed=_at(self._words, slots.CLOSED_OFFSET),
            region_closed=_at(shared, region.CLOSED_OFFSET),
            mod_generations=_at(self._words, slots.MODS_OFFSET, geometry.slots),
        )
        self.watch = Watch(words, connection.epoch.encode("ascii"), connection.link.fileno())
        self.uses = Uses(_at(shared, connection.geometry.uses_offset, 4 * connection.geometry.uses).reshape(-1, 4))

    def close(self) -> None:
        """Every unit is refused from now on, also one under way. The memory of a GPU goes at once. Idempotent."""
        self.watch.close()
        if self.gpu is not None:
            self.gpu.memory.release()

    @property
    def generation(self) -> int:
        """Of the newest layout."""
        return int(self._words[slots.GENERATION_OFFSET // WORD.size])

    def changed_after(self, generation: int) -> frozenset[int]:
        """The slots that began to change after it."""
        mods = self.watch.words.mod_generations.tolist()
        return frozenset(slot for slot, mod in enumerate(mods) if mod > generation)

    def guard(self, used: Sequence[int], generation: int) -> Guard:
        """Of a mapping that uses these slots. Raises AuditFailed when there are none of these numbers."""
        try:
            return Guard(self.watch, used, generation)
        except ValueError as error:
            raise AuditFailed(str(error)) from error

    def parts(self, guard: Guard, used: Sequence[int]) -> Parts:
        """The parts of these slots; right as long as the guard finds nothing changed.

        Raises Changed, or AuditFailed for a rank that there cannot be.
        """
        guard.begin(0)
        words = self._parts[used]
        guard.end()
        ranks, scales, flags = words[:, :, 0], words[:, :, 1].view(np.float32), words[:, :, 2]
        parts = Parts(tuple(used), ranks.astype(np.int64), scales, flags.astype(np.int64))
        highest = int(parts.ranks.max(initial=0))
        if highest > self._geometry.max_rank:
            raise AuditFailed(
                f"the slots file says rank {highest}, the server at most {self._geometry.max_rank}",
                found=highest,
                wanted=self._geometry.max_rank,
            )
        return parts

    @property
    def slot_count(self) -> int:
        return self._geometry.slots

    @property
    def part_slices(self) -> list[slice]:
        """Where each leaf's parts are among those of a slot, in the order of the leaves."""
        geometry = self._geometry
        return [
            slice(first, first + leaf.parts) for first, leaf in zip(geometry.first_parts, geometry.leaves, strict=True)
        ]

    def forward(self, sites: Sequence[str], dtype: torch.dtype, rank: int) -> GuardedForward:
        """At plain sites that share an input of that dtype. Raises ValueError as GuardedForward does."""
        views = [view for site in sites for view in self.views(site, rank)]
        return GuardedForward(dtype, {view.parts.start: (view.a, view.b) for view in views})

    def part_slots(self, site: str, parts: Parts, rank: int) -> list[PartSlots]:
        """Any site as a mapping's rows see it. Raises RequestInvalid for a rank that the model does not have."""
        return [self._part_slots(view, parts) for view in self.views(site, rank)]

    def views(self, site: str, rank: int) -> list[LeafView]:
        """Any site as a rank sees it. Raises RequestInvalid for a rank that the model does not have."""
        return [self._view(leaf, self._at(rank)) for leaf in self.leaves[site]]

    def sites_with_vectors(self, parts: Parts) -> frozenset[str]:
        """Those at which one of the slots has some."""
        if not parts.flags.any():
            return frozenset()
        firsts = {
            site: [self._geometry.first_parts[leaf.number] for leaf in each] for site, each in self.leaves.items()
        }
        return frozenset(site for site, numbers in firsts.items() if parts.flags[:, numbers].any())

    def _at(self, rank: int) -> RankLeaves:
        if self._ranks > 1 and rank >= self._ranks:
            message = f"rank is {rank}, the model has {self._ranks}"
            raise RequestInvalid(message, field="rank", found=rank, wanted=f"below {self._ranks}")
        return RankLeaves(rank if self._ranks > 1 else 0, self._ranks)

    def _part_slots(self, view: LeafView, parts: Parts) -> PartSlots:
        ranks, scales, flags = (
            parts.by_slot(values[:, view.parts], self._geometry.slots)
            for values in (parts.ranks, parts.scales, parts.flags)
        )
        slots = SiteSlots(view.a, view.b, [int(rank) for rank in ranks], scales, view.leaf.shape.embedding)
        if view.vectors is None:
            return PartSlots(slots)
        return PartSlots(slots, view.vectors, [view.at.flags(view.leaf, int(value)) for value in flags])

    def _view(self, leaf: Leaf, at: RankLeaves) -> LeafView:
        geometry, shape = self._geometry, leaf.shape
        experts = (shape.experts,) if shape.experts else ()
        rank_by_in = geometry.max_rank, shape.in_features
        a_shape = *experts, *(rank_by_in[::-1] if shape.embedding else rank_by_in)
        b_shape = *experts, geometry.max_rank, shape.out_features
        a = self._array(self._weights, geometry.a_offsets[leaf.number], a_shape)
        b = self._array(self._weights, geometry.b_offsets[leaf.number], b_shape)
        vectors = None
        if not shape.experts:
            both = self._array(self._vectors, geometry.v_offsets[leaf.number], (2, shape.out_features))
            vectors = at.vectors(leaf, both)
        first = geometry.first_parts[leaf.number]
        return LeafView(leaf, at, slice(first, first + shape.parts), at.a(leaf, a), at.b(leaf, b), vectors)

    def _array(self, memory: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """[S, *shape]: the same place in each slot."""
        geometry, size = self._geometry, memory.itemsize
        strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
        return memory.as_strided((geometry.slots, *shape), (geometry.slot_bytes // size, *strides), offset // size)


class Uses:
    """The words in which the sidecar sees which mappings compute: the newest mappings have one each.

    A guard whose use went to a newer one has None.
    """

    def __init__(self, words: Words) -> None:
        self._words = words
        self._guards: list[Guard | None] = [None] * len(words)
        self._next = 0

    def give(self, guard: Guard) -> None:
        """The guard counts its units in the use that was given away longest ago."""
        if not self._guards:
            return
        index, self._next = self._next, (self._next + 1) % len(self._guards)
        before, self._guards[index] = self._guards[index], guard
        if before is not None:
            before.use = None
        guard.use = self._words[index]


def _geometry(opened: engine_service_pb2.SessionOpened, *, on_gpu: bool) -> SlotsGeometry:
    if not opened.HasField("model_spec"):
        raise ModelUnknown(
            "the server knew no model when the session was opened: open it with a model_spec, or once more now"
        )
    server = opened.server
    shapes = leaf_shapes(opened.model_spec)
    return SlotsGeometry(server.slots, server.max_rank, DTYPE_NAMES[server.slot_dtype], shapes, on_gpu)


def _at(words: Words, offset: int, count: int = 1) -> Words:
    start = offset // WORD.size
    return words[start : start + count]
