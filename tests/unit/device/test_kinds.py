"""Sites of every kind in one model, with one rank and with several: each row is what its adapter's file says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from slotcar_kernels.buffers import DTYPES
from slotcar_sidecar.core.adapter import SiteLora
from slotcar_sidecar.core.errors import AdapterInvalid, AdapterUnsupported, RequestInvalid
from slotcar_sidecar.core.forward import check_items
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.device.weights import cast_warnings, check_range, folded_b

from tests.fakes.weights import weights_of_parts
from tests.tolerances import assert_same_bits
from tests.unit.device.devices import AnyDevice, make_device
from tests.unit.device.kinds import (
    APART,
    ENTRIES,
    EXPERTS,
    FUSED,
    MODEL,
    OWNERS,
    PLAIN,
    ROWS,
    SLOTS,
    TOKENS,
    WIDTH,
    A,
    B,
    C,
    Given,
    columns_of,
    deltas,
    lora,
    sites,
    to_matrix,
    to_tensor,
)

MAX_RANK = 35
SITES = [site.name for site in MODEL.sites]


def device(model: ModelSpec = MODEL, slot_dtype: str = "float32") -> AnyDevice:
    made = make_device(3, MAX_RANK, slot_dtype)
    made.shape(model)
    for slot, weights in SLOTS.items():
        made.fill(slot, weights)
    return made


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """float32 results of the order of 10."""
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("site", SITES)
def test_each_row_is_its_adapters(site: str, adds: bool) -> None:
    given = Given.at(MODEL.by_name[site])
    item = given.item(adds=adds)
    check_items([item], ROWS, MODEL)
    target = device()
    (found,) = target.execute(target.prepare(ENTRIES, [item]))
    wanted = deltas(given)
    assert_near(to_tensor(found), wanted + given.y.double() if adds else wanted)
    for row, owner in enumerate(OWNERS):
        if owner is None:
            assert_same_bits(to_tensor(found)[row], given.y[row] if adds else torch.zeros_like(given.y[row]))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("site", SITES)
def test_the_shards_of_all_ranks_are_the_whole(site: str, ranks: int, copies: int) -> None:
    """One layout for all ranks: those of a row-sharded site sum up, those of a column-sharded one have its columns."""
    model = ModelSpec.of(sites(copies), tensor_parallel=ranks)
    given, target = Given.at(model.by_name[site]), device(model)
    outs = []
    for rank in range(ranks):
        item = given.item(adds=False, rank=rank, ranks=ranks)
        check_items([item], ROWS, model)
        (found,) = target.execute(target.prepare(ENTRIES, [item], rank))
        outs.append(to_tensor(found))
    wanted = deltas(given)
    if given.site.shard == "row":
        assert_near(torch.stack(outs).sum(0), wanted)
    for rank, out in enumerate(outs):
        if given.site.shard == "column":
            assert_near(out, columns_of(given.site, wanted, rank, ranks))
        elif given.site.shard == "none":
            assert_near(out, wanted)


@pytest.mark.parametrize("slot_dtype", sorted(DTYPES))
def test_a_slot_matches_what_filled_it_and_no_other(slot_dtype: str) -> None:
    target = device(slot_dtype=slot_dtype)
    for slot, weights in SLOTS.items():
        for other in (PLAIN, FUSED, APART):
            assert target.matches(slot, other) == (other is weights)


@pytest.mark.parametrize("leaf", [leaf.name for leaf in MODEL.leaves])
@pytest.mark.parametrize("array", ["a", "b", "vectors"])
def test_one_wrong_value_of_any_leaf_is_found(leaf: str, array: str) -> None:
    """Also where the adapter has nothing, which is zero; but vectors that it has not got are never read."""
    target = device()
    for slot, weights in SLOTS.items():
        values = getattr(target._arrays[leaf], array)
        if values is None or values[slot].isnan().all():
            continue
        of_slot = values[slot]
        place = tuple((~of_slot.isnan()).nonzero()[-1].tolist())
        before = of_slot[place].clone()
        of_slot[place] += 1e-3
        assert not target.matches(slot, weights)
        of_slot[place] = before
        assert target.matches(slot, weights)


def test_a_refill_leaves_nothing_of_the_adapter_before() -> None:
    target = device()
    for weights in (FUSED, APART, PLAIN, FUSED):
        target.fill(A, weights)
        assert target.matches(A, weights)
        for site in MODEL.sites:
            given = Given.at(site)
            (found,) = target.execute(target.prepare([(A, ROWS)], [given.item(adds=False)]))
            assert_near(to_tensor(found), deltas(given, [weights] * ROWS))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_rows(dtype: str) -> None:
    target = device()
    for site in MODEL.sites:
        given = Given.at(site, DTYPES[dtype])
        (found,) = target.execute(target.prepare(ENTRIES, [given.item(adds=True)]))
        wanted = deltas(given) + given.y.double()
        torch.testing.assert_close(to_tensor(found).double(), wanted, rtol=2**-6, atol=2**-4)


def test_a_gain_needs_the_base_where_its_rows_are() -> None:
    target, given = device(), Given.at(MODEL.by_name["layer.qkv_proj"])
    bare = replace(given.item(adds=False), aux=None)
    target.execute(target.prepare([(A, ROWS), (C, 0)], [bare]))
    for slot in (B, C):
        with pytest.raises(RequestInvalid) as refused:
            target.prepare([(A, 1), (slot, ROWS - 1)], [bare])
        assert refused.value.field == "items[0].aux"
    assert FUSED.adapter.sites_needing_base(MODEL) == ("layer.qkv_proj",)
    assert APART.adapter.sites_needing_base(MODEL) == ("layer.down_proj", "layer.qkv_proj")
    assert not PLAIN.adapter.needs_base


@pytest.mark.parametrize(("site", "count"), [("embed", TOKENS), ("layer.experts.down_proj", EXPERTS)])
@pytest.mark.parametrize("wrong", [-1, 0, 2**31 - 1])
def test_numbers_out_of_range_are_refused_at_each_execution(site: str, count: int, wrong: int) -> None:
    """The memory is the client's: what was right when the batch was prepared may be wrong by the time it runs."""
    target, given = device(), Given.at(MODEL.by_name[site])
    assert given.aux is not None
    aux = bytearray(given.aux.numpy().tobytes())
    item = replace(given.item(adds=False), aux=replace(to_matrix(given.aux), data=memoryview(aux)))
    batch = target.prepare(ENTRIES, [item])
    before = bytes(target.execute(batch)[0].data)
    aux[12:16] = (wrong or count).to_bytes(4, "little", signed=True)
    with pytest.raises(RequestInvalid) as refused:
        target.execute(batch)
    assert refused.value.field == "items[0].aux"
    assert refused.value.facts["found"] == str(wrong or count)
    assert bytes(batch.outputs[0].data) == before, "nothing was written"


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        (lora("embed", 2, (TOKENS, WIDTH)), AdapterInvalid, "no such site"),
        (lora("lm_head", 2, (WIDTH, TOKENS), kind="embedding"), AdapterInvalid, "embedding weights for lm_head"),
        (lora("layer.experts.3.up_proj", 2, (WIDTH, 40)), AdapterInvalid, "no such site"),
        (lora("layer.experts.*.up_proj", 2, (WIDTH, 40)), AdapterInvalid, "no such site"),
        (lora("layer.experts.01.up_proj", 2, (WIDTH, 40)), AdapterInvalid, "no such site"),
        (lora("layer.q_proj", 2, (WIDTH, 8)), AdapterInvalid, "24 → 8, the model's is 24 → 16"),
        (lora("layer.experts.down_proj", 2, (40, WIDTH), kind="experts", experts=2), AdapterInvalid, "2 experts"),
        (
            lora("layer.experts.down_proj", 2, (40, WIDTH), kind="experts", experts=3, has_gain=True),
            AdapterUnsupported,
            "DoRA at layer.experts.down_proj",
        ),
        (lora("layer.experts.0.up_proj", 2, (WIDTH, 40), has_bias=True), AdapterUnsupported, "a bias at"),
    ],
    ids=lambda value: value.site if isinstance(value, SiteLora) else "",
)
def test_what_does_not_fit_is_refused(part: SiteLora, error: type[Exception], message: str) -> None:
    target = device()
    with pytest.raises(error, match=message):
        target.check(weights_of_parts([part]))


