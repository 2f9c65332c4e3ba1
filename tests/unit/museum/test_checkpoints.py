"""Faults by which an adapter's files mean something else than to PEFT, or harm more than the call that names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from slotcar_sidecar.core.errors import AdapterInvalid, AdapterUnsupported, RequestInvalid
from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.model import ModelSpec, Site
from slotcar_sidecar.core.site import SitePart
from slotcar_sidecar.store.sources.local import LocalSource

from tests.adapters import MINIMAL_CONFIG, WEIGHTS_FILE, raw_tensors, write_raw_adapter
from tests.fakes.parts import Weights, make_bench
from tests.fakes.steps import computed, loaded, map_names, mapped, open_session, read_by
from tests.fakes.weights import fake_weights
from tests.tolerances import assert_close
from tests.unit.museum.shared import SPEC, Q, delta, device, digest, read, truth


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"lora_alpha": 12}, 12 / 4),
        ({"lora_alpha": 12, "use_rslora": True}, 12 / 2),
    ],
)
def test_scaling_is_pefts(fields: dict[str, Any], scale: float) -> None:
    """sglang#40835, mlx-vlm#845. The scale is alpha/r, and alpha/√r with rsLoRA.

    To see it fail: return alpha in LoraConfig.scale, or alpha / rank in either case.
    """
    (part,) = read(raw_tensors(Q), **fields).adapter.parts
    assert (part.rank, part.scale) == (4, scale)


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"lora_alpha": 1, "alpha_pattern": {"q_proj": 10}}, 10 / 4),
        ({"lora_alpha": 8, "r": 64, "rank_pattern": {"self_attn.q_proj": 4}}, 8 / 4),
    ],
)
def test_patterns_of_ranks_and_alphas_are_obeyed(fields: dict[str, Any], scale: float) -> None:
    """rank_pattern and alpha_pattern (no report). A site has the rank and alpha of the pattern that it matches.

    To see it fail: give the default to every module in values_by_pattern.
    """
    (part,) = read(raw_tensors(Q), **fields).adapter.parts
    assert (part.rank, part.scale) == (4, scale)


def test_keys_that_match_nothing_are_not_a_success() -> None:
    """vllm#34186, vllm#55193. Weights that land on no site are refused by their name.

    To see it fail: pass over a site that the model does not have in Adapter.check_fits.
    """
    other = read(raw_tensors("model.language_model.layers.0.self_attn.q_proj")).adapter
    with pytest.raises(AdapterInvalid) as caught:
        other.check_fits(ModelSpec.of([Site(Q, 64, 64)]), max_rank=16)
    assert caught.value.facts["tensor"] == "model.language_model.layers.0.self_attn.q_proj"
    nothings: list[dict[str, torch.Tensor]] = [
        {},
        {"unrelated": torch.ones(1)},
        {f"{Q}.lora_A.weight": torch.ones(4, 64)},
    ]
    for nothing in nothings:
        with pytest.raises(AdapterInvalid):
            read(nothing)


def test_a_layer_or_a_projection_that_is_missing_takes_nothing_with_it() -> None:
    """lorax (by reading), sglang#25913. What is missing is zero, in its layer and for its projection alone.

    To see it fail: keep only the module types that every layer has in pairs_by_site.
    """
    names = ("model.layers.0.q_proj", "model.layers.0.k_proj", "model.layers.7.q_proj")
    weights = read(raw_tensors(*names))
    assert set(weights.adapter.sites) == set(names)
    model = ModelSpec.of([Site(f"model.layers.{n}.{p}_proj", 64, 64) for n in range(8) for p in "qkv"])
    assert len(weights.adapter.sites_zero(model)) == 24 - 3
    target = device(1, 16, model)
    target.fill(SlotId(0), weights)
    assert {site.name for site in model.sites if delta(target, 0, site)[1].any()} == set(names)


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
    """vllm#32599, sglang#17096. Heads, embeddings and added tokens are neither served nor silently left out.

    To see it fail: pass over keys that are no LoRA in pairs_by_site.
    """
    with pytest.raises(AdapterUnsupported) as caught:
        read(raw_tensors(Q) | {key: torch.ones(300, 64)})
    assert caught.value.facts["tensor"] == key


def test_only_the_file_of_the_right_name_is_read(tmp_path: Path) -> None:
    """SceneWorks#1271. Other safetensors in the folder are not looked at, even if the right one is missing.

    To see it fail: take the first *.safetensors of the folder in LocalSource.read.
    """
    folder = write_raw_adapter(tmp_path / "a", MINIMAL_CONFIG, raw_tensors(Q, seed=1))
    wanted = LocalSource([tmp_path], 1 << 30).read(str(folder)).adapter.digest
    for name in ("a.safetensors", "adapter_model-00001.safetensors", "checkpoint-5.safetensors"):
        (folder / name).write_bytes(save(raw_tensors(Q, seed=2)))
    assert LocalSource([tmp_path], 1 << 30).read(str(folder)).adapter.digest == wanted
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(AdapterInvalid):
        LocalSource([tmp_path], 1 << 30).read(str(folder))


def test_rank_dtype_and_odd_sizes_harm_the_call_at_most() -> None:
    """vllm#2847, TensorRT-LLM#2434, vllm#5036. A rank that is too large is refused; odd sizes and dtypes are served.

    To see it fail: leave the rank out of Adapter.check_fits.
    """
    target = device(max_rank=20)
    with pytest.raises(AdapterInvalid) as caught:
        target.fill(SlotId(0), fake_weights(SPEC, {"q": 21}))
    assert (caught.value.facts["found"], caught.value.facts["wanted"]) == ("21", "at most 20")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        weights = fake_weights(SPEC, {"k": 17, "q": 20}, dtype=dtype)
        target.fill(SlotId(1), weights)
        for site in SPEC.sites:
            x, found = delta(target, 1, site)
            assert_close(found, truth(weights, site, x))


async def test_what_does_not_fit_the_slots_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#2847, TensorRT-LLM#2434, vllm#5036. Whether it fits is asked before another adapter gives way.

    To see it fail: leave out _check in Loads._place, or in Loads.bytes_of.
    """
    bench = make_bench(1)
    await loaded(bench, "a", "a")
    await loaded(bench, "big", "big", in_slot=False)

    def check(weights: Weights) -> None:
        if str(weights.adapter.digest) == digest("big"):
            raise AdapterInvalid("the rank is above the maximum")

    monkeypatch.setattr(bench.device, "check", check)
    session, layout = open_session(bench), bench.cache.layout
    with pytest.raises(AdapterInvalid):
        await loaded(bench, "larger", "big")
    with pytest.raises(AdapterInvalid):
        await mapped(bench, session, "big", load=True)
    assert bench.cache.layout is layout
    assert read_by(await computed(bench, session, map_names(bench, session, "a"))) == [digest("a")]


def test_ranks_share_a_site_evenly_or_the_model_is_refused() -> None:
    """vllm#31994, sglang#24420. Slots have whole adapters, of which each rank reads its part, so nothing is padded.

    To see it fail: leave check_ranks out of ModelSpec._check_ranks.
    """
    heads = (SitePart("q", 64), SitePart("k", 32, copies=2))
    site = Site("qk", 64, 96, parts=heads, shard="column")
    assert ModelSpec.of([site], tensor_parallel=4).by_name["qk"].rank_features(4) == (64, 16 + 16)
    for ranks, of in ((3, site), (6, site), (5, Site("o", 64, 64, shard="row")), (4, Site("k", 64, 2, shard="column"))):
        with pytest.raises(RequestInvalid):
            ModelSpec.of([of], tensor_parallel=ranks)
