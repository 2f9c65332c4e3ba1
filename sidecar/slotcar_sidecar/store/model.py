"""Reads a base model's sites from a Hugging Face folder that the operator named, without reading its weights.

Names are those of `AutoModelForCausalLM(...).named_modules()` in transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slotcar_sidecar.core.errors import RequestInvalid
from slotcar_sidecar.core.model import DTYPES, ModelSpec, Site
from slotcar_sidecar.store.checkpoint import HEAD, Checkpoint, json_file, refusal
from slotcar_sidecar.store.optional_sites import Wanted, optional_sites

__all__ = ["Wanted", "model_spec_from_file", "model_spec_from_folder", "model_spec_of"]

_DTYPE_NAMES: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_EMBEDDING_LEAVES = frozenset({"wte", "wpe"})
_NOTHING_ELSE = Wanted()
# Experts and what chooses them take rows per expert; transformers 5 has no linear module for them: see optional_sites.
_EXPERT_PARTS = frozenset({"experts", "router"})


def model_spec_from_folder(folder: Path, wanted: Wanted = _NOTHING_ELSE) -> ModelSpec:
    """The spec of the model in `folder`: see `model_spec_of`. Raises RequestInvalid for `base_model`."""
    return model_spec_of(Checkpoint.of(folder), wanted)


def model_spec_of(checkpoint: Checkpoint, wanted: Wanted = _NOTHING_ELSE) -> ModelSpec:
    """Each linear layer's weight is a site, and what else is wanted. Raises RequestInvalid for `base_model`."""
    sites, dtypes = [], set()
    for name, tensor in checkpoint.tensors.items():
        module = name.removesuffix(".weight")
        if module != name and _is_site(module, tensor.shape, checkpoint):
            rows, columns = tensor.shape
            sites.append(Site(module, *((rows, columns) if checkpoint.is_conv1d(module) else (columns, rows))))
            dtypes.add(_DTYPE_NAMES.get(tensor.dtype))
    if not sites or None in dtypes:
        raise refusal(
            checkpoint.folder, "no linear layers with float weights", "a causal language model, or --model-spec"
        )
    return ModelSpec.of([*sites, *optional_sites(checkpoint, wanted)], dtype=_dtype(checkpoint, dtypes))


def model_spec_from_file(path: Path) -> ModelSpec:
    """The spec in a JSON file, as `ModelSpec.to_dict` gives it. Raises RequestInvalid, naming the file."""
    try:
        content = json_file(path)
    except RequestInvalid as error:
        raise error.at("model_spec") from None
    try:
        return ModelSpec.from_dict(content)
    except RequestInvalid as error:
        raise error.at(f"{path}: {error.field}") from None


def _is_site(module: str, shape: tuple[int, ...], checkpoint: Checkpoint) -> bool:
    parts = module.split(".")
    leaf = parts[-1]
    if len(shape) != 2 or "embed" in leaf or leaf in _EMBEDDING_LEAVES:
        return False
    if leaf == "gate" or not _EXPERT_PARTS.isdisjoint(parts):
        return False
    return leaf != HEAD or checkpoint.has_own_head


def _dtype(checkpoint: Checkpoint, found: set[str | None]) -> str | None:
    """What the configuration says, else what all weights have, else None."""
    said = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    if said in DTYPES:
        return str(said)
    return next(iter(found)) if said is None and len(found) == 1 else None
