"""What must be left of a soak: no session, pin, hold, keep or byte; and every slot can be filled and computes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from slotcar.v1 import adapter_pb2, layout_pb2
from slotcar.v1 import adapter_service_pb2 as pb

from tests.faults.gauges import descriptors
from tests.faults.oracle import Library
from tests.faults.raw import CALL_SECONDS, RawEngine, array
from tests.soak.operator import slots_disagree
from tests.soak.plan import ADAPTERS, NAMES, SITES, SLOTS, VERSIONS
from tests.soak.processes import Server

_QUIET_SECONDS = 45.0
_LOOK_SECONDS = 0.1


def leftovers(server: Server, folder: Path) -> list[str]:
    """Waits for the end of graces, unloads every name, and says what is there nevertheless."""
    with RawEngine(server.target) as wire:
        left = _wait_for(lambda: list(_unquiet(wire)))
        adapters = wire.adapters.ListAdapters(pb.ListAdaptersRequest(page_size=1000), timeout=CALL_SECONDS).adapters
        for adapter in adapters:
            wire.adapters.UnloadAdapter(pb.UnloadAdapterRequest(ref=adapter.name), timeout=CALL_SECONDS)
        _sweep(wire, folder)
        return left + _wait_for(lambda: list(_unempty(wire)))


def _sweep(wire: RawEngine, folder: Path) -> None:
    """Verified bytes of a load that was refused may stay in memory without a name: each gets one, and loses it."""
    for source in sorted((folder / ADAPTERS).iterdir()):
        request = pb.LoadAdapterRequest(ref="sweep", source=str(source), target_tier=adapter_pb2.TIER_HOST)
        wire.adapters.LoadAdapter(request, timeout=CALL_SECONDS)
        wire.adapters.UnloadAdapter(pb.UnloadAdapterRequest(ref="sweep"), timeout=CALL_SECONDS)


def _wait_for(look: Callable[[], list[str]]) -> list[str]:
    """What `look` still finds at the deadline."""
    deadline = time.monotonic() + _QUIET_SECONDS
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return found


def _unquiet(wire: RawEngine) -> Iterator[str]:
    """What clients that are all gone still own."""
    capacity = wire.adapters.GetCapacity(pb.GetCapacityRequest(), timeout=CALL_SECONDS)
    for name in ("sessions", "slots_pinned", "slots_reserved", "slots_filling", "slots_draining", "waiting"):
        if getattr(capacity, name):
            yield f"{name} is {getattr(capacity, name)} after the end of all clients"
    for session in wire.adapters.ListSessions(pb.ListSessionsRequest(), timeout=CALL_SECONDS).sessions:
        yield f"session {session.session} of {session.client_name} is left"
    for adapter in wire.adapters.ListAdapters(pb.ListAdaptersRequest(), timeout=CALL_SECONDS).adapters:
        if adapter.pins:
            yield f"{adapter.name} has {adapter.pins} pins"


def _unempty(wire: RawEngine) -> Iterator[str]:
    """What is left when every name is unloaded."""
    capacity = wire.adapters.GetCapacity(pb.GetCapacityRequest(), timeout=CALL_SECONDS)
    if capacity.slots_free != SLOTS or capacity.slots_available != SLOTS:
        yield f"{capacity.slots_free} slots are free and {capacity.slots_available} available, of {SLOTS}"
    for name in ("host_bytes_used", "host_bytes_held", "adapters", "keeps"):
        if getattr(capacity, name):
            yield f"{name} is {getattr(capacity, name)} after every name was unloaded"


def exercise(server: Server, library: Library, folder: Path) -> Counter[str]:
    """Fills every slot, computes with it, and empties it again; returns the open descriptors, this connection's too."""
    names = [f"{name}{VERSIONS[0]}" for name in NAMES][:SLOTS]
    with RawEngine(server.target) as wire:
        digests = []
        for name in names:
            request = pb.LoadAdapterRequest(ref=name, source=str(folder / ADAPTERS / name))
            digests.append(wire.adapters.LoadAdapter(request, timeout=CALL_SECONDS).adapter.digest)
        layout = wire.adapters.ListAdapters(pb.ListAdaptersRequest(), timeout=CALL_SECONDS).layout
        assert not list(slots_disagree(layout))
        assert {slot.digest for slot in layout.slots} == set(digests), "some slot cannot be filled"
        assert {slot.state for slot in layout.slots} == {layout_pb2.SLOT_STATE_OCCUPIED}
        _compute(wire, library, names)
        for name in names:
            wire.adapters.UnloadAdapter(pb.UnloadAdapterRequest(ref=name), timeout=CALL_SECONDS)
        return descriptors(server.process)


def _compute(wire: RawEngine, library: Library, names: list[str]) -> None:
    wire.open(grace_seconds=0.0)
    mapping = wire.map(*names, "")
    counts = [2] * (len(names) + 1)
    for site, (inputs, _) in SITES.items():
        x = torch.randn(sum(counts), inputs, generator=torch.Generator().manual_seed(0))
        answer = wire.forward(wire.request(mapping.generation, counts, {site: x.numpy()}))
        wrong = library.wrong_rows(answer.digests, counts, site, x, torch.from_numpy(array(answer.outputs[0])))
        assert not wrong, f"{site}: rows {wrong} are wrong"
    wire.close_session()
