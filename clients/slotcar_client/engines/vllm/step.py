"""The steps of one engine: a pass of the model is repeated until it was right, or fails the requests that it cannot be
right for.

Invariants: what leaves a step was computed by a pass without a noted failure, or its request is reported as failed or
postponed. Every rank repeats the same passes: whether one failed is agreed on after it, never inside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from slotcar.v1 import model_pb2

import slotcar_client
from slotcar_client.engines.vllm.adapters import EngineAdapters
from slotcar_client.engines.vllm.deltas import Deltas
from slotcar_client.engines.vllm.opening import joined, opened
from slotcar_client.engines.vllm.placement import Placed, Placement
from slotcar_client.engines.vllm.ranks import Ranks
from slotcar_client.engines.vllm.requests import plain_name
from slotcar_client.engines.vllm.rows import Rows, Scheduled, rows_of
from slotcar_client.engines.vllm.settings import Settings
from slotcar_client.errors import AdapterUnsupported, InternalError, SlotcarError
from slotcar_client.session_base import MappedSession
from slotcar_client.values import Mapping

T = TypeVar("T")

_MAX_REPEATS = 3
_ELSEWHERE = "another rank could not compute its part"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_loras`: distinct adapters in a step; `most`: versions that are kept beside those in use.

    `repeatable`: a pass may be computed twice, as it changes nothing but its rows' places in the KV cache.
    """

    max_loras: int
    most: int
    repeatable: bool = True


@dataclass(slots=True)
class Marks:
    """What a step says of its requests: why some failed, and which had no slot; how many adapters may be in a step."""

    failed: dict[str, str] = field(default_factory=dict)
    postponed: frozenset[str] = frozenset()
    slots: int | None = None


