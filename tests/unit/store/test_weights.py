"""A digest names exactly the weights and their scale: nothing less, and nothing that does not change the result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.store.peft import read_peft

from tests.adapters import MINIMAL_CONFIG, raw_tensors

SITES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj")
KEY = f"base_model.model.{SITES[0]}.lora_A.weight"
# A digest is an identity that others write down: it may change only with the version tag that it starts from.
GOLDEN = Digest("sha256:01261124c12cc37ea01d7ff5e31b3cdb110743f529654acb0c9389a5b20c5abc")


def digest(tensors: dict[str, torch.Tensor] | None = None, source: str = "test", **config: Any) -> Digest:
    data = save(raw_tensors(*SITES) if tensors is None else tensors)
    return read_peft(json.dumps(dict(MINIMAL_CONFIG) | config).encode(), data, source).adapter.digest


def changed(change: Callable[[dict[str, torch.Tensor]], None]) -> dict[str, torch.Tensor]:
    tensors = raw_tensors(*SITES)
    change(tensors)
    return tensors


def test_it_is_stable() -> None:
    tensors = {
        f"base_model.model.{SITES[0]}.lora_A.weight": torch.arange(8, dtype=torch.float32).reshape(2, 4),
        f"base_model.model.{SITES[0]}.lora_B.weight": torch.arange(6, dtype=torch.bfloat16).reshape(3, 2) / 4,
    }
    assert digest(tensors, r=2) == GOLDEN


def test_it_is_what_its_definition_says() -> None:
    tensors = raw_tensors(SITES[0])
    spec = (
        f'[{{"a":["float32",4,64],"b":["float32",64,4],"rank":4,"scale":"0x1.0000000000000p+1","site":"{SITES[0]}"}}]'
    )
    weights = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    wanted = hashlib.sha256(f"slotcar.adapter.v1\n{spec}\n".encode() + weights).hexdigest()
    assert digest(tensors) == Digest(f"sha256:{wanted}")


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: key.removeprefix("base_model.model."),
        lambda key: key.replace(".weight", ".default.weight"),
        lambda key: key.removeprefix("base_model.model.").replace(".weight", ".other.weight"),
    ],
)
def test_spellings_of_keys_have_no_part_in_it(rename: Callable[[str], str]) -> None:
    assert digest({rename(key): tensor for key, tensor in raw_tensors(*SITES).items()}) == digest()


def test_the_order_in_the_file_has_no_part_in_it() -> None:
    tensors = raw_tensors(*SITES)
    header, body = {}, b""
    for key in reversed(list(tensors)):
        data = tensors[key].numpy().tobytes()
        offsets = [len(body), len(body) + len(data)]
        header[key] = {"dtype": "F32", "shape": list(tensors[key].shape), "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + body
    assert read_peft(json.dumps(dict(MINIMAL_CONFIG)).encode(), data, "test").adapter.digest == digest()


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM", "lora_dropout": 0.1},
        {"r": 4, "lora_alpha": 8.0},
        {"lora_alpha": 4, "use_rslora": True},
        {"lora_alpha": 1, "alpha_pattern": {"q_proj": 8, "up_proj": 8}},
        {"r": 99, "rank_pattern": {".*": 4}},
    ],
)
def test_configurations_of_one_meaning_have_one_digest(config: dict[str, Any]) -> None:
    assert digest(source="elsewhere", **config) == digest()


@pytest.mark.parametrize(
    "config", [{"lora_alpha": 9}, {"lora_alpha": -8}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 9}}]
)
def test_another_scale_is_another_adapter(config: dict[str, Any]) -> None:
    assert digest(**config) != digest()


def test_minus_zero_scales_like_zero() -> None:
    assert digest(lora_alpha=-0.0) == digest(lora_alpha=0)


def test_every_bit_counts() -> None:
    found = {digest()}
    for bit in range(32):
        tensors = raw_tensors(*SITES)
        tensors[KEY].view(torch.int32)[-1, -1] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
        if torch.isfinite(tensors[KEY]).all():
            found.add(digest(tensors))
    assert len(found) >= 32


def test_another_rank_dtype_or_site_is_another_adapter() -> None:
    def pad(tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            tensors[key] = torch.nn.functional.pad(tensor, (0, 0, 0, 1) if "lora_A" in key else (0, 1))

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            tensors[key] = tensor.bfloat16()

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        for side in "AB":
            one, two = (f"base_model.model.{site}.lora_{side}.weight" for site in SITES)
            tensors[one], tensors[two] = tensors[two], tensors[one]

    def leave_out(tensors: dict[str, torch.Tensor]) -> None:
        for side in "AB":
            del tensors[f"base_model.model.{SITES[0]}.lora_{side}.weight"]

    # The padded one scales alike: alpha 10 over rank 5.
    found = [
        digest(changed(pad), r=5, lora_alpha=10),
        *(digest(changed(change)) for change in (narrow, swap, leave_out)),
    ]
    assert len({digest(), *found}) == 5
