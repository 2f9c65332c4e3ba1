"""Operators of a soak: they load, upload, replace, unload, force, keep, end sessions and look, in no order."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
from slotcar.v1 import adapter_pb2, adapter_service_pb2, layout_pb2
from slotcar.v1 import adapter_service_pb2 as pb

from tests.faults.raw import CALL_SECONDS, RawEngine
from tests.soak.actor import Actor
from tests.soak.plan import NAMES, SLOTS, UPLOADED, VERSIONS

_LOAD = frozenset({"ADAPTER_CONFLICT", "ADAPTER_NOT_FOUND", "SLOTS_EXHAUSTED", "CAPACITY_EXCEEDED", "REQUEST_INVALID"})
_NAMED = frozenset({"ADAPTER_NOT_FOUND"})
_CHUNK_BYTES = 8192
# tests.adapters has these names too, and imports torch, which a client process does without.
_FILES = ("adapter_config.json", "adapter_model.safetensors")


class Operator(Actor):
    """One operator, who also checks that each snapshot agrees with itself."""

    def live(self) -> None:
        with RawEngine(self.world.target) as wire:
            self.wire = wire
            self.stub: Any = wire.adapters
            for _ in range(self.random.randint(50, 300)):
                if self.world.over.is_set():
                    return
                self.act()
                self.pause(0.0, 0.06)

    def act(self) -> None:
        verbs = {self.load: 6, self.load_again: 2, self.replace: 3, self.to_host: 1, self.upload: 2, self.give_up: 0.5}
        verbs |= {self.unload: 1, self.force: 1.2, self.keep: 1, self.release_keep: 2, self.end_session: 0.15}
        verbs |= {
            self.sabotage: 0.7,
            self.list: 1,
            self.capacity: 1,
            self.sessions: 0.5,
            self.estimate: 0.3,
            self.watch: 0.2,
        }
        (verb,) = self.random.choices(tuple(verbs), tuple(verbs.values()))
        verb()

    def any_name(self) -> str:
        return self.random.choice((*NAMES, *UPLOADED))

    def source(self) -> str:
        """Any version of any name: a replace may bring what another name has."""
        return str(self.world.adapters / f"{self.random.choice(NAMES)}{self.random.choice(VERSIONS)}")

    # Loads

    def _load(self, verb: str, request: pb.LoadAdapterRequest) -> None:
        told = {"name": request.ref, "source": request.source.rpartition("/")[2]}
        self.attempt(verb, lambda: self.stub.LoadAdapter(request, timeout=CALL_SECONDS), _LOAD, **told)

    def load(self) -> None:
        name = self.random.choice(NAMES)
        source = str(self.world.adapters / f"{name}{self.random.choice(VERSIONS)}")
        self._load("load", pb.LoadAdapterRequest(ref=name, source=source, keep=self.random.random() < 0.1))

    def load_again(self) -> None:
        """What the name has, into a slot."""
        self._load("load_again", pb.LoadAdapterRequest(ref=self.random.choice(NAMES)))

    def replace(self) -> None:
        replace = pb.ON_CONFLICT_REPLACE
        request = pb.LoadAdapterRequest(ref=self.random.choice(NAMES), source=self.source(), on_conflict=replace)
        self._load("replace", request)

    def sabotage(self) -> None:
        """Takes a name's slot away by force and at once fills it with other bytes, a few times."""
        name = self.random.choice(NAMES)
        for _ in range(self.random.randint(2, 8)):
            request = pb.LoadAdapterRequest(ref=name, source=self.source(), on_conflict=pb.ON_CONFLICT_REPLACE)
            self._load("replace", request)
            self._unload("force", name, force=True)

    def to_host(self) -> None:
        name = self.random.choice(NAMES)
        request = pb.LoadAdapterRequest(ref=name, source=self.source(), target_tier=adapter_pb2.TIER_HOST)
        request.on_conflict = self.random.choice((pb.ON_CONFLICT_FAIL, pb.ON_CONFLICT_REPLACE))
        self._load("to_host", request)

    def upload(self) -> None:
        """An adapter's files in chunks."""
        name, parts = self.random.choice(UPLOADED), list(self.parts())
        call = lambda: self.stub.LoadAdapterStream(iter(parts), timeout=CALL_SECONDS)  # noqa: E731
        self.attempt("upload", call, _LOAD, name=parts[0].header.ref or name)

    def give_up(self) -> None:
        """An upload that stops half way, or breaks off."""
        parts = list(self.parts())
        few = parts[: self.random.randint(1, len(parts) - 1)]
        if self.random.random() < 0.5:
            self.attempt(
                "half_upload",
                lambda: self.stub.LoadAdapterStream(iter(few), timeout=CALL_SECONDS),
                _LOAD | {"ADAPTER_INVALID"},
            )
            return
        future = self.stub.LoadAdapterStream.future(iter(parts), timeout=CALL_SECONDS)
        self.pause(0.0, 0.01)
        future.cancel()
        self.step("upload", "GIVEN_UP")

    def parts(self) -> Iterator[pb.LoadAdapterStreamRequest]:
        folder = self.world.adapters / f"{self.random.choice(NAMES)}{self.random.choice(VERSIONS)}"
        config, weights = ((folder / name).read_bytes() for name in _FILES)
        header = pb.UploadHeader(
            ref=self.random.choice(UPLOADED),
            on_conflict=pb.ON_CONFLICT_REPLACE,
            target_tier=self.random.choice((adapter_pb2.TIER_HOST, adapter_pb2.TIER_DEVICE)),
            config_bytes=len(config),
            weights_bytes=len(weights),
        )
        yield pb.LoadAdapterStreamRequest(header=header)
        yield pb.LoadAdapterStreamRequest(config=config)
        for start in range(0, len(weights), _CHUNK_BYTES):
            yield pb.LoadAdapterStreamRequest(weights=weights[start : start + _CHUNK_BYTES])

    # Names

    def _unload(self, verb: str, name: str, *, force: bool) -> None:
        request = pb.UnloadAdapterRequest(ref=name, force=force)
        self.attempt(verb, lambda: self.stub.UnloadAdapter(request, timeout=CALL_SECONDS), _NAMED, name=name)

    def unload(self) -> None:
        self._unload("unload", self.any_name(), force=False)

    def force(self) -> None:
        self._unload("force", self.any_name(), force=True)

    def keep(self) -> None:
        name = self.any_name()
        allowed = _NAMED | {"ADAPTER_NOT_RESIDENT", "SLOTS_EXHAUSTED"}
        request = pb.KeepAdapterRequest(ref=name)
        self.attempt("keep", lambda: self.stub.KeepAdapter(request, timeout=CALL_SECONDS), allowed, name=name)

    def release_keep(self) -> None:
        name = self.any_name()
        request = pb.ReleaseKeepRequest(ref=name)
        self.attempt("release_keep", lambda: self.stub.ReleaseKeep(request, timeout=CALL_SECONDS), _NAMED, name=name)

    # Looking

    def list(self) -> None:
        request = pb.ListAdaptersRequest()
        answer = self.attempt("list", lambda: self.stub.ListAdapters(request, timeout=CALL_SECONDS), frozenset())
        if answer is not None:
            for why in adapters_disagree(answer):
                self.fault(f"ListAdapters: {why}")

    def capacity(self) -> None:
        request = pb.GetCapacityRequest()
        answer = self.attempt("capacity", lambda: self.stub.GetCapacity(request, timeout=CALL_SECONDS), frozenset())
        if answer is not None:
            for why in capacity_disagrees(answer):
                self.fault(f"GetCapacity: {why}")

    def sessions(self) -> None:
        request = pb.ListSessionsRequest()
        self.attempt("sessions", lambda: self.stub.ListSessions(request, timeout=CALL_SECONDS), frozenset())

    def end_session(self) -> None:
        request = pb.ListSessionsRequest()
        answer = self.attempt("sessions", lambda: self.stub.ListSessions(request, timeout=CALL_SECONDS), frozenset())
        if answer is not None and answer.sessions:
            end = pb.EndSessionRequest(session=self.random.choice(answer.sessions).session)
            self.attempt("end_session", lambda: self.stub.EndSession(end, timeout=CALL_SECONDS), frozenset())

    def estimate(self) -> None:
        request = pb.EstimateAdapterRequest(source=self.source())
        self.attempt("estimate", lambda: self.stub.EstimateAdapter(request, timeout=CALL_SECONDS), frozenset())

    def watch(self) -> None:
        """A few events, and the connection's end without a word."""
        events = self.stub.WatchEvents(adapter_service_pb2.WatchEventsRequest(replay=20), timeout=2.0)
        self.step("watch", "OK")
        with contextlib.suppress(grpc.RpcError):
            for _ in zip(range(self.random.randint(1, 30)), events, strict=False):
                pass
        events.cancel()


