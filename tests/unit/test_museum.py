"""The museum of faults that users of systems like this one reported in public: one test for each that can be met here.

Each docstring names where the fault was seen and ends with a mutant of ours that makes the test fail. Other suites test
most of this in more ways; here each fault has one small test that stands alone.

Lines that wait for what they are about: thrash that makes compute wait (tests/bench), packed q/k/v and gate/up sites
(sglang#25913 and vllm#51409, their packed half), tensor parallelism (vllm#31994, sglang#24420), grids baked into a
captured graph (sglang#28371, its second half), illegal accesses on a GPU, declarative sync (gateway-api-inference-
extension#584, its reconciliation), memory that a dead client had mapped (LMCache#5265, its regions), and all that is
about Kubernetes (istio#51883, istio#60649, kuma#3293, vault-helm#736, dapr#6350, vault#15389).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.empty_pb2 import Empty
from safetensors.torch import save
from slotcar.v1 import engine_service_pb2 as pb
from slotcar.v1 import layout_pb2
from slotcar_client.entries import parse_entries
from slotcar_client.errors import AuditFailed
from slotcar_client.protocol import check_forward, read_mapping
from slotcar_kernels.buffers import buffer_from_tensor, tensor_from_buffer
from slotcar_kernels.cpu import lora_forward
from slotcar_kernels.plan import plan_rows
from slotcar_kernels.reference import lora_delta, lora_rows
from slotcar_kernels.sites import SiteSlots
from slotcar_sidecar.core.calls import LoadCall
from slotcar_sidecar.core.errors import (
    AdapterConflict,
    AdapterInvalid,
    AdapterNotFound,
    AdapterNotResident,
    AdapterUnsupported,
    DigestMismatch,
    LayoutStale,
    Reason,
    RequestInvalid,
    SessionNotFound,
    ShapeMismatch,
    SlotcarError,
    SlotsExhausted,
    SourceDenied,
    SourceUnavailable,
)
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import AdapterName, AdapterRef, Epoch, SlotId
from slotcar_sidecar.core.layout import Layout, SlotState
from slotcar_sidecar.core.model import ModelSpec, Site
from slotcar_sidecar.core.residency import OnConflict
from slotcar_sidecar.core.tensor import Matrix
from slotcar_sidecar.device.cpu import CpuDevice
from slotcar_sidecar.rpc.interceptors import ErrorInterceptor
from slotcar_sidecar.store.peft import read_peft
from slotcar_sidecar.store.source import LocalSource

from tests.adapters import MINIMAL_CONFIG, WEIGHTS_FILE, raw_tensors, write_raw_adapter
from tests.fakes.parts import SITE, Bench, digest_of, make_bench, settle, vector
from tests.fakes.steps import computed, finish, forward, loaded, map_names, open_session, read_by, ref, start_load
from tests.fakes.weights import FakeWeights, fake_weights
from tests.kernels.cases import padded, site_slots
from tests.tolerances import assert_close, assert_same_bits

Q = "model.layers.0.self_attn.q_proj"
SPEC = ModelSpec.of([Site("k", 33, 18), Site("q", 33, 40)])


def digest(content: str) -> str:
    return str(digest_of(content))


def device(slots: int = 2, max_rank: int = 32) -> CpuDevice:
    made = CpuDevice(slots, max_rank, poison=True)
    made.shape(SPEC)
    return made


def delta(target: CpuDevice, slot: int, site: str, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """An input, and what the slot makes of it."""
    x = torch.randn(rows, SPEC.by_name[site].in_features, generator=torch.Generator().manual_seed(rows))
    dtype, count, columns, data = buffer_from_tensor(x)
    batch = target.prepare([(SlotId(slot), rows)], [ForwardItem(site, Matrix(dtype, count, columns, columns, data))])
    (out,) = target.execute(batch)
    return x, tensor_from_buffer(out.dtype, out.rows, out.columns, out.row_stride, out.data)


def truth(weights: FakeWeights, site: str, x: torch.Tensor) -> torch.Tensor:
    scale = {part.site: part.scale for part in weights.adapter.parts}[site]
    return lora_delta(x, weights.a[site], weights.b[site], scale)


def kernel(entries: list[tuple[int | None, int]], x: torch.Tensor, site: SiteSlots, base: Any = None) -> torch.Tensor:
    out = torch.full((x.shape[0], site.out_features), torch.nan)
    lora_forward(plan_rows(entries), x, [site], [out], None if base is None else [base])
    return out


def read(tensors: Mapping[str, torch.Tensor] | bytes, **fields: Any) -> Any:
    weights = tensors if isinstance(tensors, bytes) else save(dict(tensors))
    return read_peft(json.dumps(dict(MINIMAL_CONFIG) | fields).encode(), weights, source="test")


# Wrong weights


async def test_a_layout_that_changes_under_an_unchanged_mapping() -> None:
    """vllm#47724. To see it fail: leave out both calls of check_current in Forwards._forward."""
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
    """vllm#47725, by reading: A→C→A. To see it fail: let Layout.begin_fill keep the slot's mod_generation."""
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
    assert (again.resident.slot, again.resident.adapter.digest) == (mapping.entries[0].slot, mapping.entries[0].digest)
    assert isinstance(late.exception(), LayoutStale)
    with pytest.raises(LayoutStale):
        await computed(bench, session, mapping)


