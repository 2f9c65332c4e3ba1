"""Forwards over the fast planes, at the cache over fakes: a ring's thread, and a client that reads the slots itself."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Mapping

from slotcar_sidecar.cache.threads import Tell
from slotcar_sidecar.core.calls import Computed, ForwardCall
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import SessionId
from slotcar_sidecar.core.mapping import Mapping as Mapped
from slotcar_sidecar.core.tensor import Matrix

from tests.fakes.parts import SITE, TORN, Bench, FakeBatch, vector


def over_ring(bench: Bench, session: SessionId, mapping: Mapped) -> Computed:
    """As a thread of rings computes it."""
    return _in_thread(bench, session, mapping, lambda call: call())


async def start_over_ring(bench: Bench, session: SessionId, mapping: Mapped) -> Computed:
    """The same in a thread of its own, up to the midst of its kernel; a job of the compute pool ends it."""
    loop, begun, goes_on, device = asyncio.get_running_loop(), threading.Event(), threading.Event(), bench.device
    before, done = device.kernel, concurrent.futures.Future[Computed]()

    def kernel() -> None:
        if threading.current_thread() is not thread:
            return before()
        begun.set()
        goes_on.wait()
        return None

    def run() -> None:
        try:
            done.set_result(_in_thread(bench, session, mapping, loop.call_soon_threadsafe))
        except BaseException as error:
            done.set_exception(error)
        finally:
            begun.set()

    def end() -> Computed:
        goes_on.set()
        thread.join()
        return done.result()

    thread = threading.Thread(target=run)
    device.kernel = kernel
    thread.start()
    begun.wait()
    return await asyncio.shield(asyncio.wrap_future(done if done.done() else bench.compute_pool.submit(end)))


def _in_thread(bench: Bench, session: SessionId, mapping: Mapped, tell: Tell) -> Computed:
    forwards = bench.cache.in_thread(tell)
    try:
        items = [ForwardItem(SITE, vector(len(mapping.entries)))]
        counts = [1] * len(mapping.entries)
        call = ForwardCall(session, mapping.mapping_id, mapping.generation, counts, items, "ring")
        prepared = forwards.prepare(call)
        assert isinstance(prepared.batch, FakeBatch)
        try:
            layout = forwards.execute(prepared)
        finally:
            bench.device.forget(prepared.batch)
        return Computed(prepared.batch.outputs, mapping.digests, layout, 0.0, 0.0)
    finally:
        tell(lambda: bench.cache.end_thread(forwards))


def over_direct(bench: Bench, session: SessionId, mapping: Mapped) -> Computed:
    """As a client does that has the slots and the words that were published, and nothing else."""
    device = bench.device
    mapping.check_current(device.published or bench.cache.layout)
    read = [device.bytes[entry.slot] if entry else "" for entry in mapping.entries]
    layout = device.published or bench.cache.layout
    mapping.check_current(layout)
    assert TORN not in read
    output = Matrix("float32", len(read), 1, 1, "\n".join(read).encode())
    return Computed([output], mapping.digests, layout, 0.0, 0.0)


OVER: Mapping[str, Callable[[Bench, SessionId, Mapped], Computed]] = {"ring": over_ring, "direct": over_direct}
