"""The sites of a checkpoint that few adapters target: its input embedding, a head tied to it, its experts.

A spec has them only if they are asked for, as slots have room for every site. Names are those that transformers 5 has:
it fuses the experts of a block, which checkpoints mostly have one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from slotcar_sidecar.core.model import Site, SitePart
from slotcar_sidecar.store.checkpoint import HEAD, Checkpoint, refusal

__all__ = ["Wanted", "optional_sites"]

_EXPERTS = ".experts."
# What the gate, up and down of each expert are called, and by model type where both they and their block were renamed.
_EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")
_OLD_BLOCKS: Mapping[str, tuple[str, tuple[str, str, str]]] = {"mixtral": ("block_sparse_moe", ("w1", "w3", "w2"))}
_NEW_BLOCK = "mlp"

_Shapes = Mapping[str, tuple[int, ...]]


class Wanted(NamedTuple):
    """What is to be a site beside the linear layers; a head of its own is one of them."""

    embeddings: bool = False
    tied_head: bool = False
    experts: bool = False


class _Block(NamedTuple):
    """Experts that are alike; `path` is the block's name in the model, `old_path` the one in older models."""

    path: str
    old_path: str
    names: tuple[str, str, str]
    experts: int
    hidden: int
    inner: int


def optional_sites(checkpoint: Checkpoint, wanted: Wanted) -> Iterator[Site]:
    """The sites that are wanted. Raises RequestInvalid for `base_model` where the checkpoint has none of a kind."""
    if wanted.embeddings:
        name, tokens, width = _embedding(checkpoint)
        yield Site(name, tokens, width, "embedding")
    if wanted.tied_head and not checkpoint.has_own_head:
        if checkpoint.config.get("tie_word_embeddings") is False:
            raise refusal(checkpoint.folder, f"no {HEAD}, and it is not tied", "a folder that has the head")
        _, tokens, width = _embedding(checkpoint)
        yield Site(HEAD, width, tokens)
    if wanted.experts:
        blocks = list(_blocks(checkpoint))
        if not blocks:
            found = "no experts with a gate, an up and a down matrix each, without biases"
            raise refusal(checkpoint.folder, found, "a mixture such as Mixtral or Qwen2-MoE")
        for block in blocks:
            yield from _sites(block, checkpoint)


def _embedding(checkpoint: Checkpoint) -> tuple[str, int, int]:
    """Name, tokens and width of the input embedding."""
    name = checkpoint.input_embedding
    shape = checkpoint.tensors[f"{name}.weight"].shape if name is not None else ()
    if name is None or len(shape) != 2:
        raise refusal(checkpoint.folder, "no input embedding of a known name", "a causal language model")
    return name, *shape


def _blocks(checkpoint: Checkpoint) -> Iterator[_Block]:
    """The blocks whose experts can be sites, whether the checkpoint has these fused or one by one."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in checkpoint.tensors.items():
        block, found, rest = name.partition(_EXPERTS)
        if found:
            shapes.setdefault(block, {})[rest] = tensor.shape
    old_block, names = _OLD_BLOCKS.get(str(checkpoint.config.get("model_type")), ("", _EXPERT_NAMES))
    for block, inside in shapes.items():
        found_shape = _fused(inside) or _one_by_one(inside, names)
        if found_shape is None:
            continue
        path, old_path = block, block
        if old_block:
            parent = block.rpartition(".")[0]
            path, old_path = f"{parent}.{_NEW_BLOCK}", f"{parent}.{old_block}"
        yield _Block(path, old_path, names, *found_shape)


def _fused(shapes: _Shapes) -> tuple[int, int, int] | None:
    """Experts, hidden and inner width of gate_up_proj [E, 2 · inner, hidden] and down_proj [E, hidden, inner]."""
    if shapes.keys() != {"gate_up_proj", "down_proj"} or len(shapes["down_proj"]) != 3:
        return None
    experts, hidden, inner = shapes["down_proj"]
    return (experts, hidden, inner) if shapes["gate_up_proj"] == (experts, 2 * inner, hidden) else None


def _one_by_one(shapes: _Shapes, names: tuple[str, str, str]) -> tuple[int, int, int] | None:
    """The same of three matrices for each expert, and nothing else."""
    gate, up, down = names
    first = shapes.get(f"0.{gate}.weight", ())
    if len(first) != 2:
        return None
    inner, hidden = first
    each = {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}
    experts = len(shapes) // len(each)
    wanted = {f"{number}.{name}.weight": shape for number in range(experts) for name, shape in each.items()}
    return (experts, hidden, inner) if shapes == wanted else None


def _sites(block: _Block, checkpoint: Checkpoint) -> Iterator[Site]:
    """The two of the experts, with the names of adapters that have a module for each, and that of the router."""
    _, _, _, experts, hidden, inner = block
    gate, up, down = (f"{block.old_path}.experts.*.{name}" for name in block.names)
    fused = f"{block.path}.experts"
    gate_up = (SitePart(gate, inner), SitePart(up, inner))
    yield Site(f"{fused}.gate_up_proj", hidden, 2 * inner, "experts", gate_up, experts)
    yield Site(f"{fused}.down_proj", inner, hidden, "experts", (SitePart(down, hidden),), experts)
    for path in dict.fromkeys((block.path, block.old_path)):
        router = checkpoint.tensors.get(f"{path}.gate.weight")
        if router is not None and router.shape == (experts, hidden):
            parts = (SitePart(f"{block.old_path}.gate", experts),) if block.old_path != block.path else ()
            yield Site(f"{block.path}.gate", hidden, experts, parts=parts)