def test_an_adapter_without_a_module_does_not_inherit_the_evicted_ones() -> None:
    """sglang#7426. To see it fail: let CpuDevice.fill visit only the sites that the adapter has."""
    target, slot = device(), SlotId(0)
    target.fill(slot, fake_weights(SPEC, {"k": 8, "q": 8}, seed=1))
    target.fill(slot, fake_weights(SPEC, {"q": 4}, seed=2))
    _, found = delta(target, slot, "k")
    assert not found.any()


async def test_an_adapter_that_is_not_there_is_neither_the_base_model_nor_another() -> None:
    """vllm-metal#464, TGI#2505, peft#2090. To see it fail: let Residency.resolve give None for an unknown name."""
    bench = make_bench(1)
    await loaded(bench, "evicted", "e")
    await loaded(bench, "a", "a")
    session = open_session(bench)
    for names, error in ((("a", "nobody"), AdapterNotFound), (("evicted", "a"), AdapterNotResident)):
        with pytest.raises(error):
            map_names(bench, session, *names)
    assert not bench.cache.residency.pins.pinned()


async def test_two_loads_under_one_name_from_two_places() -> None:
    """vllm#7169, and at one time. To see it fail: do not look for a conflict in Residency.bind."""
    bench = make_bench(3)
    bench.source.contents |= {"/x": "one", "/y": "two"}
    results = await finish(bench, *(_load_from(bench, "a", source) for source in ("/x", "/y")))
    refused = [result for result in results if isinstance(result, AdapterConflict)]
    assert len(refused) == 1
    assert refused[0].facts["found"] == str(bench.cache.residency.names.digest_of(ref("a")))
    assert len(bench.cache.layout.in_state(SlotState.OCCUPIED)) == 1


def _load_from(bench: Bench, name: str, source: str) -> asyncio.Task[Any]:
    call = LoadCall(ref(name), source, OnConflict.FAIL, keep=False)
    return asyncio.get_running_loop().create_task(bench.cache.load(call))


def test_a_short_batch_after_a_long_one_reads_no_stale_index() -> None:
    """vllm#15090, sglang#28371. To see it fail: keep Plan.order in a buffer of the module that grows and is reused."""
    site = site_slots(24, 20)
    long = [(slot, 3) for slot in (0, 2, 0, 1, 2, 4)]
    short: list[tuple[int | None, int]] = [(4, 1), (None, 1), (4, 1)]
    x = torch.randn(18, 24, generator=torch.Generator().manual_seed(0))
    kernel([*long], x, site)
    plan = plan_rows(short)
    assert plan.order is not None
    assert plan.order.tolist() == [0, 2, 1]
    assert_close(kernel(short, x[:3], site), lora_rows(short, x[:3], site))


