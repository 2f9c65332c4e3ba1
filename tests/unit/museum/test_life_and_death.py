"""Faults by which the end of one client, call or server is more than its own."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from slotcar.v1 import engine_service_pb2 as pb
from slotcar.v1 import layout_pb2
from slotcar_client.entries import parse_entries
from slotcar_client.errors import AuditFailed
from slotcar_client.protocol import check_forward, read_mapping
from slotcar_sidecar.core.errors import (
    AdapterInvalid,
    AdapterNotFound,
    LayoutStale,
    Reason,
    SessionNotFound,
    SlotcarError,
    SlotsExhausted,
    SourceUnavailable,
)
from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.layout import SlotState
from slotcar_sidecar.core.pins import MappingOwner
from slotcar_sidecar.rpc.interceptors import ErrorInterceptor
from slotcar_sidecar.rpc.status import DETAILS_KEY

from tests.fakes.parts import SITE, Bench, digest_of, make_bench, settle
from tests.fakes.steps import (
    computed,
    finish,
    forward,
    held,
    loaded,
    map_names,
    open_session,
    read_by,
    ref,
    start_load,
    start_map,
)
from tests.unit.access.test_tls import SAN, serving
from tests.unit.museum.shared import digest, uploaded, weights_file


async def bench_with(slots: int, *names: str) -> Bench:
    """A bench that knows all names, of which the last ones are in slots."""
    bench = make_bench(slots)
    for name in names:
        await loaded(bench, name, name)
    return bench


async def test_a_client_that_dies_with_pins() -> None:
    """LMCache#5265. When its grace has passed its slot is as good as any.

    To see it fail: leave out the releases in AdapterCache.close_session.
    """
    bench = await bench_with(1, "a")
    session_id = open_session(bench)
    mapping = map_names(bench, session_id, "a")
    session = bench.cache.sessions.get(session_id)
    assert session.attachment is not None
    bench.cache.detach_session(session, session.attachment)
    bench.clock.now += 9
    bench.cache.expire()
    with pytest.raises(SlotsExhausted):
        await loaded(bench, "b", "b")
    bench.clock.now += 1
    bench.cache.expire()
    await loaded(bench, "b", "b")
    with pytest.raises(SessionNotFound):
        await computed(bench, session_id, mapping)


async def test_a_client_that_dies_with_all_that_it_can_have() -> None:
    """LMCache#5265. A hold, a reservation and a place in the queue end with their session, and the next is served.

    To see it fail: leave out release_hold, or reserved.pop, in AdapterCache.close_session.
    """
    bench = await bench_with(2, "a", "b", "c")
    dead, holder, third = open_session(bench, reserved_slots=1), open_session(bench), open_session(bench)
    assert (await held(bench, dead, "b", slot=True)).slot
    map_names(bench, holder, "c")
    dying = start_map(bench, dead, "a", "b", load=True, wait_seconds=600.0)
    await settle()
    behind = start_map(bench, third, "a", load=True, wait_seconds=600.0)
    await settle()
    assert bench.cache.capacity().waiting == 2
    session = bench.cache.sessions.get(dead)
    assert session.attachment is not None
    bench.cache.detach_session(session, session.attachment)
    bench.clock.now += 10
    bench.cache.expire()
    result, mapping = await finish(bench, dying, behind)
    assert isinstance(result, SessionNotFound)
    assert read_by(await computed(bench, third, mapping)) == [digest("a")]
    assert not len(bench.cache.residency.holds)
    assert (bench.cache.capacity().waiting, bench.cache.capacity().reserved) == (0, 0)
    bench.cache.check_integrity()


async def test_a_client_that_comes_back_finds_what_it_had() -> None:
    """LMCache#5265. A session that was resumed does not end with the stream that it had before.

    To see it fail: leave the attachment out of Sessions.detach.
    """
    bench = await bench_with(1, "a")
    session_id = open_session(bench)
    mapping = map_names(bench, session_id, "a")
    session = bench.cache.sessions.get(session_id)
    before = session.attachment
    assert before is not None
    bench.cache.resume_session(session_id, None)
    bench.cache.detach_session(session, before)
    bench.clock.now += 20
    bench.cache.expire()
    assert read_by(await computed(bench, session_id, mapping)) == [digest("a")]
    with pytest.raises(SlotsExhausted):
        await loaded(bench, "b", "b")


async def test_a_restarted_server_reuses_a_number() -> None:
    """cilium#38654. The same steps in another life give the same generation, and what is of the old life is refused.

    To see it fail: compare only generations in Mapping.check_current.
    """
    lives = [make_bench(1, life=life) for life in (1, 2)]
    sessions = []
    for bench in lives:
        await loaded(bench, "a", "a")
        sessions.append(open_session(bench))
    old, new = (map_names(bench, session, "a") for bench, session in zip(lives, sessions, strict=True))
    assert (old.generation, old.entries) == (new.generation, new.entries)
    new.check_current(lives[1].cache.layout)
    with pytest.raises(LayoutStale):
        old.check_current(lives[1].cache.layout)
    with pytest.raises(SessionNotFound):
        await computed(lives[1], sessions[0], old)


def test_a_client_notices_the_number_of_another_life() -> None:
    """cilium#38654. An answer with the same generation and the same digests, of another epoch, is not taken.

    To see it fail: leave the epoch out of check_forward of the client's protocol.
    """
    answer = pb.SetMappingResponse(generation=7, layout=layout_pb2.LayoutVersion(epoch="one", generation=7))
    answer.entries.add(digest=digest("a"), slot=0)
    mapping = read_mapping(1, parse_entries([("a", 1)]), answer)
    request, response = pb.ForwardRequest(row_counts=[1]), pb.ForwardResponse(digests=[digest("a")])
    request.items.add(site=SITE).x.rows = 1
    response.outputs.add(rows=1)
    for epoch, accepted in (("one", True), ("two", False)):
        response.layout.CopyFrom(layout_pb2.LayoutVersion(epoch=epoch, generation=7))
        if accepted:
            check_forward(mapping, request, response)
            continue
        with pytest.raises(AuditFailed):
            check_forward(mapping, request, response)


@pytest.mark.parametrize("force", [False, True])
async def test_unload_while_in_flight(force: bool) -> None:
    """Triton server#3207, Triton server#7688. An unload answers at once, and the slot is written when it is not read.

    To see it fail: call unread.set at once in Loads._fill, and do not ask Marks.when_unread.
    """
    bench = await bench_with(1, "a")
    session = open_session(bench)
    flying = forward(bench, session, map_names(bench, session, "a"))
    await settle()
    unloaded = bench.cache.unload(ref("a"), force=force)
    assert unloaded.slot_state is (SlotState.FREE if force else SlotState.DRAINING)
    bench.cache.close_session(session)
    loading = start_load(bench, "b", "b")
    await settle()
    bench.load_pool.run_one()
    await settle()
    assert not bench.load_pool.jobs, "the slot is still read"
    result, _ = await finish(bench, flying, loading)
    assert isinstance(result, LayoutStale)
    assert not bench.device.written_while_read


async def test_unload_while_in_flight_with_nobody_waiting_for_the_slot() -> None:
    """Triton server#3207, Triton server#7688. What is in flight ends as it began, and then the slot is free.

    To see it fail: let Residency.unload end the pins without force.
    """
    bench = await bench_with(1, "a")
    session = open_session(bench)
    flying = forward(bench, session, map_names(bench, session, "a"))
    await settle()
    bench.cache.unload(ref("a"), force=False)
    assert bench.cache.residency.pins.by(MappingOwner(session, 0)) == {SlotId(0)}
    (result,) = await finish(bench, flying)
    assert read_by(result) == [digest("a")]
    bench.cache.close_session(session)
    assert bench.cache.layout.in_state(SlotState.FREE) == (0,)


async def test_a_fence_ends_with_the_last_kernel_that_its_caller_gave_up() -> None:
    """Triton server#3207, Triton server#7688. What an refusals call uses is in use until its kernel ends, no longer.

    To see it fail: give State.outliving no group in Forwards.forward.
    """
    bench = await bench_with(1, "a")
    session = open_session(bench)
    refusals = forward(bench, session, map_names(bench, session, "a"))
    await settle()
    refusals.cancel()
    fence = asyncio.get_running_loop().create_task(bench.cache.fence(session))
    await settle()
    assert not fence.done()
    bench.compute_pool.run_one()
    await settle()
    assert fence.done()
    await bench.cache.fence(session)


async def test_one_bad_adapter_does_not_hold_up_the_rest() -> None:
    """gateway-api-inference-extension#584. A load that failed stands in no other's way, nor in its own next time.

    To see it fail: leave the fill in Loads._fills when it failed.
    """
    bench = make_bench(2)
    bad = start_load(bench, "missing")
    bench.device.fail_fill = RuntimeError("the device refused the write")
    broken = start_load(bench, "broken", "broken")
    results = await finish(bench, bad, broken)
    assert [type(result) for result in results] == [AdapterNotFound, RuntimeError]
    bench.device.fail_fill = None
    for name in ("broken", "good"):
        await loaded(bench, name, name)
    bench.cache.check_integrity()


async def test_one_bad_adapter_in_a_set_does_not_hold_up_who_waits_behind() -> None:
    """gateway-api-inference-extension#584. A set that cannot be loaded leaves the queue, and nothing in the slots.

    To see it fail: leave out queue.remove in Mappings.set.
    """
    bench = await bench_with(2, "bad", "good", "c", "d")
    bench.cache.tiers.host.drop(digest_of("bad"))
    del bench.source.contents["/bad"]
    holder, session = open_session(bench), open_session(bench)
    map_names(bench, holder, "c", "d")
    first = start_map(bench, open_session(bench), "good", "bad", load=True, wait_seconds=600.0)
    await settle()
    second = start_map(bench, session, "good", load=True, wait_seconds=600.0)
    await settle()
    bench.cache.release_mapping(holder, 0)
    refused, mapping = await finish(bench, first, second)
    assert isinstance(refused, SourceUnavailable)
    assert read_by(await computed(bench, session, mapping)) == [digest("good")]
    assert bench.cache.capacity().waiting == 0
    bench.cache.check_integrity()


async def test_bad_uploads_do_not_hold_up_a_good_one() -> None:
    """gateway-api-inference-extension#584. As many as may be under way can fail, again and again, and leave the room.

    To see it fail: leave out `self._uploads -= 1` in Loads.upload.
    """
    bench = make_bench(1)
    for _ in range(9):
        with pytest.raises(AdapterInvalid):
            await uploaded(bench, "a", bytes(100))
    assert (await uploaded(bench, "a", weights_file(1))).resident.slot == 0


async def test_a_refusal_is_its_own_reason_and_no_crash(caplog: pytest.LogCaptureFixture) -> None:
    """grpc#36009. A refusal has its row of the error table and no log; a fault of our own is INTERNAL and says no more.

    To see it fail: count every exception as InternalError in ErrorInterceptor.counted.
    """
    counted: list[tuple[str, str]] = []
    interceptor = ErrorInterceptor(1 << 20, lambda method, reason: counted.append((method, reason)))
    refusals: list[tuple[grpc.StatusCode, str]] = []

    class Context:
        def set_code(self, code: grpc.StatusCode) -> None:
            self.code = code

        def set_details(self, message: str) -> None:
            refusals.append((self.code, message))

        def set_trailing_metadata(self, details: Any) -> None:
            assert [key for key, _ in details] == [DETAILS_KEY]

    async def end(error: Exception) -> None:
        async def handler(request: Any, context: Any) -> Any:
            raise error

        assert await interceptor._unary("Call", handler)(Empty(), Context()) is None

    errors: list[SlotcarError] = [SessionNotFound(), AdapterNotFound("a"), SlotsExhausted("none")]
    for error in errors:
        await end(error)
    assert [reason for _, reason in counted] == [error.reason.value for error in errors]
    assert grpc.StatusCode.INTERNAL not in [code for code, _ in refusals]
    assert not caplog.records
    await end(ZeroDivisionError("secret"))
    assert counted[-1] == ("Call", Reason.INTERNAL.value)
    assert refusals[-1][0] is grpc.StatusCode.INTERNAL
    assert "secret" not in refusals[-1][1]
    assert len(caplog.records) == 1


async def test_a_certificate_that_was_rotated_is_loaded(tmp_path: Path) -> None:
    """vault#15389. The next connection is shown the new one, without a restart.

    To see it fail: let Certificates.credentials give gRPC the first pair for good.
    """
    async with serving(tmp_path, SAN) as server:
        look = ssl.get_server_certificate
        shown = [await asyncio.to_thread(look, ("localhost", server.port))]
        server.renew()
        server.certificates.read()
        shown.append(await asyncio.to_thread(look, ("localhost", server.port)))
    assert shown[0] != shown[1]
    assert shown[1] == (tmp_path / "tls.crt").read_text(encoding="utf-8")
