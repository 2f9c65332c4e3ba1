"""No Forward waits for a loader, and if one did, it would be counted."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from slotcar_sidecar.cache.state import State
from slotcar_sidecar.core.calls import ForwardCall, LoadCall, MappingCall, PrefetchCall
from slotcar_sidecar.core.folded import Folded
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import AdapterRef
from slotcar_sidecar.core.mapping import Mapping
from slotcar_sidecar.core.ports import Environment
from slotcar_sidecar.core.session import SessionTerms

from tests.fakes.parts import SITE, Bench, SilentObserver, make_bench, settle, vector
from tests.fakes.planes import start_over_ring


class Observer(SilentObserver):
    """Counts the Forwards that waited."""

    def __init__(self) -> None:
        self.waited = 0

    def forward_waited(self) -> None:
        self.waited += 1


def watch(bench: Bench, **changes: Any) -> Observer:
    """Puts an observer, and other parts of the environment, into a cache that does nothing yet."""
    observer = Observer()
    environment: Environment = replace(bench.cache.environment, observer=observer, **changes)
    state: State = bench.cache._state
    state.environment = bench.cache.environment = environment
    state.waits._environment = environment
    return observer


async def ready() -> tuple[Bench, ForwardCall, Mapping]:
    """Three slots, a session with a mapping of "a", and a Forward for it."""
    bench = make_bench(3, fills_only=True)
    for name in "abc":
        bench.source.contents[f"/{name}"] = name
        work = asyncio.create_task(bench.cache.load(LoadCall(AdapterRef.parse(name), f"/{name}", in_slot=name == "a")))
        await settle()
        while bench.load_pool.jobs:
            bench.load_pool.run_one()
            await settle()
        await work
    session = bench.cache.open_session(SessionTerms("engine"), None).session_id
    mapping = await bench.cache.set_mapping(MappingCall(session, 1, Folded.of([AdapterRef.parse("a")])))
    items = [ForwardItem(SITE, vector(1))]
    return bench, ForwardCall(session, 1, mapping.generation, [1], items, "unary"), mapping


async def test_forwards_end_while_all_loaders_stand_still() -> None:
    bench, call, mapping = await ready()
    observer = watch(bench)
    loads = [asyncio.create_task(bench.cache.load(LoadCall(AdapterRef.parse(name), f"/{name}"))) for name in "bbb"]
    loads.append(asyncio.create_task(bench.cache.prefetch(PrefetchCall([AdapterRef.parse("c")]))))  # type: ignore[arg-type]
    await settle()
    assert bench.load_pool.jobs
    for work in (bench.cache.forward(call), start_over_ring(bench, call.session, mapping)):
        task = asyncio.ensure_future(work)
        await settle()
        while bench.compute_pool.jobs:
            bench.compute_pool.run_one()
            await settle()
        assert (await task).digests == mapping.digests
    assert not any(load.done() for load in loads)
    assert observer.waited == 0
    while bench.load_pool.jobs:
        bench.load_pool.run_one()
        await settle()
    await asyncio.gather(*loads)
    assert observer.waited == 0


async def test_a_forward_behind_the_jobs_of_loaders_is_counted() -> None:
    """The fault would be one pool for both."""
    bench, call, _ = await ready()
    with ThreadPoolExecutor(1) as pool:
        observer = watch(bench, load_pool=pool, compute_pool=pool)
        await bench.cache.forward(call)
    assert observer.waited == 1


@pytest.mark.parametrize("what", ["fill", "bytes", "load"])
async def test_a_forward_that_awaits_what_a_load_does_is_counted(what: str) -> None:
    """The fault would be a Forward that makes resident what it misses."""
    bench, call, mapping = await ready()
    observer, loads = watch(bench), bench.cache._loads
    ref = AdapterRef(AdapterRef.parse("a").name, mapping.entries.table[0].digest)  # type: ignore[union-attr]
    waits = {
        "fill": lambda: loads.filled(ref.digest),
        "bytes": lambda: loads.bytes_of(ref),
        "load": lambda: loads.load(LoadCall(ref)),
    }
    forward = bench.cache._forwards._forward

    async def impatient(call: ForwardCall) -> Any:
        await waits[what]()
        return await forward(call)

    bench.cache._forwards._forward = impatient  # type: ignore[method-assign]
    work = asyncio.create_task(bench.cache.forward(call))
    await settle()
    while bench.compute_pool.jobs:
        bench.compute_pool.run_one()
        await settle()
    await work
    assert observer.waited >= 1


async def test_what_is_no_forward_is_not_counted() -> None:
    bench, _, _ = await ready()
    observer = watch(bench)
    await bench.cache.load(LoadCall(AdapterRef.parse("a"), "/a"))
    await bench.cache.prefetch(PrefetchCall([AdapterRef.parse("a")]))
    assert observer.waited == 0
