"""Which layers of a transformers model are sites, and of which kind and shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from slotcar.v1 import model_pb2
from torch import nn

__all__ = ["Layer", "Wanted", "layers_of"]

# Attention reads the weight of these and does not call them, so a hook would add nothing.
_NEVER_CALLED = nn.modules.linear.NonDynamicallyQuantizableLinear
# What the experts of a block were called when each was a module: gate, up and down.
_EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")
_OLD_BLOCKS = {"mixtral": ("block_sparse_moe", ("w1", "w3", "w2"))}


class Wanted(NamedTuple):
    """What is to be a site beside the linear layers."""

    embeddings: bool = False
    tied_head: bool = False
    experts: bool = False


EVERYTHING = Wanted(True, True, True)


class Layer(NamedTuple):
    """A site, the module that computes there, and what it is: "linear", "embedding", "router" or "experts"."""

    site: model_pb2.Site
    module: nn.Module
    kind: str

    @property
    def name(self) -> str:
        return self.site.name

    @property
    def features(self) -> tuple[int, int]:
        return self.site.in_features, self.site.out_features


def layers_of(model: nn.Module, wanted: Wanted) -> Iterator[Layer]:
    """Each once. An output embedding that is the input embedding is a site only if it is wanted."""
    from transformers.pytorch_utils import Conv1D

    tied, inputs = _tied_output(model), _embedding(model, "get_input_embeddings")
    model_type = str(getattr(getattr(model, "config", None), "model_type", ""))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and not isinstance(module, _NEVER_CALLED):
            if module is not tied or wanted.tied_head:
                yield Layer(_linear(name, *_features(module)), module, "linear")
        elif isinstance(module, nn.Embedding) and module is inputs and wanted.embeddings:
            kind = model_pb2.SITE_KIND_EMBEDDING
            shape = module.num_embeddings, module.embedding_dim
            yield Layer(
                model_pb2.Site(name=name, in_features=shape[0], out_features=shape[1], kind=kind),
                module,
                kind="embedding",
            )
        elif wanted.experts and _are_fused_experts(module):
            yield from _block(name, module, model.get_submodule(name.rpartition(".")[0]), model_type)


def _block(name: str, experts: nn.Module, block: nn.Module, model_type: str) -> Iterator[Layer]:
    """The fused experts of a block, and its router, with the names that adapters of older models have for them."""
    gate_up, down = _matrices(experts)
    count, (twice, hidden), inner = len(gate_up), gate_up.shape[1:], down.shape[2]
    path = name.rpartition(".")[0]
    old_block, (gate_name, up_name, down_name) = _OLD_BLOCKS.get(model_type, ("", _EXPERT_NAMES))
    old_path = f"{path.rpartition('.')[0]}.{old_block}" if old_block else path
    each = f"{old_path}.experts.*"
    for leaf, shape, parts in (
        ("gate_up_proj", (hidden, twice), {f"{each}.{gate_name}": twice // 2, f"{each}.{up_name}": twice // 2}),
        ("down_proj", (inner, hidden), {f"{each}.{down_name}": hidden}),
    ):
        site = _linear(f"{name}.{leaf}", *shape, parts=parts)
        site.kind, site.experts = model_pb2.SITE_KIND_EXPERTS, count
        yield Layer(site, experts, "experts")
    router = getattr(block, "gate", None)
    if isinstance(router, nn.Module) and not isinstance(router, nn.Linear):
        weight = getattr(router, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.shape == (count, hidden):
            parts = {f"{old_path}.gate": count} if old_block else {}
            yield Layer(_linear(f"{path}.gate", hidden, count, parts=parts), router, "router")


def _linear(name: str, in_features: int, out_features: int, parts: dict[str, int] | None = None) -> model_pb2.Site:
    return model_pb2.Site(
        name=name,
        in_features=in_features,
        out_features=out_features,
        kind=model_pb2.SITE_KIND_LINEAR,
        parts=[model_pb2.SitePart(name=part, out_features=width, copies=1) for part, width in (parts or {}).items()],
    )


def _are_fused_experts(module: nn.Module) -> bool:
    """gate_up_proj [E, 2·inner, hidden] and down_proj [E, hidden, inner], with a gate and without biases."""
    matrices: Iterable[object] = (getattr(module, leaf, None) for leaf in ("gate_up_proj", "down_proj"))
    if not all(isinstance(matrix, torch.Tensor) and matrix.dim() == 3 for matrix in matrices):
        return False
    gate_up, down = _matrices(module)
    plain = getattr(module, "has_gate", False) and not getattr(module, "has_bias", True)
    fits = gate_up.shape == (len(down), 2 * down.shape[2], down.shape[1])
    return bool(plain and fits and not getattr(module, "is_transposed", True))


def _matrices(experts: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up, down = experts.gate_up_proj, experts.down_proj
    assert isinstance(gate_up, torch.Tensor)
    assert isinstance(down, torch.Tensor)
    return gate_up, down


def _embedding(model: nn.Module, getter: str) -> nn.Module | None:
    try:
        found: nn.Module | None = getattr(model, getter)() if hasattr(model, getter) else None
    except NotImplementedError:  # a model of another modality has none
        return None
    return found


def _tied_output(model: nn.Module) -> nn.Module | None:
    embeddings = [_embedding(model, getter) for getter in ("get_output_embeddings", "get_input_embeddings")]
    weights = [getattr(module, "weight", None) for module in embeddings]
    return embeddings[0] if weights[0] is not None and weights[0] is weights[1] else None


def _features(module: nn.Module) -> tuple[int, int]:
    """in_features and out_features; Conv1D keeps its weight as [in, out]."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0], weight.shape[1]
