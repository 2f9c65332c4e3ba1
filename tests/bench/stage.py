"""What benchmarks of planes stand on: a real sidecar, adapters for it, and sessions on the planes that it has."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import slotcar_client
import torch
from safetensors.torch import save_file
from slotcar_sidecar.core import model

from tests.bench.harness import Bench
from tests.server import SidecarProcess

__all__ = ["ALPHA", "PLANES", "Site", "Stage", "adapter_weights", "serving", "skipped", "write_adapter"]

PLANES = ("unary", "stream", "ring", "direct")
ALPHA = 8
_OFFER = ("--planes", "stream,ring,direct")
_CALM = ("--heartbeat-seconds", "30")


class Site(NamedTuple):
    """One place where adapters apply."""

    name: str
    in_features: int
    out_features: int


@dataclass
class _Sidecar(SidecarProcess):
    """One that a module of another name runs, with the same command line."""

    program: tuple[str, ...] = ("slotcar_sidecar",)

    def command(self) -> list[str]:
        python, option, _, *rest = super().command()
        return [python, option, *self.program, *rest]


@dataclass(frozen=True)
class Stage:
    """A sidecar that serves, and a client of it; adapters may be in `root`."""

    sidecar: SidecarProcess
    client: slotcar_client.Client
    root: Path

    @property
    def pid(self) -> int:
        assert self.sidecar.process is not None
        return self.sidecar.process.pid

    @contextlib.contextmanager
    def sessions(self, bench: Bench, planes: Sequence[str] = PLANES) -> Iterator[dict[str, slotcar_client.Session]]:
        """A session on each plane that both sides have; prints why they do not have the others."""
        with contextlib.ExitStack() as stack:
            opened = {}
            for plane in planes:
                try:
                    session = self.client.session(f"bench {plane}", transport=plane)
                except slotcar_client.SlotcarError as error:
                    skipped(bench, {"plane": plane}, str(error))
                else:
                    opened[plane] = stack.enter_context(session)
            yield opened


@contextlib.contextmanager
def serving(
    sites: Sequence[Site],
    *,
    slots: int,
    rank: int,
    extra: Sequence[str] = (),
    program: tuple[str, ...] = ("slotcar_sidecar",),
) -> Iterator[Stage]:
    """A sidecar with all planes for a model with these sites, run by the module `program` and its first arguments."""
    with tempfile.TemporaryDirectory(prefix="slotcar-bench-") as temporary:
        folder = Path(temporary)
        spec = folder / "spec.json"
        spec.write_text(
            json.dumps(model.ModelSpec.of([model.Site(*site) for site in sites]).to_dict()), encoding="utf-8"
        )
        arguments = ("--model-spec", str(spec), *_OFFER, *_CALM, *extra)
        sidecar = _Sidecar(folder, folder, slots, rank, arguments, program=program)
        with sidecar, slotcar_client.connect(sidecar.target) as client:
            yield Stage(sidecar, client, folder)


def skipped(bench: Bench, case: Mapping[str, Any], reason: str) -> None:
    """Prints a line for what cannot be measured here."""
    print(json.dumps({"bench": bench, "case": case, "skipped": reason}), flush=True)


def adapter_weights(
    sites: Sequence[Site], *, rank: int, dtype: torch.dtype, seed: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Per site A [rank, in] and B [out, rank], random and such that a delta is about as large as its x."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(scale).to(dtype)

    return {
        site.name: (
            normal(rank, site.in_features, site.in_features**-0.5),
            normal(site.out_features, rank, rank**-0.5),
        )
        for site in sites
    }


def write_adapter(folder: Path, weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> Path:
    """A PEFT adapter with these weights for these sites."""
    folder.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    rank = 0
    for site, pair in weights.items():
        rank = len(pair[0])
        tensors |= {
            f"base_model.model.{site}.lora_{name}.weight": values for name, values in zip("AB", pair, strict=True)
        }
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({site.rpartition(".")[2] for site in weights})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
