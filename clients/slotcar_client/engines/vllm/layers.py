"""What vLLM's LoRA layers are to slotcar: the sites of each, where their outputs lie side by side, and the ModelSpec.

vLLM packs q, k and v into one layer, and gate and up into another; here each is a site of its own, under the name that
it has in the checkpoint, as adapters and other engines know it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from slotcar.v1 import model_pb2, tensor_pb2
from torch import nn
from vllm.lora.layers import (
    BaseLayerWithLoRA,
    ColumnParallelLinearWithLoRA,
    LogitsProcessorWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)

from slotcar_client.convert import DTYPES
from slotcar_client.errors import ModelMismatch

_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Part:
    """One site of a layer: the columns of the layer's output that are its own, on this rank."""

    site: model_pb2.Site
    start: int
    stop: int

    @property
    def name(self) -> str:
        return self.site.name


def parts_of(name: str, layer: BaseLayerWithLoRA, packed: Sequence[str]) -> tuple[Part, ...]:
    """The sites of the layer at that path; `packed` are the leaves of the modules that it packs.

    Raises ModelMismatch for a layer of a kind that slotcar cannot serve.
    """
    base: Any = getattr(layer, "base_layer", None)
    if isinstance(layer, VocabParallelEmbeddingWithLoRA):
        site = _site(name, base.org_vocab_size, base.embedding_dim, kind=model_pb2.SITE_KIND_EMBEDDING)
        return (Part(site, 0, base.embedding_dim),)
    if isinstance(layer, LogitsProcessorWithLoRA):  # it gathers the ranks' logits before it adds
        return (Part(_site(name, layer.hidden_size, layer.org_vocab_size), 0, layer.org_vocab_size),)
    if isinstance(layer, MergedColumnParallelLinearWithLoRA):
        return _packed(name, layer, packed)
    if isinstance(layer, RowParallelLinearWithLoRA):
        site = _site(name, base.input_size, base.output_size, shard=model_pb2.SHARD_ROW)
        return (Part(site, 0, base.output_size),)
    if isinstance(layer, ReplicatedLinearWithLoRA):
        return (Part(_site(name, base.input_size, base.output_size), 0, base.output_size),)
    if isinstance(layer, ColumnParallelLinearWithLoRA):
        site = _site(name, base.input_size, base.output_size, shard=model_pb2.SHARD_COLUMN)
        if layer.tp_size > 1:
            site.parts.extend(_shards(name, layer))
        return (Part(site, 0, layer.output_size),)
    raise ModelMismatch(
        f"{name} is a {type(layer).__name__}, which slotcar has no LoRA for: leave it out with --lora-target-modules",
        site=name,
        found=type(layer).__name__,
    )


def _packed(name: str, layer: MergedColumnParallelLinearWithLoRA, packed: Sequence[str]) -> tuple[Part, ...]:
    path, _, _ = name.rpartition(".")
    widths = layer.output_slices
    if len(packed) != len(widths):
        raise ModelMismatch(
            f"{name} packs {len(packed)} modules into {len(widths)} slices: leave it out with --lora-target-modules",
            site=name,
            found=len(widths),
            wanted=len(packed),
        )
    parts, start = [], 0
    for leaf, full, width, copies in zip(packed, _full_widths(layer), widths, _copies(layer), strict=True):
        site = _site(
            f"{path}.{leaf}" if path else leaf, layer.base_layer.input_size, full, shard=model_pb2.SHARD_COLUMN
        )
        if copies > 1:
            site.parts.append(model_pb2.SitePart(name=site.name, out_features=full, copies=copies))
        parts.append(Part(site, start, start + width))
        start += width
    return tuple(parts)


def _shards(name: str, layer: ColumnParallelLinearWithLoRA) -> list[model_pb2.SitePart]:
    """How ranks cut one module that has several widths side by side; none for a plain one."""
    if not isinstance(layer, QKVParallelLinearWithLoRA) and getattr(layer.base_layer, "output_sizes", None) is None:
        return []
    sizes = _full_widths(layer)
    if len(sizes) == 1:
        return []
    return [
        model_pb2.SitePart(name=f"{name}.{index}", out_features=size, copies=count)
        for index, (size, count) in enumerate(zip(sizes, _copies(layer), strict=True))
    ]


def _full_widths(layer: Any) -> list[int]:
    """Of all ranks together, where ranks that share a head count once."""
    base = layer.base_layer
    if isinstance(layer, MergedQKVParallelLinearWithLoRA | QKVParallelLinearWithLoRA):
        return [
            heads * base.head_size for heads in (base.total_num_heads, base.total_num_kv_heads, base.total_num_kv_heads)
        ]
    return list(base.output_sizes)


def _copies(layer: Any) -> list[int]:
    """How many neighbouring ranks have the same shard of each slice."""
    if isinstance(layer, MergedQKVParallelLinearWithLoRA | QKVParallelLinearWithLoRA):
        return [1, layer.base_layer.num_kv_head_replicas, layer.base_layer.num_kv_head_replicas]
    return [1] * len(layer.base_layer.output_sizes)


def _site(
    name: str,
    in_features: int,
    out_features: int,
    *,
    kind: model_pb2.SiteKind.ValueType = model_pb2.SITE_KIND_LINEAR,
    shard: model_pb2.Shard.ValueType = model_pb2.SHARD_NONE,
) -> model_pb2.Site:
    return model_pb2.Site(name=name, in_features=in_features, out_features=out_features, kind=kind, shard=shard)


def model_spec(model: nn.Module, parts: Iterable[Part], dtype: str, ranks: int) -> model_pb2.ModelSpec:
    """The ModelSpec of an engine with these sites; adapters may have the names that the checkpoint has."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    prefixes = getattr(mapper, "orig_to_new_prefix", {})
    spec = model_pb2.ModelSpec(
        sites=[part.site for part in parts],
        dtype=DTYPES.get(dtype, tensor_pb2.DTYPE_UNSPECIFIED),
        tensor_parallel=ranks,
        renames=[
            model_pb2.Rename(adapter_prefix=old.rstrip("."), model_prefix=new.rstrip("."))
            for old, new in prefixes.items()
            if new is not None
        ],
    )
    if ranks == 1:
        for site in spec.sites:
            site.shard = model_pb2.SHARD_NONE
    return spec


def check_serves(ours: model_pb2.ModelSpec, theirs: model_pb2.ModelSpec) -> None:
    """Raises ModelMismatch unless this engine computes every site of the sidecar's model, each of the same shape."""
    shapes = {site.name: _shape(site) for site in ours.sites}
    differences = [
        f"{site.name}: server {_shape(site)}, engine {shapes.get(site.name)}"
        for site in theirs.sites
        if shapes.get(site.name) != _shape(site)
    ]
    if max(ours.tensor_parallel, 1) != max(theirs.tensor_parallel, 1):
        differences.append(f"tensor_parallel: server {theirs.tensor_parallel}, engine {ours.tensor_parallel}")
    if differences:
        raise ModelMismatch(
            f"the engine's model is not the server's: {'; '.join(differences[:_MAX_SHOWN])}",
            difference="; ".join(differences),
        )


def _shape(site: model_pb2.Site) -> tuple[int, ...]:
    parts = [number for part in site.parts for number in (part.out_features, max(part.copies, 1))]
    return site.in_features, site.out_features, max(site.kind, 1), max(site.shard, 1), *parts