def test_rows_of_the_base_model_keep_their_bits() -> None:
    """vllm#42008. To see it fail: let the kernel add a delta of zeros instead of copying base, which loses -0.0."""
    site = site_slots(24, 20)
    entries: list[tuple[int | None, int]] = [(0, 2), (None, 2), (5, 1), (0, 1)]
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(1))
    base = torch.randn(6, 20, generator=torch.Generator().manual_seed(2))
    base[2:5, ::2] = -0.0
    out = kernel(entries, x, site, base)
    assert_same_bits(out[2:5], base[2:5])
    assert not torch.equal(out[:2], base[:2])


def test_the_same_call_gives_the_same_bits() -> None:
    """vllm#50278. To see it fail: give the kernel x where it lies, without the aligned copy in _grouped_input."""
    site = site_slots(96, 40)
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(3))
    entries: list[tuple[int | None, int]] = [(7, 1), (3, 1)]
    first = kernel(entries, x, site)
    for offset in range(1, 9):
        moved = padded(x, gap=offset, offset=offset).view
        assert_same_bits(kernel(entries, moved, site), first)


async def test_rows_and_counts_that_disagree_are_refused() -> None:
    """vllm#51122, vllm#51121: counts of more rows than there are. To see it fail: drop the rows in check_items."""
    bench = make_bench(1)
    await loaded(bench, "a", "a")
    session = open_session(bench)
    mapping = map_names(bench, session, "a", None)
    for counts, rows in (([2, 1], 2), ([2, 1], 4), ([3], 3), ([1, 1, 1], 3), ([], 0)):
        with pytest.raises(ShapeMismatch):
            await computed(bench, session, mapping, row_counts=counts, items=[ForwardItem(SITE, vector(rows))])
    assert not bench.compute_pool.jobs


# Residency


async def test_more_names_than_slots() -> None:
    """vllm-metal#641: the registered were taken for the resident. To see it fail: count names in begin_fill."""
    bench = make_bench(1)
    for name in ("a", "b", "c"):
        await loaded(bench, name, name)
    assert len(bench.cache.residency.names) == 3
    session = open_session(bench)
    assert read_by(await computed(bench, session, map_names(bench, session, "c"))) == [digest("c")]


async def test_a_batch_that_needs_more_adapters_than_slots() -> None:
    """vllm#14495, sglang#23141. To see it fail: let set_mapping pin while it resolves."""
    bench = make_bench(2)
    for name in ("a", "b", "c"):
        await loaded(bench, name, name)
    session = open_session(bench)
    before = bench.cache.layout
    with pytest.raises(AdapterNotResident):
        map_names(bench, session, "c", "b", "a")
    assert bench.cache.layout is before
    assert not bench.cache.residency.pins.pinned()
    map_names(bench, session, "c", "b")
    with pytest.raises(SlotsExhausted):
        await loaded(bench, "a")
    bench.cache.check_integrity()


async def test_unload_gives_the_memory_back() -> None:
    """vllm#54839, vllm#42207. To see it fail: leave out on_forget in Residency._retire."""
    bench = make_bench(1)
    await loaded(bench, "a", "a")
    assert bench.cache.tiers.host.used_bytes == 1
    bench.cache.unload(ref("a"), force=False)
    assert bench.cache.tiers.host.used_bytes == 0
    assert bench.cache.layout.in_state(SlotState.FREE) == (0,)


async def test_unload_does_not_hang_after_an_abort() -> None:
    """sglang#36894. To see it fail: let the mark of a Forward end with its caller, or never."""
    bench = make_bench(1)
    await loaded(bench, "a", "a")
    session = open_session(bench)
    aborted = forward(bench, session, map_names(bench, session, "a"))
    await settle()
    aborted.cancel()
    await settle()
    assert not inspect.iscoroutinefunction(bench.cache.unload)
    assert bench.cache.unload(ref("a"), force=False).slot_state is SlotState.DRAINING
    bench.cache.close_session(session)
    (result,) = await finish(bench, start_load(bench, "b", "b"))
    assert result.resident.slot == 0
    assert not bench.device.written_while_read


