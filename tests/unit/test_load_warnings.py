"""What people are told of a load that went on: what the slots lose, what the disk did not take, what is gone."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from slotcar.v1 import adapter_service_pb2 as pb
from slotcar.v1.adapter_pb2 import TIER_DISK, TIER_GONE, TIER_HOST, TIER_SOURCE
from slotcar_sidecar.core.calls import LoadCall, Loaded, PrefetchCall
from slotcar_sidecar.core.errors import SourceUnavailable
from slotcar_sidecar.core.reconcile import DesiredStatus
from slotcar_sidecar.rpc.adapter_service import AdapterService

from tests.fakes.disk import FakeFolder
from tests.fakes.parts import Bench, FakeUpload, digest_of, make_bench
from tests.fakes.steps import finish, loaded, mapped, open_session, ref

ALONE = "the disk tier did not take it: its bytes are in memory alone, and gone when the server ends"
IN_MEMORY = "the disk tier did not take it: it stays in memory, and after a restart its source is read again"


async def made(bench: Bench, call: LoadCall) -> Loaded:
    (result,) = await finish(bench, asyncio.get_running_loop().create_task(bench.cache.load(call)))
    assert isinstance(result, Loaded), result
    return result


async def uploaded(bench: Bench, name: str, **options: Any) -> Loaded:
    return await made(bench, LoadCall(ref(name), upload=FakeUpload(name), **options))


async def to_disk(bench: Bench, name: str) -> Loaded:
    bench.source.contents[f"/{name}"] = name
    return await made(bench, LoadCall(ref(name), f"/{name}", in_slot=False, on_disk=True))


def bench_on(folder: FakeFolder) -> Bench:
    return make_bench(2, folder=folder)  # type: ignore[arg-type]


def tier_of(bench: Bench, name: str) -> int:
    service = AdapterService(bench.cache, 1.0, DesiredStatus)
    return service._described(ref(name)).tier


# What the slots lose


async def test_what_the_slots_lose_is_looked_for_where_somebody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, seen = make_bench(1), []

    def losses(weights: Any) -> tuple[str, ...]:
        seen.append(str(weights.adapter.digest))
        return ("3 values are lost",)

    monkeypatch.setattr(bench.device, "losses", losses)
    assert (await loaded(bench, "a", "a")).warnings == ("3 values are lost",)
    await loaded(bench, "b", "b", in_slot=False)
    seen.clear()
    session = open_session(bench)
    await mapped(bench, session, "b", load=True)
    bench.cache.tiers.host.drop(digest_of("a"))
    await finish(bench, asyncio.ensure_future(bench.cache.prefetch(PrefetchCall([ref("a")], in_slot=False))))
    await finish(bench, asyncio.ensure_future(bench.cache.estimate("/a")))
    assert digest_of("a") in bench.cache.tiers.host
    assert seen == []


# What the disk did not take


@pytest.mark.parametrize("full", [True, False])
async def test_an_upload_that_the_disk_did_not_take_is_told_of(full: bool) -> None:
    folder = FakeFolder(10)
    folder.is_full = full
    bench = bench_on(folder)
    assert (await uploaded(bench, "a")).warnings == ((ALONE,) if full else ())
    assert (await uploaded(bench, "b", in_slot=False)).warnings == ((ALONE,) if full else ())


async def test_without_a_disk_there_is_nothing_to_tell() -> None:
    assert (await uploaded(make_bench(1), "a")).warnings == ()


async def test_what_was_to_stop_on_a_full_disk_stays_in_memory_and_says_so() -> None:
    folder = FakeFolder(10)
    folder.is_full = True
    bench = bench_on(folder)
    assert (await to_disk(bench, "a")).warnings == (IN_MEMORY,)
    assert tier_of(bench, "a") == TIER_HOST
    folder.is_full = False
    assert (await to_disk(bench, "a")).warnings == ()
    assert tier_of(bench, "a") == TIER_DISK


async def test_a_load_that_only_passes_the_disk_is_not_warned_of() -> None:
    folder = FakeFolder(10)
    folder.is_full = True
    assert (await loaded(bench_on(folder), "a", "a")).warnings == ()


async def test_an_upload_of_what_a_source_has_can_be_read_again() -> None:
    folder = FakeFolder(10)
    folder.is_full = True
    bench = bench_on(folder)
    await loaded(bench, "a", "a", in_slot=False)
    assert (await uploaded(bench, "a")).warnings == ()


# What is gone


async def test_an_upload_that_every_tier_has_lost_has_no_tier() -> None:
    folder = FakeFolder(10)
    bench = bench_on(folder)
    await uploaded(bench, "a", in_slot=False)
    await loaded(bench, "b", "b", in_slot=False)
    for name in ("a", "b"):
        bench.cache.tiers.host.drop(digest_of(name))
        folder.damaged.add(digest_of(name))
        assert tier_of(bench, name) == TIER_DISK
    del bench.source.contents["/b"]
    for name in ("a", "b"):
        with pytest.raises(SourceUnavailable):
            await loaded(bench, name)
    assert (tier_of(bench, "a"), tier_of(bench, "b")) == (TIER_GONE, TIER_SOURCE)
    service = AdapterService(bench.cache, 1.0, DesiredStatus)
    listed = await service.ListAdapters(pb.ListAdaptersRequest(), cast(Any, None))
    assert [adapter.tier for adapter in listed.adapters] == [TIER_GONE, TIER_SOURCE]
    await uploaded(bench, "a", in_slot=False)
    assert tier_of(bench, "a") == TIER_HOST
