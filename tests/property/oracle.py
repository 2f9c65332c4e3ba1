"""What must hold after every step of the cache, as functions of a bench."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from slotcar_sidecar.core.errors import Reason, SlotcarError, SlotsExhausted
from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.layout import SlotState
from slotcar_sidecar.core.mapping import Mapping

from tests.fakes.parts import Bench

FORWARD_ERRORS = {Reason.LAYOUT_STALE, Reason.MAPPING_NOT_FOUND, Reason.SESSION_NOT_FOUND}


@dataclass
class Sent:
    """A Forward on its way: what its mapping reported, and the task."""

    mapping: Mapping
    task: asyncio.Task[Any]


def check_everything(bench: Bench) -> None:
    """I1 to I7, as far as the cache and its device can tell."""
    cache = bench.cache
    cache.check_integrity()
    cache.check_bytes()
    for index, slot in enumerate(cache.layout.slots):
        if slot.state in (SlotState.OCCUPIED, SlotState.DRAINING):
            assert bench.device.bytes[SlotId(index)] == str(slot.digest), "I1"
    assert not bench.device.written_while_read, "I2"
    assert not bench.device.unannounced, "I2: bytes changed before readers elsewhere were told"
    assert not bench.device.read_while_written, "I2"
    capacity = cache.capacity()
    assert sum(capacity.slots.values()) == len(cache.layout.slots), "I7"
    filling = set(cache.layout.in_state(SlotState.FILLING))
    assert bench.device.writing <= filling, "a slot is written that others may take"
    assert not bench.device.written_twice


def check_progress(bench: Bench) -> None:
    """Whoever is first in the queue, or inside a reservation, cannot be served: nobody was forgotten who could be."""
    residency = bench.cache.residency
    if bench.load_pool.jobs or bench.cache._loads._fills:
        return
    for index, asked in enumerate(tuple(residency.slots.queue)):
        call = asked.call  # type: ignore[attr-defined]
        if index and call.session not in residency.slots.reserved:
            continue
        wanted = residency.resolve(call.refs, call.session)
        try:
            residency.slots.check(residency.demand(call.owner, wanted, asked))
        except SlotsExhausted:
            continue
        raise AssertionError(f"{call} waits for nothing")


def check_answer(sent: Sent) -> str:
    """I8: what a Forward read is what its mapping reported, or it was refused. Says how it ended."""
    if sent.task.cancelled():
        return "abandoned"
    error = sent.task.exception()
    if error is not None:
        assert isinstance(error, SlotcarError), error
        assert error.reason in FORWARD_ERRORS, error
        return str(error.reason)
    computed = sent.task.result()
    assert computed.layout.is_current(sent.mapping.slots, sent.mapping.generation), "I2, the second check"
    assert computed.layout.epoch == sent.mapping.epoch, "I3"
    read = bytes(computed.outputs[0].data).decode().split("\n") if sent.mapping.entries else []
    assert tuple(read) == sent.mapping.digests == computed.digests, "I8"
    return "OK"
