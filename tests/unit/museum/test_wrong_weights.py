"""Faults by which rows are computed with weights that are not their adapter's."""

from __future__ import annotations

import pytest
import torch
from slotcar_kernels.plan import plan_rows
from slotcar_kernels.reference import lora_rows
from slotcar_sidecar.core.errors import AdapterConflict, AdapterNotFound, AdapterNotResident, LayoutStale, ShapeMismatch
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.layout import SlotState

from tests.fakes.parts import SITE, make_bench, settle, vector
from tests.fakes.steps import (
    computed,
    finish,
    forward,
    loaded,
    map_names,
    mapped,
    open_session,
    read_by,
    ref,
    start_load,
)
from tests.fakes.weights import fake_weights
from tests.kernels.cases import Entries, padded, site_slots
from tests.tolerances import assert_close, assert_same_bits
from tests.unit.museum.shared import SPEC, delta, device, digest, kernel, start_load_from


async def test_a_layout_that_changes_under_an_unchanged_mapping() -> None:
    """vllm#47724. A mapping does not change when a slot of it does, and is not computed any more.

    To see it fail: let Layout.is_current say yes.
    """
    bench = make_bench(2)
    for name in ("a", "b"):
        await loaded(bench, name, name)
    session = open_session(bench)
    mapping = map_names(bench, session, "a", "b")
    assert read_by(await computed(bench, session, mapping)) == [digest("a"), digest("b")]
    bench.cache.unload(ref("b"), force=True)
    await loaded(bench, "c", "c")
    with pytest.raises(LayoutStale) as caught:
        await computed(bench, session, mapping)
    assert caught.value.facts["entries"] == f"b@{digest('b')}"


async def test_the_same_ids_come_back_in_the_same_slots() -> None:
    """vllm#47725. After A→C→A each id has its slot again, and a call from before is refused all the same.

    To see it fail: let Layout._changed leave mod_generation as it was.
    """
    bench = make_bench(1)
    await loaded(bench, "a", "a")
    session = open_session(bench)
    mapping = map_names(bench, session, "a")
    late = forward(bench, session, mapping)
    await settle()
    bench.cache.unload(ref("a"), force=True)
    await finish(bench, start_load(bench, "c", "c"), late)
    bench.cache.unload(ref("c"), force=False)
    again = await loaded(bench, "a", "a")
    (entry,) = mapping.entries
    assert entry is not None
    assert (again.resident.slot, again.resident.adapter.digest) == (entry.slot, entry.digest)
    assert isinstance(late.exception(), LayoutStale)
    with pytest.raises(LayoutStale):
        await computed(bench, session, mapping)


async def test_a_reload_under_one_name_leaves_a_mapping_its_bytes() -> None:
    """vllm#47725. A name that is reloaded while a batch decodes has its new bytes beside the old, not over them.

    To see it fail: let Residency._retire free a slot that is pinned.
    """
    bench = make_bench(2)
    await loaded(bench, "a", "old")
    session = open_session(bench)
    mapping = map_names(bench, session, "a")
    await loaded(bench, "a", "new", replace=True)
    newer = map_names(bench, session, "a", mapping_id=1)
    assert read_by(await computed(bench, session, newer)) == [digest("new")]
    bench.cache.release_mapping(session, 1)
    await loaded(bench, "b", "b")
    assert read_by(await computed(bench, session, mapping)) == [digest("old")]


def test_an_adapter_without_a_module_does_not_inherit_the_evicted_ones() -> None:
    """sglang#7426. A site that the adapter does not target is zero in its slot, whatever was there.

    To see it fail: let CpuDevice.fill leave out the sites that the adapter has not.
    """
    target, slot = device(), SlotId(0)
    target.fill(slot, fake_weights(SPEC, {"k": 8, "q": 8}, seed=1))
    target.fill(slot, fake_weights(SPEC, {"q": 4}, seed=2))
    assert not target._arrays["k"].a[slot, :8].any()
    _, found = delta(target, 0, SPEC.by_name["k"])
    assert not found.any()


async def test_an_adapter_that_is_not_there_is_neither_the_base_model_nor_another() -> None:
    """vllm-metal#464, TGI#2505, peft#2090. A mapping that names it is refused, also one that would load.

    To see it fail: let Residency.resolve give None, which is the base model, for an unknown name.
    """
    bench = make_bench(1)
    await loaded(bench, "evicted", "e")
    await loaded(bench, "a", "a")
    session = open_session(bench)
    for names, error in ((("a", "nobody"), AdapterNotFound), (("evicted", "a"), AdapterNotResident)):
        with pytest.raises(error):
            map_names(bench, session, *names)
    with pytest.raises(AdapterNotFound):
        await mapped(bench, session, "nobody", "a", load=True)
    assert not bench.cache.residency.pins.pinned()