def slots_disagree(layout: layout_pb2.Layout) -> Iterator[str]:
    """I4 and I7 of a layout."""
    digests = Counter(slot.digest for slot in layout.slots if slot.digest)
    if len(layout.slots) != SLOTS:
        yield f"{len(layout.slots)} slots (I7)"
    if any(count > 1 for count in digests.values()):
        yield f"a digest is in two slots (I4): {digests}"
    for slot in layout.slots:
        if (slot.state == layout_pb2.SLOT_STATE_FREE) != (not slot.digest):
            yield f"slot {slot.index} is {layout_pb2.SlotState.Name(slot.state)} with digest {slot.digest!r}"
        if slot.mod_generation > layout.version.generation:
            yield f"slot {slot.index} changes in the future"


def adapters_disagree(answer: pb.ListAdaptersResponse) -> Iterator[str]:
    """What of a list does not fit its layout."""
    yield from slots_disagree(answer.layout)
    slots = {slot.index: slot for slot in answer.layout.slots}
    for adapter in answer.adapters:
        if adapter.tier == adapter_pb2.TIER_DEVICE and slots[adapter.slot].digest != adapter.digest:
            yield f"{adapter.name} is said to be in slot {adapter.slot}, which has {slots[adapter.slot].digest}"
        if adapter.keep and adapter.tier != adapter_pb2.TIER_DEVICE:
            yield f"{adapter.name} is kept and in no slot"


def capacity_disagrees(answer: pb.GetCapacityResponse) -> Iterator[str]:
    """What of the capacity does not add up."""
    states = answer.slots_free + answer.slots_filling + answer.slots_occupied + answer.slots_draining
    if states != answer.slots or answer.slots != SLOTS:
        yield f"{states} slots in some state, of {answer.slots} (I7)"
    if answer.keeps + answer.slots_reserved > answer.slots:
        yield f"{answer.keeps} keeps and {answer.slots_reserved} reserved slots of {answer.slots}"
    if answer.host_bytes_used > answer.host_bytes_capacity:
        yield f"{answer.host_bytes_used} bytes in a host tier of {answer.host_bytes_capacity}"
    if answer.host_bytes_held > answer.host_bytes_used:
        yield f"{answer.host_bytes_held} bytes held of {answer.host_bytes_used}"
