"""Learns which sites of a model share an input, so that one Forward asks for all of them.

q, k and v get the very same tensor object, and so do gate and up. The first pass notes it; from then on the first site
of such a group asks for all, and each sibling takes its delta only if it gets the same object with the same contents.
Invariant: a delta that is handed out was computed for the x and the mapping that it is handed out for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from slotcar_client.values import Mapping

# Asks for the deltas of some sites with one input.
Ask = Callable[[Mapping, Sequence[str], torch.Tensor], dict[str, torch.Tensor]]


class _Input:
    """One tensor as it was when it was asked for; it is not kept alive."""

    def __init__(self, x: torch.Tensor, mapping: Mapping) -> None:
        self._tensor = weakref.ref(x)
        self._mapping = mapping
        # Inference tensors do not count their versions: only their contents tell.
        self._version = None if x.is_inference() else x._version
        self._contents = x.clone() if x.is_inference() else None

    def is_now(self, x: torch.Tensor, mapping: Mapping) -> bool:
        """`x` is the same object with the same contents, asked for under the same mapping."""
        if self._tensor() is not x or self._mapping is not mapping:
            return False
        if self._contents is not None:
            return torch.equal(self._contents, x)
        return self._version == x._version


class SharedInputs:
    """Deltas by site, with as few questions as the model's structure allows. For one thread."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._siblings: dict[str, list[str]] = {}
        self._input: _Input | None = None
        self._leader = ""
        self._waiting: dict[str, torch.Tensor] = {}

    def delta(self, site: str, x: torch.Tensor, mapping: Mapping, wanted: Callable[[str], bool]) -> torch.Tensor:
        """The delta of `site` for `x`; `wanted` says which siblings are worth asking for with it."""
        if self._input is not None and self._input.is_now(x, mapping):
            if site in self._waiting:
                return self._waiting.pop(site)
            group = self._siblings.setdefault(self._leader, [])
            if site != self._leader and site not in group:
                group.append(site)
            return self._ask(mapping, [site], x)[site]
        self.forget()
        sites = [site, *(sibling for sibling in self._siblings.get(site, ()) if wanted(sibling))]
        seen = _Input(x, mapping)
        deltas = self._ask(mapping, sites, x)
        delta = deltas.pop(site)
        self._input, self._leader, self._waiting = seen, site, deltas
        return delta

    def forget(self) -> None:
        """Drops what was not taken; what was learned stays."""
        self._input, self._waiting = None, {}
