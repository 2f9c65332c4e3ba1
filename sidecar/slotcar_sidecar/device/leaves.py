"""What each leaf of a slot is to hold of an adapter: the one place that a fill and its check (I1) take it from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from slotcar.shm.slots import BIAS, GAIN, SlotsGeometry, shard
from slotcar_kernels.fill import SlotArray, fill_columns, fill_slot
from torch import Tensor

from slotcar_sidecar.core.adapter import SiteLora
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.placement import Placement
from slotcar_sidecar.core.site import Leaf
from slotcar_sidecar.device.weights import HostTensors, folded_b, padded_rank, vectors_of

__all__ = ["NOTHING", "LeafArrays", "LeafValues", "Part", "SlotParts", "flags_of", "leaf_values", "parts_of"]
__all__ += ["slot_holds"]


_BITS = {4: torch.int32, 2: torch.int16}


class Part(NamedTuple):
    """What the slots file says of one leaf, or of one of its experts; `flags` are its vectors."""

    rank: int
    scale: float
    flags: int = 0


# Of one slot: the parts of each leaf that the adapter targets, one for each expert, by the leaf's name.
SlotParts = Mapping[str, tuple[Part, ...]]
NOTHING = Part(0, 0.0)


class LeafValues(NamedTuple):
    """A [rank, in] and B transposed [rank, out] of each expert, None where there is none; gain and bias [out]."""

    a: Sequence[Tensor | None]
    b: Sequence[Tensor | None]
    gain: Tensor | None = None
    bias: Tensor | None = None


class LeafArrays(NamedTuple):
    """What all slots have for one leaf: A [S, E, R, in], of an embedding [S, tokens, R]; B transposed [S, E, R, out];
    vectors [S, 2, out] in float32. Leaves of other than experts have no dimension E, and those of experts no vectors.
    """

    a: Tensor
    b: Tensor
    vectors: Tensor | None
    is_embedding: bool

    @classmethod
    def of_slots(cls, memory: tuple[Tensor, Tensor], geometry: SlotsGeometry, index: int) -> LeafArrays:
        """The same places in each slot, of one leaf; `memory` is that of the slots, in their dtype and in float32."""
        shape = geometry.leaves[index]
        weights, vectors = memory
        experts = (shape.experts,) if shape.experts else ()

        def at(of: Tensor, offset: int, *shape: int) -> Tensor:
            strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
            step = geometry.slot_bytes // of.itemsize
            return of.as_strided((geometry.slots, *shape), (step, *strides), offset // of.itemsize)

        rows = (shape.in_features, geometry.max_rank) if shape.embedding else (geometry.max_rank, shape.in_features)
        return cls(
            at(weights, geometry.a_offsets[index], *experts, *rows),
            at(weights, geometry.b_offsets[index], *experts, geometry.max_rank, shape.out_features),
            None if experts else at(vectors, geometry.v_offsets[index], 2, shape.out_features),
            shape.embedding,
        )

    def of_rank(self, model: ModelSpec, leaf: Leaf, rank: int) -> LeafArrays:
        """What a rank computes with."""
        how, ranks = leaf.site.shard, model.tensor_parallel
        if how == "none" or ranks == 1:
            return self
        if how == "row":
            start, stop = shard(leaf.in_features, rank, ranks)
            return self._replace(a=self.a[..., start:stop])
        start, stop = shard(leaf.out_features, rank, ranks, leaf.part.copies)
        vectors = None if self.vectors is None else self.vectors[..., start:stop]
        return self._replace(b=self.b[..., start:stop], vectors=vectors)

    def fill(self, slot: int, padded: int, values: LeafValues) -> None:
        """Writes A and B up to the padded rank, and the vectors that there are."""
        arrays = list(map(SlotArray, self._rows(self.b[slot], padded), values.b))
        if self.is_embedding:
            fill_columns(self.a[slot, :, :padded], values.a[0])
        else:
            arrays += map(SlotArray, self._rows(self.a[slot], padded), values.a)
        fill_slot(arrays)
        if self.vectors is not None:
            for row, vector in zip(self.vectors[slot], (values.gain, values.bias), strict=True):
                if vector is not None:
                    row.copy_(vector)

    def written(self, slot: int, padded: int, values: LeafValues) -> Iterator[tuple[Tensor, Tensor | None]]:
        """What a fill has written, each with what it was given: [padded, …] and [rank, …]."""
        yield from zip(self._rows(self.b[slot], padded), values.b, strict=True)
        rows = [self.a[slot, :, :padded].t()] if self.is_embedding else self._rows(self.a[slot], padded)
        yield from zip(rows, values.a, strict=True)
        if self.vectors is not None:
            for row, vector in zip(self.vectors[slot], (values.gain, values.bias), strict=True):
                if vector is not None:
                    yield row[None], vector[None]

    def poison(self, slot: int, padded: int, values: LeafValues, poison: float) -> None:
        """Writes `poison` where a fill has not written."""
        self.b[slot, ..., padded:, :].fill_(poison)
        (self.a[slot, :, padded:] if self.is_embedding else self.a[slot, ..., padded:, :]).fill_(poison)
        if self.vectors is not None:
            for row, vector in zip(self.vectors[slot], (values.gain, values.bias), strict=True):
                if vector is None:
                    row.fill_(poison)

    @staticmethod
    def _rows(of_slot: Tensor, padded: int) -> list[Tensor]:
        """[padded, features] of each expert."""
        return [rows[:padded] for rows in (of_slot if of_slot.dim() == 3 else of_slot[None])]


def parts_of(model: ModelSpec, weights: HostTensors) -> SlotParts:
    """Rank, scale and flags at each leaf that the adapter targets."""
    parts: dict[str, list[Part]] = {}
    for part, place, index in _placed(model, weights):
        leaf = model.leaves[index]
        flags = (GAIN if part.has_gain else 0) | (BIAS if part.has_bias else 0)
        mine = parts.setdefault(leaf.name, [NOTHING] * leaf.experts)
        for expert in _experts(leaf, place):
            mine[expert] = Part(part.rank, part.scale, flags)
    return {name: tuple(mine) for name, mine in parts.items()}


def flags_of(part: Part, leaf: Leaf, rank: int) -> int:
    """The part's flags for a rank: only the first adds the bias where the engine sums what ranks compute."""
    return part.flags & ~BIAS if leaf.site.shard == "row" and rank else part.flags


