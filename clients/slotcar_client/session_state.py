"""What a session knows and how each of its calls goes, as plans: the logic of both faces, without any I/O.

Invariant: a tensor that a session hands out was computed with the digests of its mapping, as the server reported
them. A mapping that became stale is set again by digest, never by name; what cannot be set again is an error.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Mapping as ReadOnlyDict
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from slotcar.v1 import adapter_service_pb2, engine_service_pb2, model_pb2

from slotcar_client import convert, protocol
from slotcar_client.adapter_sites import AdapterSites, KnownSites
from slotcar_client.config import client_version
from slotcar_client.effects import Call, Forward, ForwardCall, Open, Plan, Stale, Use, Wait
from slotcar_client.entries import Entries, Entry, parse_entries
from slotcar_client.errors import (
    DeadlineExceeded,
    MappingNotFound,
    MappingReplaced,
    RequestInvalid,
    SessionNotFound,
    SlotcarError,
    VersionMismatch,
)
from slotcar_client.holds import Holds, Make
from slotcar_client.options import SessionOptions
from slotcar_client.protocol import HoldWish, MappingWish
from slotcar_client.recovery import MAX_STEPS, Patience, Step, delays, is_away, next_step, patiently
from slotcar_client.sites import ModelSites
from slotcar_client.values import Held, Mapping, ServerInfo

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
HeldT = TypeVar("HeldT", bound=Held)

DEFAULT_MAPPING_ID = 1
ROWS_MAPPING_ID = 2
RESUMED = "STREAM_ENDED"
HELD_AGAIN = "HOLD"
# The end of something does not wait as long as a call that somebody wants an answer to.
END_SECONDS = 5.0


class _Failure(NamedTuple):
    """How an attempt ended, and in which session."""

    error: SlotcarError
    opened: engine_service_pb2.SessionOpened


class SessionState:
    """One session. A method that returns a Plan does nothing before the plan is run."""

    def __init__(self, options: SessionOptions, clock: Callable[[], float]) -> None:
        self.options = options
        self.recoveries: Counter[str] = Counter()
        self._clock = clock
        self._opened: engine_service_pb2.SessionOpened | None = None
        self._mappings: dict[int, Mapping] = {}
        self._loading: set[int] = set()
        self._last_id: int | None = None
        self._holds = Holds(clock)
        # In which session the server knows what the caller did about its holds.
        self._settled: engine_service_pb2.SessionOpened | None = None
        self._sites = AdapterSites(self._recovered)
        self._model_sites = ModelSites()

    # What is known

    @property
    def opened(self) -> engine_service_pb2.SessionOpened:
        assert self._opened is not None
        return self._opened

    @property
    def session_id(self) -> str:
        return self.opened.session

    @property
    def server(self) -> ServerInfo:
        return convert.server_info(self.opened.server)

    @property
    def model_spec(self) -> model_pb2.ModelSpec | None:
        return self.opened.model_spec if self.opened.HasField("model_spec") else None

    @property
    def mapping(self) -> Mapping | None:
        """The mapping that `forward` uses by default."""
        return self._mappings.get(self._last_id) if self._last_id is not None else None

    def current(self, mapping: Mapping | None) -> Mapping:
        """The mapping as it is now, after re-maps. Raises MappingReplaced when it was replaced or released."""
        mapping_id = mapping.mapping_id if mapping is not None else self._last_id
        current = self._mappings.get(mapping_id) if mapping_id is not None else None
        if current is None:
            raise MappingReplaced("no mapping is set: call set_mapping first", mapping_id=mapping_id)
        if mapping is not None and (mapping.entries, mapping.row_counts) != (current.entries, current.row_counts):
            raise MappingReplaced(f"mapping {mapping_id} was replaced by another", mapping_id=mapping_id)
        return current

    # Life

    def open(self) -> Plan[None]:
        """Opens the session for the first time."""

        def attempt() -> Plan[None]:
            if self._opened is None:
                yield from self._open()
            else:  # it is only that the transport could not be had
                yield Use(self._opened)

        yield from self._recovered(attempt)

    def resume(self) -> Plan[None]:
        """Tries to resume the session, whose stream just ended, until its grace is over or another call did.

        A session that the server no longer knows is opened anew by the next call, which also maps again.
        """
        ended, give_up = self._opened, self._clock() + self.options.grace_seconds
        for delay in delays():
            if self._clock() >= give_up:
                return
            yield Wait(delay)
            if ended is None or self._opened is not ended:
                return
            try:
                yield from self._open(self.session_id)
            except SlotcarError as error:
                if is_away(error):
                    continue
                return
            self.recoveries[RESUMED] += 1
            return

    def close(self) -> Plan[None]:
        """Forgets what the session has and ends it at the server; when that is away, its grace ends it."""
        self._mappings.clear()
        self._last_id = None
        if self._opened is not None:
            yield from self._end(self.session_id)

    def _end(self, session: str) -> Plan[None]:
        if self.options.owner:
            with contextlib.suppress(SlotcarError):
                yield Call(engine_service_pb2.CloseSessionRequest(session=session), timeout_seconds=END_SECONDS)

    # Mappings

    def set_mapping(self, entries: Iterable[Entry], mapping_id: int, load: bool, wait_seconds: float) -> Plan[Mapping]:
        if mapping_id == ROWS_MAPPING_ID:
            raise RequestInvalid(
                f"mapping_id is {mapping_id}, which `rows` uses",
                field="mapping_id",
                found=mapping_id,
                wanted="another number",
            )
        self._last_id = None
        mapping = yield from self.map(MappingWish(mapping_id, parse_entries(entries), load, wait_seconds))
        self._last_id = mapping_id
        return mapping

    def map(self, wish: MappingWish) -> Plan[Mapping]:
        """Sets a mapping that is not the default one."""

        def attempt() -> Plan[Mapping]:
            request = protocol.mapping_request(self.session_id, wish)
            try:
                response: engine_service_pb2.SetMappingResponse = yield Call(request, wait_seconds=wish.wait_seconds)
            except MappingNotFound as error:
                # Another call released the mapping, or set it otherwise, while this one waited: that was meant.
                raise MappingReplaced(error.message, mapping_id=wish.mapping_id) from error
            return protocol.read_mapping(wish.mapping_id, wish.entries, response)

        mapping = yield from self._recovered(attempt)
        self._mappings[wish.mapping_id] = mapping
        (self._loading.add if wish.load else self._loading.discard)(wish.mapping_id)
        return mapping

    def release_mapping(self, mapping: Mapping | None) -> Plan[None]:
        mapping_id = mapping.mapping_id if mapping is not None else self._last_id
        if mapping_id is None or mapping_id not in self._mappings:
            return
        if self._last_id == mapping_id:
            self._last_id = None
        released = self._mappings[mapping_id]

        def attempt() -> Plan[None]:
            now = self._mappings.get(mapping_id)
            if now is not None and now.digests is released.digests:  # also if it was set again by digest meanwhile
                with contextlib.suppress(SessionNotFound):
                    yield Call(engine_service_pb2.ReleaseMappingRequest(session=self.session_id, mapping_id=mapping_id))
                del self._mappings[mapping_id]

        yield from patiently(attempt, self.options, self._clock, END_SECONDS)

    @property
    def is_settled(self) -> bool:
        """Whether an attempt may go ahead: no hold is to be taken again or released before."""
        return self._settled is self._opened

    def first_forward(
        self,
        inputs: ReadOnlyDict[str, torch.Tensor],
        row_counts: Sequence[int] | None,
        base: ReadOnlyDict[str, torch.Tensor] | None,
        mapping: Mapping | None,
        aux: ReadOnlyDict[str, torch.Tensor] | None = None,
    ) -> Forward:
        """What the first attempt of a Forward asks for. Raises MappingReplaced, or for an aux that does not fit."""
        current = self.current(mapping)
        call = ForwardCall(inputs, protocol.counts_for(current, row_counts), base, aux)
        if aux is not None:
            from slotcar_client.call_tensors import with_aux

            call = with_aux(call, self._model_sites.of(self.model_spec))
        return Forward(call, current, self.opened, self.options.rank)

    def forward(
        self,
        inputs: ReadOnlyDict[str, torch.Tensor],
        row_counts: Sequence[int] | None,
        base: ReadOnlyDict[str, torch.Tensor] | None,
        mapping: Mapping | None,
        aux: ReadOnlyDict[str, torch.Tensor] | None = None,
    ) -> Plan[dict[str, torch.Tensor]]:
        return (yield from self.go_on(self.first_forward(inputs, row_counts, base, mapping, aux)))

    def go_on(self, first: Forward, failed: SlotcarError | None = None) -> Plan[dict[str, torch.Tensor]]:
        """The outputs of a Forward whose first attempt has `failed`, or was not made: it needs no plan."""

        def attempt() -> Plan[dict[str, torch.Tensor]]:
            current = self.current(first.mapping)
            outputs: dict[str, torch.Tensor] = yield Forward(first.call, current, self.opened, self.options.rank)
            return outputs

        failure = None if failed is None else _Failure(failed, first.opened)
        return (yield from self._recovered(attempt, first.mapping, failure))

    def fence(self) -> Plan[None]:
        def attempt() -> Plan[None]:
            yield Call(engine_service_pb2.FenceRequest(session=self.session_id))

        yield from self._recovered(attempt)

    def sites_of(self, mapping: Mapping) -> Plan[list[KnownSites]]:
        return (yield from self._sites.of_all(mapping.entries))

    # Holds

    def hold(self, ref: str, hold_id: int | None, seconds: float | None, slot: bool, make: Make[HeldT]) -> Plan[HeldT]:
        wish = HoldWish(self._holds.own_id() if hold_id is None else hold_id, ref, seconds, slot)

        def attempt() -> Plan[tuple[str, str]]:
            return (yield from self._hold(wish))

        return (yield from self._taken(wish, attempt, make))

    def load_held(
        self, request: adapter_service_pb2.LoadAdapterRequest, seconds: float | None, slot: bool, make: Make[HeldT]
    ) -> Plan[HeldT]:
        """Loads and holds in one step."""
        wish = HoldWish(self._holds.own_id(), request.ref, seconds, slot)

        def attempt() -> Plan[tuple[str, str]]:
            request.hold.CopyFrom(protocol.load_hold(self.session_id, wish))
            response: adapter_service_pb2.LoadAdapterResponse = yield Call(request)
            return protocol.read_load_hold(request.ref, response)

        return (yield from self._taken(wish, attempt, make))

    def release_hold(self, held: Held) -> Plan[None]:
        self._settled = None
        record = self._holds.release(held)
        if record is None:
            return
        if record.session == self.session_id:
            yield from self._end_hold(held.hold_id)
        self._holds.forget(held)

    def _end_hold(self, hold_id: int) -> Plan[None]:
        request = engine_service_pb2.ReleaseHoldRequest(session=self.session_id, hold_id=hold_id)
        with contextlib.suppress(SessionNotFound):
            yield Call(request, timeout_seconds=END_SECONDS)

    def _release_again(self) -> Plan[None]:
        """Tells the server of the releases that did not reach it."""
        for record in self._holds.owed(self.session_id):
            yield from self._end_hold(record.held.hold_id)
            self._holds.forget(record.held)

    def _taken(self, wish: HoldWish, attempt: Callable[[], Plan[tuple[str, str]]], make: Make[HeldT]) -> Plan[HeldT]:
        """The hold. One whose answer did not come in time may have been taken: it is released, if it is a new one."""
        self._settled = None
        try:
            held = make(wish.hold_id, *(yield from self._recovered(attempt)))
        except DeadlineExceeded:
            if not self._holds.has(wish.hold_id):
                with contextlib.suppress(SlotcarError):
                    yield from self._end_hold(wish.hold_id)
            raise
        self._holds.add(held, wish, self.session_id)
        return held

    def _hold(self, wish: HoldWish) -> Plan[tuple[str, str]]:
        response: engine_service_pb2.HoldAdapterResponse = yield Call(protocol.hold_request(self.session_id, wish))
        return protocol.read_hold(wish.ref, response)

    # Recovery

    def _open(self, resume: str = "") -> Plan[None]:
        version = client_version()
        opened: engine_service_pb2.SessionOpened = yield Open(protocol.open_request(self.options, resume, version))
        try:
            protocol.check_version(version, opened.server.version)
        except VersionMismatch:
            yield from self._end(opened.session)
            raise
        self._opened = opened
        try:
            yield Use(opened)
        except SlotcarError as error:
            if not is_away(error):
                yield from self._end(opened.session)
            raise

    def _recovered(
        self, attempt: Callable[[], Plan[T]], mapping: Mapping | None = None, failure: _Failure | None = None
    ) -> Plan[T]:
        """The result of `attempt`, repeated after what `next_step` says, at most MAX_STEPS times without the waits.

        mapping: what `attempt` uses, and what is set again by digest. failure: how a first one ended, made before.
        """
        patience = Patience(self.options.away_seconds, self._clock)
        step, steps, lost = Step.CALL, 0, None
        while True:
            used = self._opened
            try:
                if failure is not None:
                    (error, used), failure = failure, None
                    raise error
                # Another call may have opened the session while this one waited.
                if step is Step.REOPEN and self._opened is lost:
                    yield from self._open()
                if not self.is_settled:
                    yield from self._settle()
                if step in (Step.REOPEN, Step.REMAP) and mapping is not None:
                    yield from self._remap(self.current(mapping))
                result = yield from attempt()
            except SlotcarError as error:
                step, last, lost = next_step(error, self.options), error, used
            else:
                if patience.cause is not None:
                    self.recoveries[patience.cause] += 1
                return result
            steps += step is not Step.WAIT
            if step is Step.RAISE or steps == MAX_STEPS:
                raise last
            yield from self._before(step, last, patience, mapping)

    def _before(self, step: Step, error: SlotcarError, patience: Patience, mapping: Mapping | None) -> Plan[None]:
        """What comes before the step; an exception of `on_stale` ends the call here, with nothing changed."""
        if step is Step.WAIT:
            yield Wait(patience.delay(error))
            return
        if mapping is not None:
            yield Stale(self.current(mapping), error)
        self.recoveries[error.reason] += 1

    def _remap(self, old: Mapping) -> Plan[None]:
        """Sets the mapping again by the digests last reported; its name in `digests` and its counts stay."""
        wish = MappingWish(old.mapping_id, Entries(old.entries, old.row_counts), old.mapping_id in self._loading)
        response: engine_service_pb2.SetMappingResponse = yield Call(protocol.mapping_request(self.session_id, wish))
        self._mappings[old.mapping_id] = protocol.remapped(old, response)

    def _settle(self) -> Plan[None]:
        """Brings the server up to date about the holds."""
        if self._opened is not None:
            yield from self._hold_again()
            yield from self._release_again()
        self._settled = self._opened

    def _hold_again(self) -> Plan[None]:
        """Takes the holds of a session that is gone again, by digest. A refusal says which hold it is about."""
        for record in self._holds.lost(self.session_id):
            try:
                yield from self._hold(record.wish_now(self._clock()))
            except SlotcarError as error:
                error.metadata.setdefault("hold_id", str(record.held.hold_id))
                raise
            self._holds.moved(record, self.session_id)
            self.recoveries[HELD_AGAIN] += 1