async def test_pins_do_not_drift() -> None:
    """sglang#31808, sglang#34205. To see it fail: count pins, and add and subtract."""
    bench = make_bench(2)
    await loaded(bench, "a", "a")
    await loaded(bench, "b", "b")
    session = open_session(bench)

    def pins() -> dict[SlotId, int]:
        return {slot: len(owners) for slot, owners in bench.cache.residency.pins.owners.items()}

    for _ in range(3):
        map_names(bench, session, "a", "a", "b", "a")
    assert pins() == {0: 1, 1: 1}
    map_names(bench, session, "a", mapping_id=1)
    assert pins() == {0: 2, 1: 1}
    for _ in range(3):
        bench.cache.release_mapping(session, 0)
    assert pins() == {0: 1}
    for _ in range(2):
        bench.cache.close_session(session)
    assert pins() == {}


async def test_no_unload_fits_between_the_lookup_and_the_pin() -> None:
    """sglang#9084. To see it fail: await between resolve and pin in Mappings._set_now; map_names lets nothing wait.

    The same between the end of a load's fill and its name, at every turn of the loop: do not look again in
    Loads.make_resident.
    """
    for turns in range(12):
        bench = make_bench(1)
        await loaded(bench, "a", "a")
        await loaded(bench, "b", "b")
        again = start_load(bench, "a")
        await settle()
        bench.load_pool.run_one()
        await settle()
        bench.load_pool.run_one()
        for _ in range(turns):
            await asyncio.sleep(0)
        bench.cache.unload(ref("a"), force=True)
        (result,) = await finish(bench, again)
        assert not isinstance(result, BaseException), (turns, result)
        bench.cache.check_integrity()
        if bench.cache.residency.names.get(AdapterName("a")):
            session = open_session(bench)
            assert read_by(await computed(bench, session, map_names(bench, session, "a"))) == [digest("a")]


async def test_a_load_does_not_block_compute() -> None:
    """sglang#13349. To see it fail: run device.fill on the event loop, or let a Forward wait for self._fills."""
    bench = make_bench(2)
    await loaded(bench, "a", "a")
    session = open_session(bench)
    mapping = map_names(bench, session, "a")
    loading = start_load(bench, "b", "b")
    await settle()
    bench.load_pool.run_one()
    await settle()
    assert bench.cache.layout.in_state(SlotState.FILLING) == (1,)
    during = forward(bench, session, mapping)
    await settle()
    bench.compute_pool.run_one()
    await settle()
    assert read_by(during.result()) == [digest("a")]
    assert not loading.done()
    await finish(bench, loading)


async def test_an_evicted_adapter_comes_back() -> None:
    """TensorRT-LLM#6510. To see it fail: forget Residency._sources when a slot is taken."""
    bench = make_bench(1, host_bytes=1)
    await loaded(bench, "a", "a")
    await loaded(bench, "b", "b")
    assert digest_of("a") not in bench.cache.tiers.host
    assert (await loaded(bench, "a")).resident.adapter.digest == digest_of("a")


# Reload and names


async def test_new_bytes_under_an_old_name_are_never_the_old() -> None:
    """vllm#42125, sglang#8263. To see it fail: key the host tier by name, or join reads by the path alone."""
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


def test_scaling_is_applied_once_however_often_a_slot_is_filled() -> None:
    """SkyRL#2250. To see it fail: multiply host.b by the scale in CpuDevice.fill, in place."""
    target, weights = device(), fake_weights(SPEC, {"k": 4, "q": 4}, seed=3)
    target.fill(SlotId(0), weights)
    x, first = delta(target, 0, "q")
    for slot in (1, 0, 1):
        target.fill(SlotId(slot), fake_weights(SPEC, {"q": 32}, seed=4))
        target.fill(SlotId(slot), weights)
        assert_same_bits(delta(target, slot, "q")[1], first)
    assert_close(first, truth(weights, "q", x))


