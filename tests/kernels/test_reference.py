"""The reference itself: PEFT says what a LoRA layer means."""

from __future__ import annotations

import torch
from slotcar_kernels.reference import lora_delta, lora_rows
from slotcar_kernels.sites import SiteSlots


def test_agrees_with_peft_on_a_mixed_batch() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(24, 40, bias=False)).double()
    weight = base[0].weight.detach().clone()
    configs = {
        "first": LoraConfig(r=3, lora_alpha=7, target_modules=["0"]),
        "second": LoraConfig(r=5, lora_alpha=2, use_rslora=True, target_modules=["0"]),
    }
    model = get_peft_model(base, configs["first"], adapter_name="first")
    model.add_adapter("second", configs["second"])
    layer = model.base_model.model[0]
    a, b = torch.zeros(2, 8, 24, dtype=torch.float64), torch.zeros(2, 8, 40, dtype=torch.float64)
    for slot, (name, config) in enumerate(configs.items()):
        torch.nn.init.normal_(layer.lora_B[name].weight)
        a[slot, : config.r] = layer.lora_A[name].weight.detach()
        b[slot, : config.r] = layer.lora_B[name].weight.detach().t()
    model.eval()
    x = torch.randn(5, 24, dtype=torch.float64)
    names = ["second", "__base__", "first", "first", "second"]
    with torch.no_grad():
        wanted = model(x, adapter_names=names)
    site = SiteSlots(a, b, [3, 5], [7 / 3, 2 / 5**0.5])
    found = lora_rows([(1, 1), (None, 1), (0, 2), (1, 1)], x, site, x @ weight.t())
    torch.testing.assert_close(found, wanted)


def test_delta_by_hand() -> None:
    x, a, b = torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([[1.0, 10.0]]), torch.tensor([[1.0], [0.0], [-2.0]])
    assert lora_delta(x, a, b, 0.5).tolist() == [[10.5, 0.0, -21.0], [1.5, 0.0, -3.0]]
