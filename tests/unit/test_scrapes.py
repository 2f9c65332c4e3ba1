"""A snapshot for a scrape can be taken between any two steps, and names what is resident as far as it is to."""

from __future__ import annotations

import asyncio

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.core.calls import LoadCall, MappingCall
from slotcar_sidecar.core.folded import Folded
from slotcar_sidecar.core.holds import HoldTerms
from slotcar_sidecar.core.ids import AdapterRef
from slotcar_sidecar.core.layout import SlotState
from slotcar_sidecar.core.pins import HoldOwner
from slotcar_sidecar.core.session import SessionTerms
from slotcar_sidecar.process.scrapes import take_snapshot

from tests.fakes.parts import Bench, make_bench, settle


def start(slots: int) -> Bench:
    bench = make_bench(slots, fills_only=True)
    bench.source.contents |= {f"/{name}": name for name in "abcd"}
    return bench


async def load(bench: Bench, name: str, source: str) -> None:
    task = asyncio.create_task(bench.cache.load(LoadCall(AdapterRef.parse(name), source)))
    await settle()
    while bench.load_pool.jobs:
        bench.load_pool.run_one()
        await settle()
    await task


def named(cache: AdapterCache, most: int = 10) -> list[str]:
    return [str(each.name) for each in take_snapshot(cache, most, 1000.0).residents]


async def test_a_load_can_be_looked_at_between_its_steps() -> None:
    """For a moment a slot is occupied and its adapter has no name yet."""
    bench = start(1)
    loading = asyncio.create_task(bench.cache.load(LoadCall(AdapterRef.parse("a"), "/a")))
    await settle()
    bench.load_pool.run_one()
    seen = []
    while not loading.done():
        await asyncio.sleep(0)
        layout = bench.cache.layout
        seen.append((len(layout.in_state(SlotState.OCCUPIED)), named(bench.cache)))
    assert (1, []) in seen
    assert seen[-1] == (1, ["a"])


async def test_the_latest_used_are_named_first_and_not_more_than_are_to_be() -> None:
    bench = start(3)
    for name in "abc":
        await load(bench, name, f"/{name}")
    await load(bench, "b-too", "/b")
    session = bench.cache.open_session(SessionTerms("engine"), None).session_id
    await bench.cache.set_mapping(MappingCall(session, 1, Folded.of([AdapterRef.parse("b")])))
    assert named(bench.cache) == ["b", "b-too", "c", "a"]
    assert named(bench.cache, 1) == ["b"]
    assert named(bench.cache, 0) == []


async def test_what_drains_is_resident_under_no_name() -> None:
    bench = start(2)
    await load(bench, "a", "/a")
    session = bench.cache.open_session(SessionTerms("engine"), None).session_id
    await bench.cache.set_mapping(MappingCall(session, 1, Folded.of([AdapterRef.parse("a")])))
    bench.cache.unload(AdapterRef.parse("a"), force=False)
    snapshot = take_snapshot(bench.cache, 10, 1000.0)
    assert len(snapshot.layout.in_state(SlotState.DRAINING)) == 1
    assert snapshot.residents == ()
    assert snapshot.mappings == 1


async def test_pins_are_counted_by_their_owners() -> None:
    bench = start(2)
    await load(bench, "a", "/a")
    session = bench.cache.open_session(SessionTerms("engine", reserved_slots=1), None).session_id
    await bench.cache.hold(HoldTerms(HoldOwner(session, 1), None, slot=True), AdapterRef.parse("a"))
    for mapping_id in (1, 2):
        await bench.cache.set_mapping(MappingCall(session, mapping_id, Folded.of([AdapterRef.parse("a")])))
    snapshot = take_snapshot(bench.cache, 10, 1000.0)
    assert snapshot.pins == {"mapping": 2, "hold": 1}
    assert [(str(each.name), each.pins) for each in snapshot.residents] == [("a", 3)]