class Steps:
    """One rank of one engine. `deltas` are what its layers add."""

    def __init__(self, settings: Settings, ranks: Ranks, limits: Limits, deltas: Deltas) -> None:
        self._settings = settings
        self._ranks = ranks
        self._limits = limits
        self._deltas = deltas
        self.client = slotcar_client.connect(settings.target)
        self._session: MappedSession | None = None
        self._placement: Placement | None = None
        self._mapping: Mapping | None = None
        self._adapters = EngineAdapters(ranks, None, limits.most)
        self._batch: Sequence[Scheduled] = ()
        self._mapped: tuple[str | None, ...] | None = None
        self._lost: dict[str, SlotcarError] = {}
        self._postponed: frozenset[str] = frozenset()
        self._repeats = 0
        self._refused: dict[str, SlotcarError] = {}
        self._behind: SlotcarError | None = None

    def open(self, spec: model_pb2.ModelSpec) -> None:
        """Opens the engine's session, or joins it. Raises SlotcarError: the engine cannot start."""
        session_id = self._ranks.decided(lambda: self._open(spec))
        if self._ranks.rank > 0:
            self._session = joined(self.client, session_id, self._settings, self._ranks.rank)
        assert self._session is not None
        _log.info(
            "slotcar at %s by %s: %s", self._settings.target, self._session.transport, self._session.transport_reason
        )

    def _open(self, spec: model_pb2.ModelSpec) -> str:
        session = opened(self.client, spec, self._settings, self._ranks.size)
        self._session = session
        self._placement = Placement(self.client, session, self._settings, self._limits.max_loras)
        self._adapters = EngineAdapters(self._ranks, self._placement.keeper, self._limits.most)
        return session.session_id

    @property
    def adapters(self) -> EngineAdapters:
        return self._adapters

    def keep(self, ref: str) -> None:
        """Asks for the name of a version to stay resident, for everybody. Raises SlotcarError."""

        def kept() -> None:
            self.client.prefetch([ref])  # only what is resident can be kept so
            self.client.keep(plain_name(ref))

        self._ranks.decided(kept)

    def close(self) -> None:
        """Ends the session, with all that it pins and holds. Idempotent."""
        self.client.close()

    # A step

    def use(self, batch: Sequence[Scheduled], refused: dict[str, SlotcarError]) -> None:
        """A step begins, with these requests in the order of their rows; `refused` have no version, and why."""
        self._batch, self._refused, self._lost, self._postponed, self._repeats = batch, refused, {}, frozenset(), 0
        self._place(repair=False)

    def passed(self, compute: Callable[[], T]) -> T:
        """What a pass computes, repeated until it is right for every row that is still served."""
        result = compute()
        while self._is_serving and self._ranks.any(self._failure is not None):
            failure = self._failure or InternalError(_ELSEWHERE)
            if self._ranks.rank == 0:
                _log.warning("a pass of the model failed with %s: %s", failure.reason, failure.message)
            self._repeats += 1
            if self._repeats > _MAX_REPEATS or not self._limits.repeatable:
                self._lose(failure)  # the rows of the base model are right in any pass
                return result
            self._place(repair=True)
            result = compute()
        return result

    def without_head(self, compute: Callable[[], T], asking: Collection[str]) -> T:
        """The base model's logits, for rows that are not those of the step: the prompts of the requests in `asking`.

        Those of them whose adapter has weights at the head are lost: nothing says whose rows these are.
        """
        error = AdapterUnsupported("the logits of a prompt can't be had with an adapter that has weights at the head")
        of_each = self._adapters.sites
        for request in self._batch:
            sites = of_each.get(request.ref or "", frozenset())
            at_head = sites is None or not sites.isdisjoint(self._deltas.heads)
            if request.request_id in asking and at_head:
                self._refused[request.request_id] = error
        with self._deltas.paused():
            return compute()

    def marks(self) -> Marks:
        """What there is to say of the requests of this step."""
        failed = self._refused | {
            request.request_id: self._lost[request.ref] for request in self._batch if request.ref in self._lost
        }
        postponed = frozenset(request.request_id for request in self._batch if request.ref in self._postponed)
        texts = {request: f"{error.reason}: {error.message}" for request, error in failed.items()}
        return Marks(texts, postponed, self._placement.slots() if self._placement is not None else None)

    def give_up(self) -> None:
        """A layer that failed before the pass, such as an embedding, is in what the pass starts from."""
        if self._is_serving and self._ranks.any(self._deltas.failure is not None):
            self._lose(self._deltas.failure or InternalError(_ELSEWHERE))

    @property
    def _failure(self) -> SlotcarError | None:
        return self._behind or self._deltas.failure

    @property
    def _is_serving(self) -> bool:
        return any(map(self._is_served, (request.ref for request in self._batch if request.ref is not None)))

    def _is_served(self, ref: str) -> bool:
        return ref not in self._lost and ref not in self._postponed

    def _lose(self, error: SlotcarError) -> None:
        """Every version of the step that is still served is lost."""
        refs = {request.ref for request in self._batch if request.ref is not None and self._is_served(request.ref)}
        self._lost |= dict.fromkeys(refs, error)
        self._mapped = None
        self._deltas.use_base()

    def _rows(self) -> Rows:
        return rows_of(self._batch, self._is_served)

    def _place(self, *, repair: bool) -> None:
        rows, self._behind = self._rows(), None
        if not rows.versions:
            self._deltas.use_base()
            return
        if repair or rows.refs != self._mapped:
            self._mapped = None
            try:
                placed = self._ranks.decided(partial(self._placed, rows, repair))
            except SlotcarError as error:
                self._lose(error)
                return
            self._lost |= placed.lost
            self._postponed |= placed.postponed
            rows = self._rows()
            if not rows.versions:
                self._deltas.use_base()
                return
            if not self._follow(placed):
                return
            self._mapped = rows.refs
        assert self._session is not None
        assert self._mapping is not None
        self._deltas.use(self._session, self._mapping, rows, self._adapters.sites)

    def _placed(self, rows: Rows, repair: bool) -> Placed:
        assert self._placement is not None
        return self._placement.place(rows, repair=repair)

    def _follow(self, placed: Placed) -> bool:
        """Sets the mapping that rank 0 has set, in its session. A failure is that of the next pass."""
        if self._placement is not None:
            self._mapping = self._placement.mapping
            return True
        assert self._session is not None
        try:
            if self._session.session_id != placed.session_id:
                self._session.close()
                self._session = joined(self.client, placed.session_id, self._settings, self._ranks.rank)
            self._mapping = self._session.set_mapping(placed.entries, load=True)
        except SlotcarError as error:
            self._deltas.use_base()
            self._behind = error
            return False
        return True
