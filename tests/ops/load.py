"""Engines that work on every plane, and count by themselves what the server's metrics must say of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import slotcar_client
import torch
from slotcar_client import BASE, Client, Session

SITE, FEATURES = "layer.q", (32, 48)
SITES = {SITE: FEATURES}
_FLOAT_BYTES = 4
_WAIT_SECONDS = 60.0


@dataclass
class Told:
    """What an engine did. `filled` are the adapters that its mappings asked for."""

    mappings: int = 0
    forwards: int = 0
    rows: int = 0
    recoveries: int = 0
    asked: Counter[str] = field(default_factory=Counter)

    @property
    def in_bytes(self) -> int:
        return self.rows * FEATURES[0] * _FLOAT_BYTES

    @property
    def out_bytes(self) -> int:
        return self.rows * FEATURES[1] * _FLOAT_BYTES


class Engine:
    """One session, whose mapping has an adapter and the base model."""

    def __init__(self, client: Client, plane: str, seed: int) -> None:
        self.told = Told()
        self.plane = plane
        self.adapter = ""
        self.session: Session = client.session(plane, transport=plane, on_stale=self._is_stale)
        self._random = Random(seed)

    def _is_stale(self, *_: object) -> None:
        self.told.recoveries += 1

    def step(self, adapter: str) -> None:
        """A mapping, and some Forwards for it."""
        self.adapter = adapter
        self.session.set_mapping([adapter, BASE], load=True, wait_seconds=_WAIT_SECONDS)
        self.told.mappings += 1
        self.told.asked[adapter] += 1
        for _ in range(self._random.randint(1, 4)):
            self.forward()

    def forward(self) -> None:
        counts = [self._random.randint(1, 5), self._random.randint(0, 3)]
        x = torch.ones(sum(counts), FEATURES[0])
        assert self.session.forward({SITE: x}, counts)[SITE].shape == (len(x), FEATURES[1])
        self.told.forwards += 1
        self.told.rows += len(x)

    def run(self, adapters: Sequence[str], steps: int) -> None:
        """Asks for adapters at random."""
        for _ in range(steps):
            self.step(self._random.choice(adapters))


def unload_under(engine: Engine, client: slotcar_client.Client) -> None:
    """Takes the slot of what the engine computes with, and brings the adapter back; the engine recovers by itself."""
    source = client.get(engine.adapter).source
    client.unload(engine.adapter, force=True)
    client.load(engine.adapter, source, tier="host")
    engine.forward()
