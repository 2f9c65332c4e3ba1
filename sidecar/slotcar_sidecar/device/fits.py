"""Whether an adapter fits the slots, looked at once: a look at all values takes as long as a fill.

Invariant: what is remembered of host weights is forgotten with them.
"""

from __future__ import annotations

from weakref import WeakValueDictionary, finalize

from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.ports import HostAdapter
from slotcar_sidecar.device.weights import cast_warnings, check_range, host_tensors

__all__ = ["Fits"]


class Fits:
    """For slots of a model, a largest rank and a dtype."""

    def __init__(self, model: ModelSpec, max_rank: int, slot_dtype: str) -> None:
        self._model = model
        self._max_rank = max_rank
        self._slot_dtype = slot_dtype
        self._checked: WeakValueDictionary[int, HostAdapter] = WeakValueDictionary()
        self._losses: dict[int, tuple[str, ...]] = {}  # of what is checked

    def check(self, weights: HostAdapter) -> None:
        """Raises AdapterInvalid unless the adapter fits the model, and its values fit the slot dtype."""
        if self._checked.get(id(weights)) is weights:
            return
        weights.adapter.check_fits(self._model, self._max_rank)
        check_range(host_tensors(weights), self._slot_dtype)
        self._checked[id(weights)] = weights

    def losses(self, weights: HostAdapter) -> tuple[str, ...]:
        """What a cast to the slot dtype makes zero, for people. Raises what `check` raises."""
        self.check(weights)
        found = self._losses.get(id(weights))
        if found is None:
            found = self._losses[id(weights)] = cast_warnings(host_tensors(weights), self._slot_dtype)
            finalize(weights, self._losses.pop, id(weights), None)
        return found
