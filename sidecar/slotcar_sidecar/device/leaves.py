"""What each leaf of a slot is to hold of an adapter: the one place that a fill and its check (I1) take it from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from slotcar.shm.slots import BIAS, GAIN
from slotcar_kernels.fill import SlotArray, fill_columns, fill_slot
from torch import Tensor

from slotcar_sidecar.core.adapter import SiteLora
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.placement import Placement
from slotcar_sidecar.core.site import Leaf
from slotcar_sidecar.device.weights import HostTensors, folded_b, vectors_of

__all__ = ["NOTHING", "LeafArrays", "LeafValues", "Part", "SlotParts", "leaf_values", "parts_of"]


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
