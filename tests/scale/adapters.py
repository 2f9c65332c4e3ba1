"""Adapters by their number: tiny, all different, and made in microseconds, on disk or as what they must compute."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

SITES = {"layer.q": (16, 16), "layer.up": (16, 32)}
RANK = 4
ALPHA = 8
_FLOAT_BYTES = 4
_SHAPES = {
    f"base_model.model.{site}.lora_{name}.weight": shape
    for site, (inputs, outputs) in SITES.items()
    for name, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK)))
}
BYTES = sum(rows * columns for rows, columns in _SHAPES.values()) * _FLOAT_BYTES

Weights = dict[str, np.ndarray]


def name_of(number: int) -> str:
    return f"scale-{number}"


def weights(number: int) -> Weights:
    """The file's tensors by their keys, such that a delta is about as large as its x."""
    generator = np.random.default_rng(number)
    return {key: generator.standard_normal(shape, np.float32) * shape[1] ** -0.5 for key, shape in _SHAPES.items()}


def write(folder: Path, number: int) -> None:
    """The two files of an adapter."""
    folder.mkdir(parents=True)
    tensors = weights(number)
    header: dict[str, object] = {}
    at = 0
    for key, values in tensors.items():
        header[key] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    data = b"".join(values.tobytes() for values in tensors.values())
    (folder / "adapter_model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q", "up"]}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def delta(number: int, site: str, x: np.ndarray) -> np.ndarray:
    """scale · (x Aᵀ) Bᵀ in float64."""
    found = weights(number)
    a, b = (found[f"base_model.model.{site}.lora_{name}.weight"].astype(np.float64) for name in "AB")
    product: np.ndarray = ALPHA / RANK * (x.astype(np.float64) @ a.T) @ b.T
    return product
