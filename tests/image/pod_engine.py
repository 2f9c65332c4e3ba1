"""An engine in a container of its own: it computes by each plane without end, and checks every row by its own means.

It finds the sidecar by $SLOTCAR_TARGET alone, and knows of slotcar nothing but the client. What happens is a line of
JSON on its standard output; `answered` counts steps whose rows were all looked at.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import slotcar_client
import torch
from safetensors.torch import load_file
from slotcar_client import BASE, Client, Session, SlotcarError

PLANES = ("stream", "ring", "direct")
COUNTS = (3, 1, 2)
STEPS_PER_LINE = 20


def say(event: str, **facts: object) -> None:
    os.write(1, json.dumps({"event": event, **facts}).encode() + b"\n")


class Reference:
    """What a PEFT folder with one rank adds to the rows of a site: alpha/r · (x Aᵀ) Bᵀ in float64."""

    def __init__(self, folder: Path, site: str) -> None:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "adapter_model.safetensors")
        self.a, self.b = (tensors[f"base_model.model.{site}.lora_{half}.weight"].double() for half in "AB")
        self.scale = config["lora_alpha"] / config["r"]

    def delta(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.scale * (x.double() @ self.a.t()) @ self.b.t()
        return found


class Engine:
    """Two adapters and the base model in one batch, by one plane."""

    def __init__(self, plane: str, options: argparse.Namespace) -> None:
        self.plane = plane
        self.options = options
        self.parts = [Reference(options.adapters / name, options.site) for name in options.names]

    def run(self) -> None:
        try:
            with slotcar_client.connect() as client:
                self._compute(client)
        except SlotcarError as error:
            say("ended", plane=self.plane, reason=error.reason, code=error.code.name, message=error.message)

    def _compute(self, client: Client) -> None:
        settings: Mapping[str, object] = {"transport": self.plane, "away": self.options.away, "grace_seconds": 1}
        with client.session(f"pod-{self.plane}", **settings) as session:  # type: ignore[arg-type]
            first, second = self.options.names
            mapping = session.set_mapping([first, BASE, second], load=True)
            say("mapped", plane=self.plane, transport=session.transport, digests=mapping.entry_digests)
            for step in itertools.count(1):
                self._step(session, step)
                if step % STEPS_PER_LINE == 0:
                    epoch = session.layout.version.epoch
                    say("answered", plane=self.plane, steps=step, epoch=epoch, recoveries=session.recoveries)

    def _step(self, session: Session, step: int) -> None:
        site, tolerance = self.options.site, self.options.tolerance
        features = self.parts[0].a.shape[1]
        x = torch.randn(sum(COUNTS), features, generator=torch.Generator().manual_seed(step))
        found = session.forward({site: x}, COUNTS)[site]
        one, base, two = torch.split(x, list(COUNTS))
        truth = torch.cat([self.parts[0].delta(one), torch.zeros(len(base), found.shape[1]), self.parts[1].delta(two)])
        right = torch.isclose(found.double(), truth, rtol=tolerance[0], atol=tolerance[1]).all(dim=1)
        right &= (found == 0).all(dim=1) | (truth != 0).any(dim=1)  # the base model's rows are zeros to the bit
        if not right.all():
            say("wrong", plane=self.plane, step=step, rows=(~right).nonzero().flatten().tolist())


def wait_for_sidecar(options: argparse.Namespace) -> None:
    """Where the sidecar is no init container, the engine may be there first."""
    with slotcar_client.connect() as client:
        client.session("pod-first", away="wait").close()
        for name in options.names:
            client.load(name, options.adapters / name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--adapters", type=Path, required=True)
    parser.add_argument("--names", nargs=2, required=True)
    parser.add_argument("--site", required=True)
    parser.add_argument("--tolerance", nargs=2, type=float, required=True)
    parser.add_argument("--away", default="fail")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    torch.set_num_threads(1)
    wait_for_sidecar(options)
    say(
        "began", uid=os.getuid(), packages=sorted({name.partition(".")[0] for name in sys.modules if "slotcar" in name})
    )
    for plane in PLANES:
        threading.Thread(target=Engine(plane, options).run, name=plane).start()
    signal.pause()


if __name__ == "__main__":
    main()
