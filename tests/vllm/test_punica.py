"""What a layer adds is one operator of a compiled graph, which mutates the layer's output in place."""

from __future__ import annotations

import pytest
import torch
from slotcar.v1 import model_pb2
from slotcar_client.engines.vllm.deltas import Deltas, Layer
from slotcar_client.engines.vllm.layers import Part
from slotcar_client.engines.vllm.punica import PunicaWrapper

SITE = Part(model_pb2.Site(name="model.layers.0.mlp.down_proj", in_features=3, out_features=2), 0, 2)


class Doubled(Deltas):
    """Adds twice the sum of each row of x, and counts how often."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def add(self, layer: Layer, y: torch.Tensor, x: torch.Tensor) -> None:
        self.calls.append(layer.number)
        y += 2 * x.sum(1, keepdim=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_delta_of_a_layer_survives_compilation(compiled: bool) -> None:
    deltas, wrapper = Doubled(), PunicaWrapper(16, 4, "cpu")
    layers = [Layer(deltas, [SITE], "linear") for _ in range(2)]

    def run(x: torch.Tensor) -> torch.Tensor:
        y = torch.ones(len(x), 2)
        for layer in layers:
            wrapper.add_lora_linear(y, x, layer, layer, 1.0, (2,))
        return y * 10

    call = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    x = torch.arange(6.0).view(2, 3)
    assert call(x).tolist() == [[130, 130], [490, 490]]
    assert deltas.calls == [layer.number for layer in layers]


def test_without_a_mapping_nothing_is_added() -> None:
    y = torch.tensor([[-0.0, 1.0]])
    layer = Layer(Deltas(), [SITE], "linear")
    PunicaWrapper(16, 4, "cpu").add_lora_linear(y, torch.ones(1, 3), layer, layer, 1.0, (2,))
    assert torch.signbit(y).tolist() == [[True, False]]
