"""Refused calls leave nothing behind: their tensors and files are large, and the collector comes by when it likes.

An error whose traceback leads to a frame that still has the error, or its task, is a circle that only the collector
ends. To see it fail: keep the task in State.outliving.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import pytest
from slotcar_sidecar.core.calls import ForwardCall, LoadCall, MappingCall
from slotcar_sidecar.core.errors import SlotcarError
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import SessionId
from slotcar_sidecar.core.mapping import Mapping

from tests.fakes.parts import SITE, Bench, settle, vector
from tests.fakes.steps import bench_with, map_names, mapping_call, open_session, ref, run_all


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def left_by(call: Callable[[], Awaitable[object]], kind: type) -> int:
    """How many requests of a kind are there after a refused call that were not there before."""
    before = _count(kind)
    refused = False
    try:
        await call()
    except SlotcarError:  # pytest.raises would keep it
        refused = True
    assert refused
    await settle()
    return _count(kind) - before


def _count(kind: type) -> int:
    return sum(type(each) is kind for each in gc.get_objects())


def forward_call(session: SessionId, mapping: Mapping, *, generation: int = 0, rows: int = 1) -> ForwardCall:
    items = [ForwardItem(SITE, vector(1))]
    return ForwardCall(session, mapping.mapping_id, generation or mapping.generation, [rows], items, "unary", 0)


async def test_a_forward() -> None:
    bench = await bench_with(2, "sql", "chat")
    session = open_session(bench)
    mapping = map_names(bench, session, "sql")

    async def refused(**changes: int) -> int:
        return await left_by(lambda: bench.cache.forward(forward_call(session, mapping, **changes)), ForwardCall)

    assert await refused(rows=2) == 0
    assert await refused(generation=mapping.generation + 1) == 0
    bench.cache.unload(ref("sql"), force=True)
    assert await refused() == 0


async def test_a_load() -> None:
    bench = await bench_with(2, "sql", "chat")
    bench.source.contents["/other"] = "other"
    assert await left_by(lambda: _loaded(bench, "sql", "/other"), LoadCall) == 0
    assert await left_by(lambda: _loaded(bench, "new", "/nowhere"), LoadCall) == 0


async def _loaded(bench: Bench, name: str, source: str) -> None:
    tasks = [asyncio.get_running_loop().create_task(bench.cache.load(LoadCall(ref(name), source)))]
    await run_all(bench)
    await tasks.pop()


async def test_a_mapping() -> None:
    bench = await bench_with(1, "sql", "chat")
    session = open_session(bench)
    for name in ("nobody", "sql"):
        assert await left_by(partial(_mapped, bench, session, name), MappingCall) == 0


async def _mapped(bench: Bench, session: SessionId, name: str) -> None:
    await bench.cache.set_mapping(mapping_call(session, name))
