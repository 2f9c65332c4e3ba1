"""Finds the tensors of a base model in its Hugging Face folder by the names of its modules, without reading them.

Names are those of `AutoModelForCausalLM(...).named_modules()` in transformers 5.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from slotcar_sidecar.core.errors import AdapterInvalid, RequestInvalid
from slotcar_sidecar.store.strict_json import parse_object
from slotcar_sidecar.store.tensors import FLOATS, LENGTH_BYTES, header_bytes

__all__ = ["HEAD", "Checkpoint", "StoredTensor", "json_file", "refusal"]

HEAD = "lm_head"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_METADATA = "__metadata__"
_CONV1D_MODELS = frozenset({"gpt2", "openai-gpt"})
_CONV1D_LEAVES = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
# A base model saved without its head has no prefix: first part of its layers' names → prefix.
_BARE_LAYERS: Mapping[str, str] = {"h": "transformer", "layers": "model"}
_BARE_LAYERS_BY_MODEL: Mapping[str, str] = {"gpt_neox": "gpt_neox"}
_RENAMED: Mapping[str, str] = {"embed_out": HEAD}
_INPUT_EMBEDDINGS = (
    "model.embed_tokens",
    "transformer.wte",
    "transformer.word_embeddings",
    "gpt_neox.embed_in",
    "model.decoder.embed_tokens",
)


class StoredTensor(NamedTuple):
    """A tensor that is at the bytes [start, end) of a file of the folder."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Checkpoint:
    """A base model's folder: its configuration, and what the headers say of each tensor, by its name in the model."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def of(cls, folder: Path) -> Checkpoint:
        """Reads config.json and the headers of model.safetensors or of the shards that its index names.

        Raises RequestInvalid for `base_model`.
        """
        config = json_file(folder / "config.json")
        if config.get("quantization_config"):
            raise refusal(folder / "config.json", "the model is quantized", "full weights, or --model-spec")
        stored: dict[str, StoredTensor] = {}
        for file in _files(folder):
            stored |= _tensors(folder / file)
        return cls(folder, config, _named_as_modules(stored, str(config.get("model_type"))))

    @property
    def has_own_head(self) -> bool:
        """Whether the head is there and not tied to the embedding.

        Where the configuration does not say, a head that was saved is one of its own: tied tensors are saved once.
        """
        return f"{HEAD}.weight" in self.tensors and not self.config.get("tie_word_embeddings", False)

    @property
    def input_embedding(self) -> str | None:
        """The module that turns the ids of tokens into vectors, if it has a name that is known."""
        return next((name for name in _INPUT_EMBEDDINGS if f"{name}.weight" in self.tensors), None)

    def is_conv1d(self, module: str) -> bool:
        """Whether the module's weight is stored [in, out]."""
        return self.config.get("model_type") in _CONV1D_MODELS and module.rpartition(".")[2] in _CONV1D_LEAVES


def _named_as_modules(tensors: Mapping[str, StoredTensor], model_type: str) -> dict[str, StoredTensor]:
    prefix = ""
    for first, base in _BARE_LAYERS.items():
        if any(name.startswith(f"{first}.0.") for name in tensors):
            prefix = f"{_BARE_LAYERS_BY_MODEL.get(model_type, base)}."
    result = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        module = _RENAMED.get(module, module)
        result[f"{module}.{leaf}" if module == HEAD else f"{prefix}{name}"] = tensor
    return result


def _files(folder: Path) -> list[str]:
    if (folder / _WEIGHTS).exists():
        return [_WEIGHTS]
    index = folder / _INDEX
    if not index.exists():
        raise refusal(folder, f"neither {_WEIGHTS} nor {_INDEX}", "a folder with safetensors weights")
    files = json_file(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) and "/" not in file for file in files.values()):
        raise refusal(index, "no weight_map of file names", "what save_pretrained writes")
    return sorted(set(files.values()))


def _tensors(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = header_bytes(file.read(LENGTH_BYTES), size, path.name)
            header = parse_object(file.read(length), path.name)
    except AdapterInvalid as error:
        raise refusal(path, error.message, "a safetensors file") from error
    except OSError as error:
        raise refusal(path, str(error.strerror), "a file that can be read") from error
    body = LENGTH_BYTES + length
    return {name: _tensor(path, entry, body, size) for name, entry in header.items() if name != _METADATA}


def _tensor(path: Path, entry: object, body: int, size: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, end]} if all(
            type(number) is int and number >= 0 for number in (*shape, start, end)
        ):
            kind = FLOATS.get(dtype)
            fits = kind is None or math.prod(shape) * kind.torch.itemsize == end - start
            if fits and start <= end <= size - body:
                return StoredTensor(path.name, dtype, tuple(shape), body + start, body + end)
    raise refusal(path, f"the entry {json.dumps(entry)[:100]}", "dtype, shape and place of each tensor")


def json_file(path: Path) -> dict[str, Any]:
    """The object in a file. Raises RequestInvalid for `base_model`."""
    try:
        return parse_object(path.read_bytes(), path.name)
    except AdapterInvalid as error:
        raise refusal(path, error.message, "a JSON object") from error
    except OSError as error:
        raise refusal(path, str(error.strerror), "a file that can be read") from error


def refusal(path: Path, found: str, wanted: str) -> RequestInvalid:
    return RequestInvalid("base_model", found=f"{path}: {found}", wanted=wanted)
