"""Reads a base model's sites from a Hugging Face folder that the operator named, without reading its weights.

Names are those of `AutoModelForCausalLM(...).named_modules()` in transformers 5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from slotcar_sidecar.core.errors import AdapterInvalid, RequestInvalid
from slotcar_sidecar.core.model import DTYPES, ModelSpec, Site
from slotcar_sidecar.store.strict_json import parse_object
from slotcar_sidecar.store.tensors import LENGTH_BYTES, header_bytes

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPE_NAMES: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CONV1D_MODELS = frozenset({"gpt2", "openai-gpt"})
_CONV1D_LEAVES = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
_EMBEDDING_LEAVES = frozenset({"wte", "wpe"})
# Experts and what chooses them take rows per expert; transformers 5 has no linear module for them.
_EXPERT_PARTS = frozenset({"experts", "router"})
_HEAD = "lm_head"
# A base model saved without its head has no prefix: first part of its layers' names → prefix.
_BARE_LAYERS: Mapping[str, str] = {"h": "transformer", "layers": "model"}
_BARE_LAYERS_BY_MODEL: Mapping[str, str] = {"gpt_neox": "gpt_neox"}
_RENAMED: Mapping[str, str] = {"embed_out": _HEAD}


class _Weight(NamedTuple):
    dtype: str
    shape: list[int]


def model_spec_from_folder(folder: Path) -> ModelSpec:
    """The spec of the model in `folder`: each linear layer's weight is a site; embeddings and a tied head are not.

    Reads config.json and the headers of model.safetensors or of the shards that its index names. Raises RequestInvalid
    for `base_model`.
    """
    config = _json(folder / "config.json")
    if config.get("quantization_config"):
        raise _refusal(folder / "config.json", "the model is quantized", "full weights, or --model-spec")
    weights = _named_as_modules(_weights(folder), str(config.get("model_type")))
    sites, dtypes = [], set()
    for name, weight in weights.items():
        if _is_site(name, weight, config):
            rows, columns = weight.shape
            sites.append(Site(name, rows, columns) if _is_conv1d(name, config) else Site(name, columns, rows))
            dtypes.add(_DTYPE_NAMES.get(weight.dtype))
    if not sites or None in dtypes:
        raise _refusal(folder, "no linear layers with float weights", "a causal language model, or --model-spec")
    return ModelSpec.of(sites, dtype=_dtype(config, dtypes))


def model_spec_from_file(path: Path) -> ModelSpec:
    """The spec in a JSON file, as `ModelSpec.to_dict` gives it. Raises RequestInvalid."""
    return ModelSpec.from_dict(_json(path))


def _is_site(name: str, weight: _Weight, config: Mapping[str, Any]) -> bool:
    parts = name.split(".")
    leaf = parts[-1]
    if len(weight.shape) != 2 or "embed" in leaf or leaf in _EMBEDDING_LEAVES:
        return False
    if leaf == "gate" or not _EXPERT_PARTS.isdisjoint(parts):
        return False
    # Where the configuration does not say, a head that was saved is one of its own: tied tensors are saved once.
    return leaf != _HEAD or not config.get("tie_word_embeddings", False)


def _is_conv1d(name: str, config: Mapping[str, Any]) -> bool:
    """Whether the weight is stored [in, out]."""
    return config.get("model_type") in _CONV1D_MODELS and name.rpartition(".")[2] in _CONV1D_LEAVES


def _dtype(config: Mapping[str, Any], found: set[str | None]) -> str | None:
    """What the configuration says, else what all weights have, else None."""
    said = config.get("dtype") or config.get("torch_dtype")
    if said in DTYPES:
        return str(said)
    return next(iter(found)) if said is None and len(found) == 1 else None


def _named_as_modules(weights: Mapping[str, _Weight], model_type: str) -> dict[str, _Weight]:
    """The weights by module name."""
    prefix = ""
    for first, base in _BARE_LAYERS.items():
        if any(name.startswith(f"{first}.0.") for name in weights):
            prefix = f"{_BARE_LAYERS_BY_MODEL.get(model_type, base)}."
    names = {name: _RENAMED.get(name, name) for name in weights}
    return {(name if name == _HEAD else prefix + name): weights[stored] for stored, name in names.items()}


def _weights(folder: Path) -> dict[str, _Weight]:
    """What the headers say of each tensor `….weight`, by its name without `.weight`."""
    if (folder / _WEIGHTS).exists():
        files = [_WEIGHTS]
    elif (folder / _INDEX).exists():
        files = _shards(folder / _INDEX)
    else:
        raise _refusal(folder, f"neither {_WEIGHTS} nor {_INDEX}", "a folder with safetensors weights")
    result: dict[str, _Weight] = {}
    for file in files:
        for name, entry in _header(folder / file).items():
            if name.endswith(".weight"):
                result[name.removesuffix(".weight")] = _weight(folder / file, entry)
    return result


def _shards(index: Path) -> list[str]:
    files = _json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) and "/" not in file for file in files.values()):
        raise _refusal(index, "no weight_map of file names", "what save_pretrained writes")
    return sorted(set(files.values()))


def _weight(path: Path, entry: object) -> _Weight:
    if isinstance(entry, dict):
        dtype, shape = entry.get("dtype"), entry.get("shape")
        if isinstance(dtype, str) and isinstance(shape, list) and all(type(size) is int for size in shape):
            return _Weight(dtype, shape)
    raise _refusal(path, f"the entry {json.dumps(entry)[:100]}", "dtype and shape of each tensor")


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            header = file.read(header_bytes(file.read(LENGTH_BYTES), size, path.name))
        return parse_object(header, path.name)
    except AdapterInvalid as error:
        raise _refusal(path, error.message, "a safetensors file") from error
    except OSError as error:
        raise _refusal(path, str(error.strerror), "a file that can be read") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        return parse_object(path.read_bytes(), path.name)
    except AdapterInvalid as error:
        raise _refusal(path, error.message, "a JSON object") from error
    except OSError as error:
        raise _refusal(path, str(error.strerror), "a file that can be read") from error


def _refusal(path: Path, found: str, wanted: str) -> RequestInvalid:
    return RequestInvalid("base_model", found=f"{path}: {found}", wanted=wanted)
