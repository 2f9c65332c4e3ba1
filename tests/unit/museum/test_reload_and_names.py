"""Faults by which a name has bytes that are not the ones it was given last, or none at all."""

from __future__ import annotations

import pytest
from slotcar_sidecar.core.errors import (
    AdapterConflict,
    AdapterInvalid,
    DigestMismatch,
    SlotsExhausted,
    SourceUnavailable,
)
from slotcar_sidecar.core.ids import SlotId

from tests.fakes.parts import digest_of, make_bench
from tests.fakes.steps import computed, finish, loaded, map_names, mapped, open_session, read_by, ref, start_load
from tests.fakes.weights import fake_weights
from tests.tolerances import assert_close, assert_same_bits
from tests.unit.museum.shared import SPEC, delta, device, digest, start_load_from, truth, uploaded, weights_file


async def test_new_bytes_under_an_old_name_are_never_the_old() -> None:
    """vllm#42125, sglang#8263. New bytes are a conflict or a replacement, and what was read is known by its digest.

    To see it fail: leave the comparison with `wanted` out of StoreTiers.from_source.
    """
    bench = make_bench(3)
    await loaded(bench, "a", "old")
    session = open_session(bench)
    with pytest.raises(AdapterConflict):
        await loaded(bench, "a", "new")
    assert (await loaded(bench, "a", "new", replace=True)).resident.adapter.digest == digest_of("new")
    assert read_by(await computed(bench, session, map_names(bench, session, "a"))) == [digest("new")]
    bench.source.contents["/a"] = "newest"
    (same,) = await finish(bench, start_load(bench, "a"))
    assert same.resident.adapter.digest == digest_of("new")
    bench.cache.tiers.host.drop(digest_of("new"))
    bench.cache.unload(ref("a"), force=False)
    with pytest.raises(DigestMismatch):
        await loaded(bench, f"a@{digest('new')}", "newest")


async def test_new_bytes_that_are_uploaded_under_an_old_name_are_never_the_old() -> None:
    """vllm#42125, sglang#8263. An upload replaces a folder's adapter, the place it came from, and another upload.

    To see it fail: let Names.bind keep the source of a name whose digest changes.
    """
    bench = make_bench(2)
    await loaded(bench, "a", "old")
    with pytest.raises(AdapterConflict):
        await uploaded(bench, "a", weights_file(1))
    session = open_session(bench)
    for seed in (1, 2):
        new = (await uploaded(bench, "a", weights_file(seed), replace=True)).resident
        assert (new.adapter.digest, new.source) != (digest_of("old"), "/a")
        assert new.source == ""
        for other in ("x", "y"):
            await loaded(bench, other, other)
        assert bench.cache.residency.describe(ref("a")).slot is None
        mapping = await mapped(bench, session, "a", load=True)
        assert read_by(await computed(bench, session, mapping)) == [str(new.adapter.digest)]
        bench.cache.release_mapping(session, 0)


def test_scaling_is_applied_once_however_often_a_slot_is_filled() -> None:
    """SkyRL#2250. The scale is no part of the bytes, in memory or in a slot.

    To see it fail: multiply host.b by the scale in CpuDevice.fill, in place.
    """
    target, weights, site = device(), fake_weights(SPEC, {"k": 4, "q": 4}, seed=3), SPEC.by_name["q"]
    target.fill(SlotId(0), weights)
    x, first = delta(target, 0, site)
    for slot in (1, 0, 1):
        target.fill(SlotId(slot), fake_weights(SPEC, {"q": 32}, seed=4))
        target.fill(SlotId(slot), weights)
        assert_same_bits(delta(target, slot, site)[1], first)
    assert_close(first, truth(weights, site, x))


async def test_a_failed_reload_leaves_the_old() -> None:
    """SkyRL#2129. A replacement that cannot be written leaves the name with what it had.

    To see it fail: call residency.bind before make_resident in Loads._place.
    """
    bench = make_bench(2)
    await loaded(bench, "a", "old")
    session = open_session(bench)
    bench.device.fail_fill = RuntimeError("the device refused the write")
    with pytest.raises(RuntimeError):
        await loaded(bench, "a", "new", replace=True)
    bench.device.fail_fill = None
    assert read_by(await computed(bench, session, map_names(bench, session, "a"))) == [digest("old")]
    bench.cache.check_integrity()


async def test_a_reload_without_a_file_or_without_room_leaves_the_old() -> None:
    """SkyRL#2129. Nor does one that cannot be read, is no adapter, or finds every slot pinned, touch name or keep.

    To see it fail: unbind the name in Loads._load before _find_weights.
    """
    bench = make_bench(2)
    await loaded(bench, "a", "old", keep=True)
    await loaded(bench, "b", "b")
    session = open_session(bench)
    map_names(bench, session, "b", mapping_id=1)
    with pytest.raises(SlotsExhausted):
        await loaded(bench, "a", "new", replace=True)
    del bench.source.contents["/a"]
    with pytest.raises(AdapterInvalid):
        await uploaded(bench, "a", bytes(100), replace=True)
    (unread,) = await finish(bench, start_load_from(bench, "a", "/a", replace=True))
    assert isinstance(unread, SourceUnavailable)
    assert bench.cache.residency.describe(ref("a")).keep
    assert read_by(await computed(bench, session, map_names(bench, session, "a"))) == [digest("old")]
    bench.cache.check_integrity()


async def test_the_source_is_not_read_again_at_every_step() -> None:
    """SkyRL#1606. A replacement is read once, however often it is mapped, computed and loaded by its name.

    To see it fail: leave out from_host in Reads._nearby.
    """
    bench = make_bench(2)
    await loaded(bench, "a", "old")
    await loaded(bench, "a", "new", replace=True)
    reads = len(bench.source.reads)
    session = open_session(bench)
    for _ in range(3):
        await computed(bench, session, map_names(bench, session, "a"))
        await computed(bench, session, await mapped(bench, session, "a", load=True))
        await loaded(bench, "a")
    assert len(bench.source.reads) == reads == 2
