"""The truth for Forwards over a socket: adapters by the digest of their files, recomputed offline in float64."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from slotcar_sidecar.store.peft import read_peft

from tests.adapters import CONFIG_FILE, WEIGHTS_FILE, write_raw_adapter
from tests.tolerances import TOLERANCES

Sites = Mapping[str, tuple[int, int]]
"""(in_features, out_features) per site."""


class Lora(NamedTuple):
    """delta = scale · (x aᵀ) bᵀ, in float64."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def delta(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * (x.double() @ self.a.t()) @ self.b.t()


class Library:
    """Adapters below `root`, and what each digest computes at each site."""

    def __init__(self, root: Path, sites: Sites) -> None:
        self.root = root
        self.sites = sites
        self.parts: dict[str, dict[str, Lora]] = {}

    def add(self, folder: Path) -> str:
        """Remembers what is in `folder` now, by the digest of its bytes; returns the digest."""
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        assert not config.get("rank_pattern"), "the formula below is for one rank"
        assert not config.get("alpha_pattern")
        root = math.sqrt(config["r"]) if config.get("use_rslora") else config["r"]
        tensors = load_file(folder / WEIGHTS_FILE)
        parts = {}
        for key, a in tensors.items():
            site, found, _ = key.removeprefix("base_model.model.").rpartition(".lora_A.weight")
            if found:
                b = tensors[key.replace("lora_A", "lora_B")]
                parts[site] = Lora(a.double(), b.double(), config["lora_alpha"] / root)
        weights = read_peft((folder / CONFIG_FILE).read_bytes(), (folder / WEIGHTS_FILE).read_bytes(), str(folder))
        digest = str(weights.adapter.digest)
        self.parts[digest] = parts
        return digest

    def write(self, name: str, seed: int, sites: Sequence[str], rank: int = 4) -> str:
        """Writes a random adapter to root/name, whose deltas are of the order of 1; returns its digest."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for site in sites:
            inputs, outputs = self.sites[site]
            a, b = torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator)
            tensors[f"base_model.model.{site}.lora_A.weight"] = a * inputs**-0.5
            tensors[f"base_model.model.{site}.lora_B.weight"] = b * rank**-0.5
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
        return self.add(write_raw_adapter(self.root / name, config, tensors))

    def rows(self, digests: Sequence[str], row_counts: Sequence[int], site: str, x: torch.Tensor) -> torch.Tensor:
        """The delta of each row in float64, with the adapter of its entry; an empty digest is the base model."""
        out = torch.zeros(x.shape[0], self.sites[site][1], dtype=torch.float64)
        start = 0
        for digest, count in zip(digests, row_counts, strict=True):
            lora = self.parts[digest].get(site) if digest else None
            if lora is not None:
                out[start : start + count] = lora.delta(x[start : start + count])
            start += count
        assert start == x.shape[0]
        return out

    def wrong_rows(
        self,
        digests: Sequence[str],
        row_counts: Sequence[int],
        site: str,
        x: torch.Tensor,
        found: torch.Tensor,
        base: torch.Tensor | None = None,
    ) -> list[int]:
        """The rows of `found` that are not, within the tolerance of their dtype, `base` + what the digests compute.

        Without `base`, the deltas alone. Rows of the base model must have the bits of `base`, or of zeros.
        """
        plain = torch.zeros_like(found) if base is None else base
        truth = self.rows(digests, row_counts, site, x) + plain.double()
        relative, absolute = TOLERANCES[found.dtype]
        close = torch.isclose(found.double(), truth, rtol=relative, atol=absolute).all(dim=1)
        untouched = (_bits(found) == _bits(plain)).all(dim=1)
        uses_adapter = [bool(digest) for digest, count in zip(digests, row_counts, strict=True) for _ in range(count)]
        good = torch.where(torch.tensor(uses_adapter, dtype=torch.bool), close, untouched)
        return [row for row, right in enumerate(good.tolist()) if not right]


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int16 if values.element_size() == 2 else torch.int32)


def spec_file(folder: Path, sites: Sites) -> Path:
    """What `serve --model-spec` reads."""
    path = folder / "spec.json"
    entries = [
        {"name": name, "in_features": inputs, "out_features": outputs} for name, (inputs, outputs) in sites.items()
    ]
    path.write_text(json.dumps({"sites": entries}), encoding="utf-8")
    return path
