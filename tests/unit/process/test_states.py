"""The state that the page shows is that of one moment, bounded, and tells no secret."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time

import pytest
from slotcar_sidecar.core.adapter import Adapter, SiteLora
from slotcar_sidecar.core.bindings import Binding
from slotcar_sidecar.core.calls import LoadCall, MappingCall
from slotcar_sidecar.core.errors import SlotcarError
from slotcar_sidecar.core.folded import Folded
from slotcar_sidecar.core.holds import HoldTerms
from slotcar_sidecar.core.ids import AdapterName, AdapterRef, Digest
from slotcar_sidecar.core.pins import HoldOwner
from slotcar_sidecar.core.reconcile import DesiredStatus
from slotcar_sidecar.core.session import SessionTerms
from slotcar_sidecar.ops.page import render
from slotcar_sidecar.ops.recent import LoadLog
from slotcar_sidecar.ops.state import Most, State
from slotcar_sidecar.process.states import Facts, FollowedFiles, StateTaker
from slotcar_sidecar.rpc.health import Phase

from tests.fakes.parts import Bench, make_bench, settle

MANY = 10_000
RESIDENT = 64


def start(slots: int) -> tuple[Bench, StateTaker]:
    bench = make_bench(slots, fills_only=True)
    bench.source.contents |= {f"/{name}": name for name in "abcdefgh"}
    facts = Facts("host", "1", "cpu", "fake", "lru", ("stream",))
    loads = LoadLog(bench.clock)
    taker = StateTaker(
        bench.cache, facts, lambda: Phase.SERVING, lambda _: DesiredStatus(), bench.clock, bench.clock(), loads
    )
    bench.cache.events.listeners.append(taker.names.note)
    return bench, taker


async def load(bench: Bench, name: str, source: str) -> None:
    task = asyncio.create_task(bench.cache.load(LoadCall(AdapterRef.parse(name), source)))
    await settle()
    while bench.load_pool.jobs:
        bench.load_pool.run_one()
        await settle()
    await task


async def map_and_hold(bench: Bench, name: str) -> str:
    """Mapping 3 and hold 9 of a new session; returns its secret id."""
    ref = AdapterRef.parse(name)
    session_id = bench.cache.open_session(SessionTerms("engine", reserved_slots=1), None).session_id
    await bench.cache.set_mapping(MappingCall(session_id, 3, Folded.of([ref])))
    await bench.cache.hold(HoldTerms(HoldOwner(session_id, 9), None, slot=True), ref)
    return session_id.value


def register(bench: Bench, count: int) -> None:
    """Names whose adapters are in no slot."""
    for number in range(count):
        digest = Digest(f"sha256:{number:064x}")
        adapter = Adapter(digest, (SiteLora("layer", 1, 1.0, 1, 1),), 4, "float32", f"/source/{number}")
        bench.cache.residency.bind(adapter, Binding(AdapterName(f"customer/{number:05}"), in_slot=False))


async def test_who_pins_what_is_by_the_part_of_a_session_that_others_may_see() -> None:
    bench, taker = start(3)
    await load(bench, "a", "/a")
    await load(bench, "a-too", "/a")
    secret = await map_and_hold(bench, "a")
    state = taker.take()
    first = state.slots[0]
    assert (first.state, first.names, first.pin_count) == ("occupied", ("a", "a-too"), 2)
    assert [(pin.client_name, pin.owner, pin.owner_id) for pin in first.pins] == [
        ("engine", "mapping", 3),
        ("engine", "hold", 9),
    ]
    (session,) = state.sessions
    (mapping,), (hold,) = session.mappings, session.holds
    assert (mapping.refs, mapping.slots, mapping.is_pinned, mapping.is_current) == ((hold.ref,), (0,), True, True)
    assert session.session == secret[:8]
    assert [(adapter.name, adapter.slot) for adapter in state.adapters] == [("a", 0), ("a-too", 0)]


async def test_when_a_slot_was_used_and_why_a_name_left_its_own() -> None:
    bench, taker = start(1)
    await load(bench, "a", "/a")
    taker.note_uses()
    bench.clock.now += 30
    assert taker.take().slots[0].used_seconds == 30
    await load(bench, "b", "/b")
    state = taker.take()
    assert (state.slots[0].names, state.slots[0].used_seconds) == (("b",), 0)
    (left,) = [adapter for adapter in state.adapters if adapter.name == "a"]
    assert left.left is not None
    assert left.left.cause == "slot taken by b"
    assert left.used_seconds is None


async def test_a_name_that_was_refused_is_there_though_nobody_knows_it() -> None:
    bench, taker = start(1)
    with pytest.raises(SlotcarError):
        await load(bench, "nothing", "/nowhere")
    (refused,) = taker.take().adapters
    assert (refused.name, refused.tier, refused.digest) == ("nothing", "none", "")
    assert refused.failure is not None
    assert [notice.what for notice in taker.take().attention] == ["nothing"]


async def test_files_that_no_longer_serve_need_a_look() -> None:
    bench, before = start(1)
    ends = {"server": bench.clock(), "client_ca": bench.clock() + 1.0}
    files = FollowedFiles(lambda: ends, lambda: {"policy": "policy.yaml is no YAML"})
    state = dataclasses.replace(before, files=files).take()
    assert [notice.what for notice in state.attention] == ["The certificate server", "What the files of the policy say"]
    assert "policy.yaml is no YAML" in state.attention[1].text
    assert state.plain()["certificates"] == ends


async def test_it_waits_for_its_model() -> None:
    bench = make_bench(1, model=None)
    taker = start(1)[1]
    waiting = StateTaker(
        bench.cache, taker.facts, taker.phase, taker.desired, bench.clock, bench.clock(), taker.loads
    ).take()
    assert waiting.server.readiness == "waits for a ModelSpec"
    assert waiting.attention[0].text == "is not ready for work: waits for a ModelSpec"


async def test_thousands_of_adapters_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    """It takes the owner's thread for as long as is printed; run with -s to see it."""
    bench, taker = start(RESIDENT)
    bench.cache.residency.names._max_names, bench.cache.sessions._max_sessions = MANY, MANY
    for number in range(RESIDENT):
        bench.source.contents[f"/r{number}"] = f"r{number}"
        await load(bench, f"resident-{number}", f"/r{number}")
    register(bench, MANY - RESIDENT)
    for number in range(4 * Most.SESSIONS):
        session_id = bench.cache.open_session(SessionTerms(f"engine {number}"), None).session_id
        refs = Folded.of([AdapterRef.parse(f"resident-{each}") for each in range(RESIDENT)])
        for mapping_id in range(2):
            await bench.cache.set_mapping(MappingCall(session_id, mapping_id, refs))
    begun = time.perf_counter()
    state = taker.take()
    took = time.perf_counter() - begun
    check_bounds(state)
    assert [adapter.slot is not None for adapter in state.adapters[:RESIDENT]] == [True] * RESIDENT
    assert state.left_out["adapters"] == MANY - Most.ADAPTERS
    assert state.left_out["sessions"] == 3 * Most.SESSIONS
    page, data = render(state).text, json.dumps(state.plain())
    with capsys.disabled():
        print(f"\n{took * 1000:.1f} ms, a page of {len(page) >> 10} KiB, {len(data) >> 10} KiB of data")
    assert len(page) < 1 << 20
    assert len(data) < 1 << 20


def check_bounds(state: State) -> None:
    assert len(state.slots) <= Most.SLOTS
    assert all(len(slot.pins) <= Most.PINS for slot in state.slots)
    assert len(state.adapters) <= Most.ADAPTERS + Most.REFUSED
    assert len(state.sessions) <= Most.SESSIONS
    for session in state.sessions:
        assert len(session.mappings) <= Most.MAPPINGS
        assert all(len(mapping.refs) <= Most.REFS for mapping in session.mappings)
    assert len(state.events) <= Most.EVENTS
    assert len(state.loads) <= Most.LOADS