def leaf_values(model: ModelSpec, weights: HostTensors) -> Iterator[tuple[Leaf, LeafValues]]:
    """Each leaf of the model with what the adapter has for it; what is made for one leaf lives until the next."""
    placed: dict[int, list[tuple[SiteLora, Placement]]] = {}
    for part, place, index in _placed(model, weights):
        placed.setdefault(index, []).append((part, place))
    for index, leaf in enumerate(model.leaves):
        a: list[Tensor | None] = [None] * leaf.experts
        b: list[Tensor | None] = [None] * leaf.experts
        gain = bias = None
        for part, place in placed.get(index, ()):
            rows = _rows_of(leaf, place)
            gain, bias = (None if vector is None else vector[rows] for vector in vectors_of(weights, part))
            for expert in _experts(leaf, place):
                a[expert], b[expert] = _matrices(weights, part, expert, rows)
        yield leaf, LeafValues(a, b, gain, bias)


def slot_holds(
    slot: int,
    arrays: Mapping[str, LeafArrays],
    parts: SlotParts,
    shape: tuple[ModelSpec, int],
    weights: HostTensors,
) -> bool:
    """Whether a slot is, bit for bit, what a fill with `weights` writes (I1); `shape` is the model and largest rank."""
    model, max_rank = shape
    padded = padded_rank(weights.adapter, max_rank)
    return parts == parts_of(model, weights) and all(
        _holds(rows, wanted)
        for leaf, values in leaf_values(model, weights)
        for rows, wanted in arrays[leaf.name].written(slot, padded, values)
    )


def _holds(slot_rows: Tensor, values: Tensor | None) -> bool:
    """Whether the first rows are `values`, cast, and the others zero, all bit for bit."""
    wanted = torch.zeros_like(slot_rows)
    if values is not None:
        wanted[: len(values)].copy_(values)
    bits = _BITS[slot_rows.element_size()]
    return torch.equal(slot_rows.view(bits), wanted.view(bits))


def _placed(model: ModelSpec, weights: HostTensors) -> Iterator[tuple[SiteLora, Placement, int]]:
    """Each part with each leaf that it has weights for, by its index."""
    for part in weights.adapter.parts:
        place = model.place(part.site, part.kind)
        assert place is not None, f"{part.site} was checked to be in the model"
        for index in place.parts:
            yield part, place, model.leaves_of[place.site.name][index]


def _experts(leaf: Leaf, place: Placement) -> range:
    return range(leaf.experts) if place.expert is None else range(place.expert, place.expert + 1)


def _rows_of(leaf: Leaf, place: Placement) -> slice:
    """Which outputs of the adapter's module are the leaf's: a packed module has those of all parts in their order."""
    if place.part is not None:
        return slice(0, leaf.out_features)
    modules = leaf.site.modules
    start = sum(module.out_features for module in modules[: modules.index(leaf.part)])
    return slice(start, start + leaf.out_features)


def _matrices(weights: HostTensors, part: SiteLora, expert: int, rows: slice) -> tuple[Tensor, Tensor]:
    """A and B transposed of one expert, as PEFT views those of a module that has all of them."""
    a, b = weights.a[part.site], folded_b(weights, part)[rows]
    if part.kind != "experts":
        return a, b.t()
    a = a.view(part.experts, part.rank, part.in_features)[expert]
    return a, b.view(len(b), part.rank, part.experts)[..., expert].t().contiguous()