async def test_a_failed_reload_leaves_the_old() -> None:
    """SkyRL#2129. To see it fail: let a replace unname and free the old digest before the fill."""
    bench = make_bench(2)
    await loaded(bench, "a", "old")
    session = open_session(bench)
    bench.device.fail_fill = RuntimeError("the device refused the write")
    with pytest.raises(RuntimeError):
        await loaded(bench, "a", "new", replace=True)
    bench.device.fail_fill = None
    assert read_by(await computed(bench, session, map_names(bench, session, "a"))) == [digest("old")]
    bench.cache.check_integrity()


async def test_the_source_is_not_read_again_at_every_step() -> None:
    """SkyRL#1606. To see it fail: load again in set_mapping."""
    bench = make_bench(2)
    await loaded(bench, "a", "old")
    await loaded(bench, "a", "new", replace=True)
    reads = len(bench.source.reads)
    session = open_session(bench)
    for _ in range(3):
        await computed(bench, session, map_names(bench, session, "a"))
        await loaded(bench, "a")
    assert len(bench.source.reads) == reads == 2


# Checkpoints


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"lora_alpha": 12}, 12 / 4),
        ({"lora_alpha": 12, "use_rslora": True}, 12 / 2),
        ({"lora_alpha": 1, "alpha_pattern": {"q_proj": 10}}, 10 / 4),
        ({"lora_alpha": 8, "r": 64, "rank_pattern": {"self_attn.q_proj": 4}}, 8 / 4),
    ],
)
def test_scaling_is_pefts(fields: dict[str, Any], scale: float) -> None:
    """sglang#40835, mlx-vlm#845, and patterns that were ignored. To see it fail: return alpha in LoraConfig.scale."""
    (part,) = read(raw_tensors(Q), **fields).adapter.parts
    assert (part.rank, part.scale) == (4, scale)


def test_keys_that_match_nothing_are_not_a_success() -> None:
    """vllm#34186, vllm#55193. To see it fail: skip sites that the model does not have in Adapter.check_fits."""
    other = read(raw_tensors("model.language_model.layers.0.self_attn.q_proj")).adapter
    with pytest.raises(AdapterInvalid) as caught:
        other.check_fits(ModelSpec.of([Site(Q, 64, 64)]), max_rank=16)
    assert caught.value.facts["tensor"] == "model.language_model.layers.0.self_attn.q_proj"
    for nothing in ({}, {"unrelated": torch.ones(1)}, {f"{Q}.lora_A.weight": torch.ones(4, 64)}):
        with pytest.raises(AdapterInvalid):
            read(nothing)


def test_a_layer_or_a_projection_that_is_missing_takes_nothing_with_it() -> None:
    """lorax, by reading; sglang#25913. To see it fail: keep only module types that every layer has in pairs_by_site."""
    sites = ("model.layers.0.q_proj", "model.layers.0.k_proj", "model.layers.7.q_proj")
    adapter = read(raw_tensors(*sites)).adapter
    assert set(adapter.sites) == set(sites)
    model = ModelSpec.of([Site(f"model.layers.{n}.{p}_proj", 64, 64) for n in range(8) for p in "qkv"])
    adapter.check_fits(model, max_rank=16)
    assert len(adapter.sites_zero(model)) == 24 - 3


@pytest.mark.parametrize(
    "key",
    [
        "base_model.model.lm_head.weight",
        "base_model.model.model.embed_tokens.weight",
        "base_model.model.model.embed_tokens.base_layer.weight",
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
        "base_model.model.lm_head.modules_to_save.weight",
    ],
)
def test_weights_of_the_base_model_inside_an_adapter_are_refused_by_name(key: str) -> None:
    """vllm#32599, sglang#17096. To see it fail: skip keys that are no LoRA in pairs_by_site."""
    with pytest.raises(AdapterUnsupported) as caught:
        read(raw_tensors(Q) | {key: torch.ones(300, 64)})
    assert caught.value.facts["tensor"] == key


