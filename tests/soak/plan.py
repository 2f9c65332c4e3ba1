"""What a soak is made of: one frozen value in the run's folder, which director, clients and a replay read alike.

Nothing here imports torch, so that a client process starts fast.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

SITES: Mapping[str, tuple[int, int]] = {
    "attn.q": (64, 64),
    "attn.k": (64, 32),
    "attn.v": (64, 32),
    "attn.o": (64, 64),
    "mlp.up": (64, 128),
    "mlp.down": (128, 64),
    "wide": (512, 512),
}
MAX_FEATURES = 512
MAX_RANK = 16
SLOTS = 4
NAMES = ("a", "b", "c", "d", "e")
VERSIONS = (1, 2, 3)
UPLOADED = ("up.1", "up.2")
"""Names that are given to adapters that come with the call."""

ADAPTERS = "adapters"
POOL_ROWS = 4096

Gap = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Plan:
    """All choices follow from `seed`. Times are in seconds; a gap is the least and the most between two faults.

    On a busy machine a run takes longer than `seconds` until `least_client_faults` were done. In the last
    `calm_seconds` the server is left alone; after `warm_up_seconds` of them its memory is measured.
    """

    seed: int = 1
    seconds: float = 600.0
    calm_seconds: float = 200.0
    warm_up_seconds: float = 60.0
    clients: int = 3
    server_death_gap: Gap = (16.0, 28.0)
    server_pause_gap: Gap = (30.0, 60.0)
    client_fault_gap: Gap = (7.0, 11.0)
    least_client_faults: int = 0

    def write(self, folder: Path) -> None:
        (folder / "plan.json").write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        values: dict[str, Any] = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        plain: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls(**plain)


@dataclass(frozen=True, slots=True)
class Pools:
    """Where inputs come from: `x` and `base`, [rows, MAX_FEATURES] in float32; a record has only the first row's index.

    A site's input is the first `in_features` columns of some rows, so that no input need be stored.
    """

    x: np.ndarray
    base: np.ndarray

    @classmethod
    def make(cls, seed: int) -> Self:
        generator = np.random.default_rng(seed)
        shape = (POOL_ROWS, MAX_FEATURES)
        return cls(generator.standard_normal(shape, np.float32), generator.standard_normal(shape, np.float32))

    def write(self, folder: Path) -> None:
        np.savez(folder / "pools.npz", x=self.x, base=self.base)

    @classmethod
    def read(cls, folder: Path) -> Self:
        with np.load(folder / "pools.npz") as arrays:
            return cls(arrays["x"], arrays["base"])
