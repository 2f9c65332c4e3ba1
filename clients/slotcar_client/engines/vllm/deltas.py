"""Adds to the outputs of a step's layers what their rows' adapters add, through a session.

Invariants: what is added was computed with the digests of the mapping in use. A failure never leaves a layer: it is
noted, and from then on nothing is added, until a mapping is put in use again; so a pass without a noted failure is
right, and of one with it nothing may be used but the rows of the base model, which keep their bits always.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as ReadOnlyDict

import torch

from slotcar_client.engines.vllm.layers import Part
from slotcar_client.engines.vllm.rows import Rows
from slotcar_client.errors import InternalError, ShapeMismatch, SlotcarError
from slotcar_client.session_base import MappedSession
from slotcar_client.values import Mapping

# At which sites a version has weights; None: not known.
Sites = frozenset[str] | None

_log = logging.getLogger(__name__)


class Deltas:
    """What the layers of one model add in this step; for one thread."""

    def __init__(self) -> None:
        self.failure: SlotcarError | None = None
        self.heads: list[str] = []
        """The sites whose rows are those of the logits."""
        self._session: MappedSession | None = None
        self._mapping: Mapping | None = None
        self._rows = Rows()
        self._of_each: list[Sites] = []
        self._wanted: dict[int, tuple[Part, ...]] = {}

    def use(self, session: MappedSession, mapping: Mapping, rows: Rows, sites: ReadOnlyDict[str, Sites]) -> None:
        """The next passes are for these rows, the entries of `mapping`; `sites` has those of each version."""
        of_each = [sites.get(ref) for ref in rows.versions]
        if of_each != self._of_each:
            self._of_each, self._wanted = of_each, {}
        self._session, self._mapping, self._rows, self.failure = session, mapping, rows, None

    def use_base(self) -> None:
        """The next passes are the base model's."""
        self._mapping, self.failure = None, None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside of it, passes are the base model's."""
        mapping, self._mapping = self._mapping, None
        try:
            yield
        finally:
            self._mapping = mapping

    def add(self, layer: Layer, y: torch.Tensor, x: torch.Tensor) -> None:
        """y [rows, out] += the delta of each row at the layer's sites, for x [rows, in] or the ids of tokens."""
        if self._mapping is None or self.failure is not None:
            return
        parts = self._wanted.get(layer.number)
        if parts is None:
            parts = self._wanted[layer.number] = tuple(filter(self._has_weights, layer.parts))
        if not parts:
            return
        try:
            self._add(layer, parts, y, x)
        except SlotcarError as error:
            self.failure = error
        except Exception as error:  # nothing may leave a layer: other ranks wait in the next one
            _log.exception("a delta could not be computed")
            self.failure = InternalError(f"{type(error).__name__}: {error}")

    def _has_weights(self, part: Part) -> bool:
        """Whether a version of this step may have any at that site."""
        return any(sites is None or part.name in sites for sites in self._of_each)

    def _add(self, layer: Layer, parts: Sequence[Part], y: torch.Tensor, x: torch.Tensor) -> None:
        assert self._session is not None
        counts = self._rows.samples if layer.kind == "head" else self._rows.tokens
        rows = sum(counts)
        if len(x) < rows:
            raise ShapeMismatch(
                f"{parts[0].name} got {len(x)} rows, wanted {rows}", field="x", found=len(x), wanted=rows
            )
        if len(x) > rows:  # padding
            y, x = y[:rows], x[:rows]
        views = {part.name: y[:, part.start : part.stop] for part in parts}
        if layer.kind == "embedding":
            aux = {parts[0].name: x.reshape(-1)}
            sums = self._session.forward({}, counts, views, aux=aux, mapping=self._mapping)
        else:
            sums = self._session.forward(dict.fromkeys(views, x), counts, views, mapping=self._mapping)
        for name, view in views.items():
            view.copy_(sums[name])


class Layer:
    """Stands in a LoRA layer of vLLM for its stacked tensors: knows the sites and where their deltas come from.

    `number` names it in compiled graphs; kind: "linear", "embedding" or "head".
    """

    def __init__(self, deltas: Deltas, parts: Sequence[Part], kind: str) -> None:
        self.number = next(_numbers)
        self.parts = parts
        self.kind = kind
        self._deltas = deltas
        if kind == "head":
            deltas.heads.extend(part.name for part in parts)
        _layers[self.number] = self

    def add(self, y: torch.Tensor, x: torch.Tensor) -> None:
        self._deltas.add(self, y, x)


_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()


@torch.library.custom_op("slotcar::add_delta", mutates_args=("y",))
def add_delta(y: torch.Tensor, x: torch.Tensor, number: int) -> None:
    """`Layer.add` of the layer with that number, as an operator that compiled graphs call."""
    _layers[number].add(y, x)