def test_only_the_file_of_the_right_name_is_read(tmp_path: Path) -> None:
    """SceneWorks#1271. To see it fail: take the first *.safetensors of the folder in LocalSource."""
    folder = write_raw_adapter(tmp_path / "a", MINIMAL_CONFIG, raw_tensors(Q, seed=1))
    wanted = LocalSource([tmp_path], 1 << 30).read(str(folder)).adapter.digest
    for name in ("a.safetensors", "adapter_model-00001.safetensors", "checkpoint-5.safetensors"):
        (folder / name).write_bytes(save(raw_tensors(Q, seed=2)))
    assert LocalSource([tmp_path], 1 << 30).read(str(folder)).adapter.digest == wanted
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(AdapterInvalid):
        LocalSource([tmp_path], 1 << 30).read(str(folder))


def test_rank_dtype_and_odd_sizes_harm_the_call_at_most() -> None:
    """vllm#2847, TensorRT-LLM#2434, vllm#5036. To see it fail: drop the rank in Adapter.check_fits."""
    target = device(max_rank=20)
    with pytest.raises(AdapterInvalid) as caught:
        target.fill(SlotId(0), fake_weights(SPEC, {"q": 21}))
    assert (caught.value.facts["found"], caught.value.facts["wanted"]) == ("21", "at most 20")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        weights = fake_weights(SPEC, {"k": 17, "q": 20}, dtype=dtype)
        target.fill(SlotId(1), weights)
        for site in ("k", "q"):
            x, found = delta(target, 1, site)
            assert_close(found, truth(weights, site, x))


def test_a_tensor_parallel_model_is_refused_until_it_is_served() -> None:
    """vllm#31994, sglang#24420, as far as they can be met. To see it fail: drop the check in ModelSpec."""
    with pytest.raises(RequestInvalid):
        ModelSpec.of([Site("q", 64, 64)], tensor_parallel=2)


# Kernels


def test_offsets_beyond_31_bits() -> None:
    """vllm#53028. To see it fail: make Plan.order int32 and index x flat. No more than a few pages are touched."""
    far, inputs, outputs = 1 << 30, 40, 24
    generator = torch.Generator().manual_seed(4)

    def spread(rows: int, columns: int) -> torch.Tensor:
        """[3, rows, columns] whose last part begins at element 2³¹."""
        flat = torch.empty(2 * far + rows * columns, dtype=torch.float16)
        parts = flat.as_strided((3, rows, columns), (far, columns, 1))
        parts.copy_(torch.randn(3, rows, columns, generator=generator) * 0.2)
        return parts

    site = SiteSlots(spread(4, inputs), spread(4, outputs), [4, 4, 4], [1.0, 2.0, 3.0])
    x = spread(1, inputs)[:, 0].float()
    far_x = torch.empty(2 * far + inputs, dtype=torch.float16).as_strided((3, inputs), (far, 1)).copy_(x)
    entries: list[tuple[int | None, int]] = [(2, 1), (0, 1), (2, 1)]
    out = torch.empty(3, outputs, dtype=torch.float16)
    lora_forward(plan_rows(entries), far_x, [site], [out])
    assert_close(out, lora_rows(entries, far_x, site))


@pytest.mark.parametrize("rank", [1, 15, 16, 17, 32])
def test_ranks_around_a_block(rank: int) -> None:
    """vllm#49327. To see it fail: compute with the padded rank and do not write zeros in CpuDevice.fill."""
    target, weights = device(), fake_weights(SPEC, {"k": rank, "q": max(1, rank - 1)}, seed=rank)
    target.fill(SlotId(0), weights)
    for site in ("k", "q"):
        x, found = delta(target, 0, site)
        assert_close(found, truth(weights, site, x))


