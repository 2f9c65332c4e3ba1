"""Faults by which adapters do not get slots, do not give them back, or take them from each other."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from slotcar_sidecar.core.errors import AdapterNotFound, AdapterNotResident, SlotsExhausted
from slotcar_sidecar.core.events import EventKind
from slotcar_sidecar.core.ids import AdapterName, SlotId
from slotcar_sidecar.core.layout import SlotState

from tests.fakes.parts import digest_of, make_bench, settle
from tests.fakes.steps import (
    computed,
    finish,
    forward,
    held,
    loaded,
    map_names,
    mapped,
    open_session,
    read_by,
    ref,
    start_hold,
    start_load,
    start_map,
)
from tests.unit.museum.shared import digest, uploaded, weights_file


async def test_more_names_than_slots() -> None:
    """vllm-metal#641. What is registered takes no slot, and what is resident gives way.

    To see it fail: leave the occupied slots out of the candidates in Slots.take.
    """
    bench = make_bench(1)
    for name in ("a", "b", "c"):
        await loaded(bench, name, name)
    assert len(bench.cache.residency.names) == 3
    session = open_session(bench)
    assert read_by(await computed(bench, session, map_names(bench, session, "c"))) == [digest("c")]


async def test_a_batch_that_needs_more_adapters_than_slots() -> None:
    """vllm#14495, sglang#23141. It is refused, and neither the slots nor the pins change.

    To see it fail: let Mappings._set_now pin what it finds before it looks for what is absent.
    """
    bench = make_bench(2)
    for name in ("a", "b", "c"):
        await loaded(bench, name, name)
    session = open_session(bench)
    before = bench.cache.layout
    with pytest.raises(AdapterNotResident):
        map_names(bench, session, "c", "b", "a")
    assert bench.cache.layout is before
    assert not bench.cache.residency.pins.pinned()
    map_names(bench, session, "c", "b")
    with pytest.raises(SlotsExhausted):
        await loaded(bench, "a")
    bench.cache.check_integrity()


async def test_a_batch_that_needs_more_adapters_than_slots_is_not_loaded_by_half() -> None:
    """vllm#14495, sglang#23141. A SetMapping that loads is refused before the first of its set is written.

    To see it fail: let Residency.demand count one fill, however many are missing.
    """
    bench = make_bench(2)
    for name in ("a", "b", "c", "d"):
        await loaded(bench, name, name)
    session = open_session(bench)
    before = map_names(bench, session, "d")
    layout = bench.cache.layout
    with pytest.raises(SlotsExhausted) as caught:
        await mapped(bench, session, "a", "b", "c", load=True, wait_seconds=60.0)
    assert caught.value.retry_after_seconds is None, "no wait would help"
    assert bench.cache.layout is layout
    assert read_by(await computed(bench, session, before)) == [digest("d")]
    bench.cache.check_integrity()


async def test_unload_gives_the_memory_back() -> None:
    """vllm#54839, vllm#42207. With the name go the bytes, from the slot and from memory.

    To see it fail: leave out _on_forget in Residency._retire.
    """
    bench = make_bench(1)
    await loaded(bench, "a", "a")
    assert bench.cache.tiers.host.used_bytes == 1
    bench.cache.unload(ref("a"), force=False)
    assert bench.cache.tiers.host.used_bytes == 0
    assert bench.cache.layout.in_state(SlotState.FREE) == (0,)
    await uploaded(bench, "sent", weights_file(1))
    bench.cache.unload(ref("sent"), force=False)
    assert bench.cache.tiers.host.used_bytes == 0


async def test_the_last_to_let_go_gives_the_memory_back() -> None:
    """vllm#54839, vllm#42207. What an unload must leave to a mapping and a hold goes with the last of them.

    To see it fail: leave out self._retire in Residency._end_hold.
    """
    bench = make_bench(1)
    await loaded(bench, "a", "a")
    session = open_session(bench)
    map_names(bench, session, "a")
    await held(bench, session, "a")
    assert bench.cache.unload(ref("a"), force=False).slot_state is SlotState.DRAINING
    bench.cache.release_mapping(session, 0)
    assert bench.cache.layout.in_state(SlotState.FREE) == (0,)
    assert bench.cache.tiers.host.used_bytes == 1
    bench.cache.release_hold(session, 1)
    assert bench.cache.tiers.host.used_bytes == 0


async def test_unload_does_not_hang_after_an_abort() -> None:
    """sglang#36894. An aborted call keeps its slot from being written until its kernel ends, and then no longer.

    To see it fail: await the computation in Forwards.forward itself, without State.outliving.
    """
    bench = make_bench(1)
    await loaded(bench, "a", "a")
    session = open_session(bench)
    aborted = forward(bench, session, map_names(bench, session, "a"))
    await settle()
    aborted.cancel()
    await settle()
    assert not inspect.iscoroutinefunction(bench.cache.unload)
    assert bench.cache.unload(ref("a"), force=False).slot_state is SlotState.DRAINING
    bench.cache.close_session(session)
    (result,) = await finish(bench, start_load(bench, "b", "b"))
    assert result.resident.slot == 0
    assert not bench.device.written_while_read


async def test_no_call_waits_for_what_was_unloaded_or_behind_what_was_aborted() -> None:
    """sglang#36894. Of two calls that wait one is aborted, and the other learns that its adapter is gone.

    To see it fail: leave out publish in AdapterCache.unload.
    """
    bench = make_bench(1)
    for name in ("b", "a"):
        await loaded(bench, name, name)
    holder = open_session(bench)
    map_names(bench, holder, "a")
    waiting = [start_map(bench, open_session(bench), "b", load=True, wait_seconds=60.0) for _ in range(2)]
    await settle()
    waiting[0].cancel()
    await settle()
    assert bench.cache.capacity().waiting == 1
    bench.cache.unload(ref("b"), force=False)
    await settle()
    assert waiting[1].done()
    assert isinstance(waiting[1].exception(), AdapterNotFound)
    assert bench.cache.capacity().waiting == 0
    bench.cache.unload(ref("a"), force=False)
    bench.cache.close_session(holder)
    assert (await loaded(bench, "c", "c")).resident.slot == 0


async def test_pins_do_not_drift() -> None:
    """sglang#31808, sglang#34205. A mapping that is set or released again pins neither more nor less than it says.

    To see it fail: count in Pins.replace, and add and subtract.
    """
    bench = make_bench(2)
    await loaded(bench, "a", "a")
    await loaded(bench, "b", "b")
    session = open_session(bench)

    def pins() -> dict[SlotId, int]:
        return {slot: len(owners) for slot, owners in bench.cache.residency.pins.owners.items()}

    for _ in range(3):
        map_names(bench, session, "a", "a", "b", "a")
    assert pins() == {0: 1, 1: 1}
    map_names(bench, session, "a", mapping_id=1)
    assert pins() == {0: 2, 1: 1}
    for _ in range(3):
        bench.cache.release_mapping(session, 0)
    assert pins() == {0: 1}
    for _ in range(2):
        bench.cache.close_session(session)
    assert pins() == {}


async def test_holds_do_not_drift() -> None:
    """sglang#31808, sglang#34205. Holds are as many as said: repeated, taken over, released twice, or ended by force.

    To see it fail: leave out self.remove in Holds.put.
    """
    bench = make_bench(2)
    for name in ("a", "b"):
        await loaded(bench, name, name)
    session, other = open_session(bench, reserved_slots=1), open_session(bench)
    holds = bench.cache.residency.holds

    def pins() -> int:
        return len(bench.cache.residency.pins.pinned())

    for _ in range(3):
        await held(bench, session, "a", slot=True)
    await held(bench, other, "a")
    assert (len(holds.of(digest_of("a"))), pins()) == (2, 1)
    await held(bench, session, "b", slot=True)
    assert (len(holds.of(digest_of("a"))), len(holds.of(digest_of("b"))), pins()) == (1, 1, 1)
    for hold_id in (1, 1, 2):
        bench.cache.release_hold(other, hold_id)
    assert holds.digests() == {digest_of("b")}
    bench.cache.unload(ref("b"), force=True)
    bench.cache.release_hold(session, 1)
    assert (len(holds), pins()) == (0, 0)
    bench.cache.check_integrity()


async def test_no_unload_fits_between_the_lookup_and_the_pin() -> None:
    """sglang#9084. Nothing runs between the two; a load whose slot goes before its name is bound fills another.

    To see it fail: make the `while` of Loads.make_resident an `if`, or await between the two in Mappings._set_now, to
    which map_names leaves no time.
    """
    for turns in range(12):
        bench = make_bench(1)
        await loaded(bench, "a", "a")
        await loaded(bench, "b", "b")
        again = start_load(bench, "a")
        await settle()
        bench.load_pool.run_one()
        await settle()
        bench.load_pool.run_one()
        for _ in range(turns):
            await asyncio.sleep(0)
        bench.cache.unload(ref("a"), force=True)
        (result,) = await finish(bench, again)
        assert not isinstance(result, BaseException), (turns, result)
        bench.cache.check_integrity()
        if bench.cache.residency.names.get(AdapterName("a")):
            session = open_session(bench)
            assert read_by(await computed(bench, session, map_names(bench, session, "a"))) == [digest("a")]


async def test_a_name_that_moves_during_a_load_is_looked_up_again() -> None:
    """sglang#9084. A SetMapping that loads has the bytes that its name has at the end, or it would pin forgotten ones.

    To see it fail: leave out `again != wanted` in Mappings._fill_and_set.
    """
    bench = make_bench(3)
    for name, content in (("a", "old"), ("next", "new"), ("x", "x"), ("y", "y")):
        await loaded(bench, name, content)
    map_names(bench, open_session(bench), "next")
    session = open_session(bench)
    mapping = start_map(bench, session, "a", load=True)
    await settle()
    bench.load_pool.run_one()
    await settle()
    moving = start_load(bench, "a", "new", replace=True)
    await settle()
    bench.load_pool.run_one(1)
    await settle()
    assert moving.done()
    assert bench.cache.layout.in_state(SlotState.FILLING), "the old bytes are on their way"
    (result,) = await finish(bench, mapping)
    assert read_by(await computed(bench, session, result)) == [digest("new")]
    bench.cache.check_integrity()


async def test_no_unload_fits_between_the_lookup_and_the_hold() -> None:
    """sglang#9084. What was unloaded by force while a hold read its bytes is not held.

    To see it fail: leave out resolve in SessionHolds._load_and_hold.
    """
    bench = make_bench(1)
    await loaded(bench, "a", "a")
    bench.cache.tiers.host.drop(digest_of("a"))
    holding = start_hold(bench, open_session(bench), "a")
    await settle()
    bench.cache.unload(ref("a"), force=True)
    (result,) = await finish(bench, holding)
    assert isinstance(result, AdapterNotFound)
    assert bench.cache.tiers.host.used_bytes == 0
    bench.cache.check_integrity()


async def test_a_load_does_not_block_compute() -> None:
    """sglang#13349. A Forward runs to its end while a slot that it does not read is written.

    To see it fail: call device.fill in Loads._fill, not through State.run, or let Forwards._forward wait for fills.
    """
    bench = make_bench(2)
    await loaded(bench, "a", "a")
    session = open_session(bench)
    mapping = map_names(bench, session, "a")
    loading = start_load(bench, "b", "b")
    await settle()
    bench.load_pool.run_one()
    await settle()
    assert bench.cache.layout.in_state(SlotState.FILLING) == (1,)
    during = forward(bench, session, mapping)
    await settle()
    bench.compute_pool.run_one()
    await settle()
    assert read_by(during.result()) == [digest("a")]
    assert not loading.done()
    await finish(bench, loading)


async def test_twice_as_many_adapters_as_slots_take_turns() -> None:
    """sglang#13349. Each gets its slot when it is its turn, computes in it, and costs no more than one write a turn.

    To see it fail: let Slots.check return without a look at the queue, so that who was just served is served again.
    """
    bench = make_bench(2)
    names = ("a", "b", "c", "d")
    for name in reversed(names):
        await loaded(bench, name, name)
    bench.seen.clear()
    sessions = {name: open_session(bench) for name in names}
    waiting = {}
    for name in names:
        waiting[name] = start_map(bench, sessions[name], name, load=True, wait_seconds=600.0)
        await settle()
    for turn in range(12):
        name, session = names[turn % 4], sessions[names[turn % 4]]
        (mapping,) = await finish(bench, waiting.pop(name))
        assert read_by(await computed(bench, session, mapping)) == [digest(name)]
        bench.cache.release_mapping(session, 0)
        with pytest.raises(SlotsExhausted):
            map_names(bench, session, name)
        waiting[name] = start_map(bench, session, name, load=True, wait_seconds=600.0)
        await settle()
    assert sum(event.kind is EventKind.EVICTED for event in bench.seen) <= 12 + 2
    for task in waiting.values():
        task.cancel()
    await settle()
    assert bench.cache.capacity().waiting == 0


async def test_an_evicted_adapter_comes_back() -> None:
    """TensorRT-LLM#6510. Where a name was loaded from is known for as long as the name is.

    To see it fail: forget what Names.source_of tells when Slots.take finds a victim.
    """
    bench = make_bench(1, host_bytes=1)
    await loaded(bench, "a", "a")
    await loaded(bench, "b", "b")
    assert digest_of("a") not in bench.cache.tiers.host
    assert (await loaded(bench, "a")).resident.adapter.digest == digest_of("a")
    session = open_session(bench)
    assert (await mapped(bench, session, "b", load=True)).digests == (digest("b"),)


async def test_an_evicted_upload_comes_back() -> None:
    """TensorRT-LLM#6510. What has no source to be read from again stays in memory, and others give way.

    To see it fail: leave names.without_source out of Residency.held_digests.
    """
    file = weights_file(1)
    bench = make_bench(1, host_bytes=len(file))
    sent = (await uploaded(bench, "sent", file)).resident.adapter
    bench.cache.tiers.host.capacity_bytes = sent.bytes + 1
    for name in ("b", "c"):
        await loaded(bench, name, name)
    assert bench.cache.residency.describe(ref("sent")).slot is None
    assert digest_of("b") not in bench.cache.tiers.host
    session = open_session(bench)
    mapping = await mapped(bench, session, "sent", load=True)
    assert read_by(await computed(bench, session, mapping)) == [str(sent.digest)]
