"""Steps of one actor at the cache over fakes, for tests that say whose turn it is."""

from __future__ import annotations

import asyncio
from typing import Any

from slotcar_sidecar.core.bindings import OnConflict
from slotcar_sidecar.core.calls import Computed, ForwardCall, LoadCall, MappingCall
from slotcar_sidecar.core.folded import Folded
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.holds import Hold, HoldTerms
from slotcar_sidecar.core.ids import AdapterRef, SessionId, SlotId
from slotcar_sidecar.core.mapping import Mapping
from slotcar_sidecar.core.pins import HoldOwner, MappingOwner
from slotcar_sidecar.core.session import SessionTerms

from tests.fakes import planes
from tests.fakes.parts import SITE, Bench, at_once, make_bench, settle, vector

ENGINE = SessionTerms("engine", 10.0)


def ref(text: str) -> AdapterRef:
    return AdapterRef.parse(text)


def start_load(bench: Bench, name: str, content: str | None = None, **options: Any) -> asyncio.Task[Any]:
    """A load under way; with `content`, its folder has it first."""
    source = None
    if content is not None:
        source = f"/{name.partition('@')[0]}"
        bench.source.contents[source] = content
    on_conflict = OnConflict.REPLACE if options.get("replace") else OnConflict.FAIL
    rest = {key: options[key] for key in ("keep", "in_slot", "hold") if key in options}
    call = LoadCall(ref(name), source, on_conflict, **rest)
    return asyncio.get_running_loop().create_task(bench.cache.load(call))


async def finish(bench: Bench, *tasks: asyncio.Task[Any]) -> list[Any]:
    """Runs every job until the tasks are done; exceptions are results."""
    await settle()
    while not all(task.done() for task in tasks):
        pool = bench.load_pool if bench.load_pool.jobs else bench.compute_pool
        pool.run_one()
        await settle()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def loaded(bench: Bench, name: str, content: str | None = None, **options: Any) -> Any:
    (result,) = await finish(bench, start_load(bench, name, content, **options))
    if isinstance(result, BaseException):
        raise result
    return result


def open_session(bench: Bench, **terms: Any) -> SessionId:
    return bench.cache.open_session(SessionTerms("engine", 10.0, **terms), None).session_id


def map_names(bench: Bench, session: SessionId, *names: str | None, mapping_id: int = 0) -> Mapping:
    """A mapping of what is resident and free to be pinned; raises what refuses it."""
    return at_once(bench.cache.set_mapping(mapping_call(session, *names, mapping_id=mapping_id)))


def mapping_call(session: SessionId, *names: str | None, mapping_id: int = 0, **options: Any) -> MappingCall:
    refs = Folded.of(ref(name) if name else None for name in names)
    return MappingCall(session, mapping_id, refs, **options)


def start_map(bench: Bench, session: SessionId, *names: str | None, **options: Any) -> asyncio.Task[Mapping]:
    """A SetMapping under way."""
    call = mapping_call(session, *names, **options)
    return asyncio.get_running_loop().create_task(bench.cache.set_mapping(call))


async def mapped(bench: Bench, session: SessionId, *names: str | None, **options: Any) -> Mapping:
    (result,) = await finish(bench, start_map(bench, session, *names, **options))
    if isinstance(result, BaseException):
        raise result
    assert isinstance(result, Mapping)
    return result


def hold_terms(session: SessionId, hold_id: int = 1, *, seconds: float | None = None, slot: bool = False) -> HoldTerms:
    return HoldTerms(HoldOwner(session, hold_id), seconds, slot)


def start_hold(bench: Bench, session: SessionId, name: str, hold_id: int = 1, **terms: Any) -> asyncio.Task[Hold]:
    """A hold under way."""
    work = bench.cache.hold(hold_terms(session, hold_id, **terms), ref(name))
    return asyncio.get_running_loop().create_task(work)


async def held(bench: Bench, session: SessionId, name: str, hold_id: int = 1, **terms: Any) -> Hold:
    (result,) = await finish(bench, start_hold(bench, session, name, hold_id, **terms))
    if isinstance(result, BaseException):
        raise result
    assert isinstance(result, Hold)
    bench.cache.check_integrity()
    bench.cache.check_bytes()
    return result


def forward(bench: Bench, session: SessionId, mapping: Mapping, **changes: Any) -> asyncio.Task[Computed]:
    counts = changes.get("row_counts", [1] * len(mapping.entries))
    items = changes.get("items", [ForwardItem(SITE, vector(len(counts)))])
    generation = changes.get("generation", mapping.generation)
    call = ForwardCall(session, mapping.mapping_id, generation, counts, items, "unary", changes.get("rank", 0))
    return asyncio.get_running_loop().create_task(bench.cache.forward(call))


def read_by(computed: Computed) -> list[str]:
    return bytes(computed.outputs[0].data).decode().split("\n")


async def computed(bench: Bench, session: SessionId, mapping: Mapping, **changes: Any) -> Computed:
    """A Forward from begin to end over the bench's plane; what only gRPC can say goes over gRPC."""
    over = planes.OVER.get(bench.plane)
    known = bench.cache.sessions.peek(session)
    if over is not None and not changes and known is not None and known.mappings.get(mapping.mapping_id) is mapping:
        return over(bench, session, mapping)
    (result,) = await finish(bench, forward(bench, session, mapping, **changes))
    if isinstance(result, BaseException):
        raise result
    assert isinstance(result, Computed)
    return result


async def bench_with(slots: int, *names: str) -> Bench:
    """A bench that knows all names, of which the last ones are in slots."""
    bench = make_bench(slots)
    for name in names:
        await loaded(bench, name, name)
    return bench


async def run_all(bench: Bench) -> None:
    """Everything goes on until all that is left waits for another step of the test."""
    await settle()
    while bench.load_pool.jobs:
        bench.load_pool.run_one()
        await settle()


async def run_to_fills(bench: Bench) -> None:
    """Everything goes on until all that is left are writes of slots."""
    await settle()
    while others := [i for i, (_, fn, _) in enumerate(bench.load_pool.jobs) if fn != bench.device.fill]:
        bench.load_pool.run_one(others[0])
        await settle()


def pinned(bench: Bench, session: SessionId, mapping_id: int = 0) -> frozenset[SlotId]:
    return bench.cache.residency.pins.by(MappingOwner(session, mapping_id))