def test_padded_ranks_hold_nothing_of_the_evicted_adapter() -> None:
    """sglang#27087. To see it fail: do not write zeros from the rank to the padded rank in CpuDevice.fill."""
    target, slot, small = device(), SlotId(0), fake_weights(SPEC, {"k": 3, "q": 3}, seed=6)
    target.fill(slot, fake_weights(SPEC, {"k": 32, "q": 32}, seed=5))
    target.fill(slot, small)
    assert target.matches(slot, small)
    for site in ("k", "q"):
        assert not target._a[site][slot, 3:16].any()
        assert not target._b[site][slot, 3:16].any()


@pytest.mark.parametrize("entries", [[], [(0, 0)], [(None, 0), (4, 0)], [(5, 2)], [(None, 3)], [(4, 0), (None, 1)]])
def test_empty_segments_and_rank_0(entries: list[tuple[int | None, int]]) -> None:
    """sglang#7785; slot 5 has rank 0. To see it fail: divide by the rank, or by the rows of a segment."""
    site = site_slots(24, 20)
    x = torch.ones(sum(count for _, count in entries), 24)
    assert_same_bits(kernel(entries, x, site), torch.zeros(x.shape[0], 20))


def test_rows_that_are_not_next_to_each_other() -> None:
    """vllm#36187. To see it fail: read x by x.data_ptr() and the number of its columns."""
    site = site_slots(24, 20)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(7))
    batches: list[list[tuple[int | None, int]]] = [[(0, 1), (4, 2), (0, 2)], [(0, 3), (4, 2)]]
    for entries in batches:
        for strided in (padded(x).view, torch.stack([x, x], 1)[:, 1], x.repeat(1, 2)[:, 24:]):
            assert_same_bits(kernel(entries, strided, site), kernel(entries, x, site))


# Life and death


async def test_a_client_that_dies_with_pins() -> None:
    """LMCache#5265. To see it fail: leave out the releases in AdapterCache.close_session."""
    bench = make_bench(1)
    await loaded(bench, "a", "a")
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


async def test_a_restarted_server_reuses_a_number() -> None:
    """cilium#38654. To see it fail: compare only generations in Mapping.check_current and protocol.check_forward."""
    bench = make_bench(1)
    await loaded(bench, "a", "a")
    mapping = map_names(bench, open_session(bench), "a")
    mapping.check_current(bench.cache.layout)
    reborn = Layout(Epoch("another"), bench.cache.layout.generation, bench.cache.layout.slots)
    with pytest.raises(LayoutStale):
        mapping.check_current(reborn)


def test_a_client_notices_the_number_of_another_life() -> None:
    """cilium#38654, the client's half: the same generation, the same digests, another epoch."""
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
    """Triton server#3207, #7688. To see it fail: let unload wait for readers, or begin a fill without waiting."""
    bench = make_bench(1)
    await loaded(bench, "a", "a")
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
    """Triton server#3207, #7688: what is in flight ends as it began. To see it fail: let any unload end the pins."""
    bench = make_bench(1)
    await loaded(bench, "a", "a")
    session = open_session(bench)
    flying = forward(bench, session, map_names(bench, session, "a"))
    await settle()
    bench.cache.unload(ref("a"), force=False)
    (result,) = await finish(bench, flying)
    assert read_by(result) == [digest("a")]
    bench.cache.close_session(session)
    assert bench.cache.layout.in_state(SlotState.FREE) == (0,)


async def test_one_bad_adapter_does_not_hold_up_the_rest() -> None:
    """gateway-api-inference-extension#584. To see it fail: let an error leave self._fills or a claim behind."""
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


