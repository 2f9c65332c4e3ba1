"""The sidecar's slots in this process: the file of one epoch, mapped for reading, with the words that guard it.

Invariant: nothing can be written through it, and it stays mapped for as long as a tensor over it is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from slotcar.shm import region, slots
from slotcar.shm.slots import PART, WORD, BadSlotsFile, SlotsGeometry
from slotcar.v1 import engine_service_pb2, model_pb2
from slotcar_kernels.buffers import DTYPES
from slotcar_kernels.guard import Guard, GuardedForward, Watch, Words, WriterWords

from slotcar_client.convert import DTYPE_NAMES
from slotcar_client.errors import AuditFailed, ModelUnknown
from slotcar_client.transports.connection import Connection

# Each site of the model with its index in it.
Sites: TypeAlias = dict[str, tuple[int, model_pb2.Site]]

_PART_WORDS = PART.size // 4  # rank, then scale


class Parts(NamedTuple):
    """Rank and scale by slot and site, [S, N]; zeros for slots that were not read."""

    ranks: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    scales: np.ndarray[tuple[int, ...], np.dtype[np.float32]]


class SharedSlots:
    """What one connection of the direct plane gave. One thread at a time uses it."""

    def __init__(self, connection: Connection, opened: engine_service_pb2.SessionOpened) -> None:
        """Raises ModelUnknown, or AuditFailed when the file is not the one of this server, model and epoch."""
        assert connection.slots is not None, "it was asked for the direct plane"
        geometry = _geometry(opened)
        try:
            geometry.check(memoryview(connection.slots), connection.epoch)
        except BadSlotsFile as error:
            raise AuditFailed(str(error)) from error
        self.connection = connection
        self.sites: Sites = {site.name: (index, site) for index, site in enumerate(opened.model_spec.sites)}
        self._geometry = geometry
        self._words: Words = np.frombuffer(connection.slots, np.uint64, geometry.parts_offset // WORD.size)
        shape = geometry.slots, len(self.sites), _PART_WORDS
        self._parts = np.frombuffer(connection.slots, np.uint32, math.prod(shape), geometry.parts_offset).reshape(shape)
        self._weights = torch.frombuffer(connection.slots, dtype=DTYPES[geometry.dtype], offset=geometry.weights_offset)
        shared: Words = np.frombuffer(connection.region, np.uint64, connection.geometry.arena_offset // WORD.size)
        words = WriterWords(
            epoch=_at(self._words, slots.EPOCH_OFFSET, 2),
            slots_closed=_at(self._words, slots.CLOSED_OFFSET),
            region_closed=_at(shared, region.CLOSED_OFFSET),
            mod_generations=_at(self._words, slots.MODS_OFFSET, geometry.slots),
        )
        self.watch = Watch(words, connection.epoch.encode("ascii"), connection.link.fileno())
        self.uses = Uses(_at(shared, connection.geometry.uses_offset, 4 * connection.geometry.uses).reshape(-1, 4))

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
        """The parts of these slots, zeros for the others; right as long as the guard finds nothing changed.

        Raises Changed, or AuditFailed for a rank that there cannot be.
        """
        shape = self._parts.shape[:2]
        parts = Parts(np.zeros(shape, np.int64), np.zeros(shape, np.float32))
        guard.begin(0)
        words = self._parts[used]
        guard.end()
        parts.ranks[used], parts.scales[used] = words[:, :, 0], words[:, :, 1].view(np.float32)
        highest = int(parts.ranks.max(initial=0))
        if highest > self._geometry.max_rank:
            raise AuditFailed(
                f"the slots file says rank {highest}, the server at most {self._geometry.max_rank}",
                found=highest,
                wanted=self._geometry.max_rank,
            )
        return parts

    def forward(self, sites: Sequence[str], dtype: torch.dtype) -> GuardedForward:
        """At sites that share an input of that dtype. Raises KeyError for a site that is not there, or ValueError."""
        arrays = {}
        for index, site in map(self.sites.__getitem__, sites):
            a = self._array(self._geometry.a_offsets[index], site.in_features)
            arrays[index] = a, self._array(self._geometry.b_offsets[index], site.out_features)
        return GuardedForward(dtype, arrays)

    def _array(self, offset: int, features: int) -> torch.Tensor:
        """[S, R, features]: the same place in each slot."""
        geometry, size = self._geometry, self._weights.itemsize
        shape = (geometry.slots, geometry.max_rank, features)
        return self._weights.as_strided(shape, (geometry.slot_bytes // size, features, 1), offset // size)


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


def _geometry(opened: engine_service_pb2.SessionOpened) -> SlotsGeometry:
    if not opened.HasField("model_spec"):
        raise ModelUnknown(
            "the server knew no model when the session was opened: open it with a model_spec, or once more now"
        )
    server = opened.server
    features = [(site.in_features, site.out_features) for site in opened.model_spec.sites]
    return SlotsGeometry(server.slots, server.max_rank, DTYPE_NAMES[server.slot_dtype], features)


def _at(words: Words, offset: int, count: int = 1) -> Words:
    start = offset // WORD.size
    return words[start : start + count]