def test_two_modules_in_one_place_are_refused() -> None:
    both = [lora("layer.k_proj", 2, (WIDTH, 8)), lora("layer.qkv_proj", 2, (WIDTH, 32))]
    with pytest.raises(AdapterInvalid, match=r"layer\.k_proj and layer\.qkv_proj are both layer\.k_proj"):
        device().check(weights_of_parts(both))


def test_modules_without_weights_are_listed() -> None:
    assert APART.adapter.sites_zero(MODEL) == ("embed", "layer.experts.down_proj", "layer.k_proj")


def test_what_a_cast_loses() -> None:
    small = weights_of_parts([lora("lm_head", 2, (WIDTH, TOKENS))])
    assert cast_warnings(small, "float16") == ()
    small.a["lm_head"][0, :3] = 1e-9
    assert cast_warnings(small, "float32") == ()
    (warning,) = cast_warnings(small, "float16")
    assert warning == "3 values are too small for float16 slots and become zero, most of them in lm_head.lora_A"
    small.b["lm_head"][:2, 1] = 1e6
    with pytest.raises(AdapterInvalid, match=r"lm_head\.lora_B has 2 of 26 values") as refused:
        device(slot_dtype="float16").check(small)
    assert refused.value.facts["count"] == "2"


def test_a_gain_is_folded_in_only_where_a_cast_may_lose_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dora = weights_of_parts([lora("lm_head", 2, (WIDTH, TOKENS), has_gain=True)])
    folded: list[str] = []

    def counted(host: Any, part: SiteLora) -> torch.Tensor:
        folded.append(part.site)
        return folded_b(host, part)

    monkeypatch.setattr("slotcar_sidecar.device.weights.folded_b", counted)
    for slot_dtype, times in (("float32", 0), ("bfloat16", 2), ("float16", 4)):
        check_range(dora, slot_dtype)
        cast_warnings(dora, slot_dtype)
        assert folded == ["lm_head"] * times