async def test_two_loads_under_one_name_from_two_places() -> None:
    """vllm#7169. Of two at one time one has the name, and the other is refused and leaves nothing.

    To see it fail: leave out Names.check_conflict in Residency.check_binding.
    """
    bench = make_bench(3)
    bench.source.contents |= {"/x": "one", "/y": "two"}
    results = await finish(bench, *(start_load_from(bench, "a", source) for source in ("/x", "/y")))
    refused = [result for result in results if isinstance(result, AdapterConflict)]
    assert len(refused) == 1
    assert refused[0].facts["found"] == str(bench.cache.residency.names.digest_of(ref("a")))
    assert len(bench.cache.layout.in_state(SlotState.OCCUPIED)) == 1


def test_a_short_batch_after_a_long_one_reads_no_stale_index() -> None:
    """vllm#15090, sglang#28371. Every batch has index arrays of its own, of its own length.

    To see it fail: keep Plan.order in a buffer of the module that grows and is used again.
    """
    site = site_slots(24, 20)
    long: Entries = [(slot, 3) for slot in (0, 2, 0, 1, 2, 4)]
    short: Entries = [(4, 1), (None, 1), (4, 1)]
    x = torch.randn(18, 24, generator=torch.Generator().manual_seed(0))
    kernel(long, x, site)
    plan = plan_rows(short)
    assert plan.order is not None
    assert plan.order.tolist() == [0, 2, 1]
    assert_close(kernel(short, x[:3], site), lora_rows(short, x[:3], site))


async def test_a_late_call_for_a_mapping_reads_nothing_of_the_one_after_it() -> None:
    """vllm#15090, sglang#28371. No mapping is read by a call that was made for the one before it under its id.

    To see it fail: leave out residency.advance in Mappings._install.
    """
    bench = make_bench(2)
    for name in ("a", "b"):
        await loaded(bench, name, name)
    session = open_session(bench)
    before = map_names(bench, session, "a", "b", "a")
    for names in (("b", "a", None), ("b",)):
        after = map_names(bench, session, *names)
        with pytest.raises(LayoutStale):
            await computed(bench, session, before)
        wanted = [digest(name) if name else "" for name in names]
        assert read_by(await computed(bench, session, after)) == wanted
        before = after


def test_rows_of_the_base_model_keep_their_bits() -> None:
    """vllm#42008. Rows without an adapter are the base model's, bit for bit, beside rows that have one.

    To see it fail: let _write_no_delta add zeros to the base instead of copying it, which loses -0.0.
    """
    site = site_slots(24, 20)
    entries: Entries = [(0, 2), (None, 2), (5, 1), (0, 1)]
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(1))
    base = torch.randn(6, 20, generator=torch.Generator().manual_seed(2))
    base[2:5, ::2] = -0.0
    out = kernel(entries, x, site, base)
    assert_same_bits(out[2:5], base[2:5])
    assert not torch.equal(out[:2], base[:2])


def test_the_same_call_gives_the_same_bits() -> None:
    """vllm#50278. Sums are in one order, wherever the input lies.

    To see it fail: give the kernel x where it lies, without the aligned copy in _grouped_input.
    """
    site = site_slots(96, 40)
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(3))
    entries: Entries = [(7, 1), (3, 1)]
    first = kernel(entries, x, site)
    for offset in range(1, 9):
        moved = padded(x, gap=offset, offset=offset).view
        assert_same_bits(kernel(entries, moved, site), first)


async def test_rows_and_counts_that_disagree_are_refused() -> None:
    """vllm#51122, vllm#51121. Counts of other rows than those that came are refused before anything is launched.

    To see it fail: compare the columns alone in _check_matrix of core/forward.py.
    """
    bench = make_bench(1)
    await loaded(bench, "a", "a")
    session = open_session(bench)
    mapping = map_names(bench, session, "a", None)
    for counts, rows in (([2, 1], 2), ([2, 1], 4), ([3], 3), ([1, 1, 1], 3), ([], 0)):
        with pytest.raises(ShapeMismatch):
            await computed(bench, session, mapping, row_counts=counts, items=[ForwardItem(SITE, vector(rows))])
    assert not bench.compute_pool.jobs
