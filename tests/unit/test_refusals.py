"""Refused calls leave nothing behind: their tensors and files are large, and the collector comes by when it likes.

An error whose traceback leads to a frame that still has the error, or its task, is a circle that only the collector
ends. To see it fail: keep the task in State.outliving.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator

import pytest
from slotcar_sidecar.core.calls import ForwardCall, LoadCall
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


async def circles(call: Callable[[], Awaitable[object]]) -> int:
    """How many objects a refused call leaves that only the collector can free."""
    with pytest.raises(SlotcarError):
        await call()
    await settle()
    gc.collect()
    refused = False
    try:
        await call()
    except SlotcarError:
        refused = True
    assert refused
    await settle()
    return gc.collect()


def forward_call(session: SessionId, mapping: Mapping, *, generation: int = 0, rows: int = 1) -> ForwardCall:
    items = [ForwardItem(SITE, vector(1))]
    return ForwardCall(session, mapping.mapping_id, generation or mapping.generation, [rows], items, "unary", 0)


async def test_a_forward() -> None:
    bench = await bench_with(2, "sql", "chat")
    session = open_session(bench)
    mapping = map_names(bench, session, "sql")
    for changes in ({"rows": 2}, {"generation": mapping.generation + 1}):
        call = forward_call(session, mapping, **changes)
        assert await circles(lambda call=call: bench.cache.forward(call)) == 0  # type: ignore[misc]
    bench.cache.unload(ref("sql"), force=True)
    assert await circles(lambda: bench.cache.forward(forward_call(session, mapping))) == 0


async def test_a_load() -> None:
    bench = await bench_with(2, "sql", "chat")
    bench.source.contents["/other"] = "other"
    assert await circles(lambda: _loaded(bench, LoadCall(ref("sql"), "/other"))) == 0
    assert await circles(lambda: _loaded(bench, LoadCall(ref("new"), "/nowhere"))) == 0


async def _loaded(bench: Bench, call: LoadCall) -> None:
    tasks = [asyncio.get_running_loop().create_task(bench.cache.load(call))]
    await run_all(bench)
    await tasks.pop()


async def test_a_mapping() -> None:
    bench = await bench_with(1, "sql", "chat")
    session = open_session(bench)
    for name in ("nobody", "sql"):
        assert await circles(lambda name=name: bench.cache.set_mapping(mapping_call(session, name))) == 0  # type: ignore[misc]