async def test_a_refusal_is_its_own_reason_and_no_crash(caplog: pytest.LogCaptureFixture) -> None:
    """grpc#36009. To see it fail: let the interceptor take the exception that context.abort raises for a fault."""
    counted: list[tuple[str, str]] = []
    interceptor = ErrorInterceptor(1 << 20, lambda method, reason: counted.append((method, reason)))
    aborted: list[tuple[grpc.StatusCode, str]] = []

    class Aborted(Exception):
        """What gRPC raises: a bare exception."""

    class Context:
        async def abort(self, code: grpc.StatusCode, message: str, details: Any) -> None:
            aborted.append((code, message))
            raise Aborted

    async def end(error: Exception) -> None:
        async def handler(request: Any, context: Any) -> Any:
            raise error

        with pytest.raises(Aborted):
            await interceptor._unary("Call", handler)(Empty(), Context())

    errors: list[SlotcarError] = [SessionNotFound(), AdapterNotFound("a"), SlotsExhausted("none")]
    for error in errors:
        await end(error)
    assert [reason for _, reason in counted] == [error.reason.value for error in errors]
    assert grpc.StatusCode.INTERNAL not in [code for code, _ in aborted]
    assert not caplog.records
    await end(ZeroDivisionError("secret"))
    assert counted[-1] == ("Call", Reason.INTERNAL.value)
    assert aborted[-1][0] is grpc.StatusCode.INTERNAL
    assert "secret" not in aborted[-1][1]
    assert len(caplog.records) == 1


# Security


def test_no_name_and_no_source_leads_outside(tmp_path: Path) -> None:
    """vllm#46287. To see it fail: join the root with the path in LocalSource._locate and open that."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    write_raw_adapter(outside / "a", MINIMAL_CONFIG, raw_tensors(Q))
    write_raw_adapter(root / "b", MINIMAL_CONFIG, raw_tensors(Q))
    (root / "link").symlink_to(outside)
    (root / "b2").mkdir()
    (root / "b2" / WEIGHTS_FILE).symlink_to(outside / "a" / WEIGHTS_FILE)
    (root / "b2" / "adapter_config.json").symlink_to(outside / "a" / "adapter_config.json")
    source = LocalSource([root], 1 << 30)
    spellings = [f"{root}/{path}" for path in ("../outside/a", "link/a", "b/../../outside/a", "b2")]
    for uri in (*spellings, f"file://{root}/%2e%2e/outside/a", str(outside / "a"), "b"):
        with pytest.raises(SourceDenied):
            source.read(uri)
    source.read(str(root / "b"))
    for name in ("../a", "/etc/passwd", "a/../b", "a//b", ".", "a/.", "a\n", "", "~a"):
        with pytest.raises(RequestInvalid):
            AdapterName(name)


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    """TensorRT-LLM#13391. To see it fail: torch.load what is no safetensors file."""
    marker = tmp_path / "ran"

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (marker,))

    data = pickle.dumps(Harm())
    folder = write_raw_adapter(tmp_path / "a", MINIMAL_CONFIG, None)
    (folder / "adapter_model.bin").write_bytes(data)
    with pytest.raises(AdapterUnsupported, match="pickle"):
        LocalSource([tmp_path], 1 << 30).read(str(folder))
    (folder / WEIGHTS_FILE).write_bytes(data)
    with pytest.raises(AdapterInvalid):
        LocalSource([tmp_path], 1 << 30).read(str(folder))
    assert not marker.exists()


def test_a_path_that_does_not_exist_is_no_download(tmp_path: Path) -> None:
    """vllm, by reading. To see it fail: hand what is no folder to a hub's client."""
    source = LocalSource([tmp_path], 1 << 30)
    with pytest.raises(SourceUnavailable):
        source.read(str(tmp_path / "org" / "model"))
    for uri in ("org/model", "hf://org/model", "https://example.invalid/a", "s3://bucket/a"):
        with pytest.raises(SourceDenied):
            source.read(uri)


async def test_an_unload_deletes_no_file() -> None:
    """kubeai, by reading: a path to delete was built from a name. To see it fail: give the Source a way to delete."""
    bench = make_bench(1)
    await loaded(bench, "a", "a")
    bench.cache.unload(AdapterRef.parse("a"), force=True)
    assert bench.source.contents == {"/a": "a"}
    assert {name for name in dir(LocalSource) if not name.startswith("_")} == {"canonical", "read", "version"}
