"""What a Forward costs from another process: `python -m tests.bench.transport [--quick]`.

A real sidecar on a unix socket computes the delta of one site for rows of one adapter; `ours` is the whole call as an
engine makes it: from the tensor x to the tensor of deltas. The peer is the same computation by the same kernel in this
process, so that what lies between the two numbers is transport and nothing else. Its plan is made once, as is our
mapping; its weights stay in the cache, as ours do.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import slotcar_client
import torch
from safetensors.torch import load_file
from slotcar.v1 import model_pb2
from slotcar_kernels.cpu import lora_forward
from slotcar_kernels.plan import plan_rows
from slotcar_kernels.sites import SiteSlots

from tests.adapters import WEIGHTS_FILE, raw_tensors, write_raw_adapter
from tests.bench.harness import compare
from tests.server import SidecarProcess

SITE = "model.layers.0.self_attn.q_proj"
TRANSPORTS = ("unary", "stream")
TOKENS = (1, 8, 32, 256)
HIDDEN = 2048
RANK = 16
ALPHA = 8
RUNS = 300
QUICK_RUNS = 30


def write_adapter(root: Path) -> Path:
    """One adapter with weights for one site."""
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"]}
    return write_raw_adapter(root / "sql", config, raw_tensors(SITE, rank=RANK, features=(HIDDEN, HIDDEN)))


def in_process(folder: Path, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The kernel over the weights of the adapter's own file."""
    tensors = load_file(folder / WEIGHTS_FILE)
    a, b = (tensors[f"base_model.model.{SITE}.lora_{name}.weight"] for name in "AB")
    site = SiteSlots(a[None].contiguous(), b.t()[None].contiguous(), [RANK], [ALPHA / RANK])
    plan = plan_rows([(0, len(x))])

    def call() -> torch.Tensor:
        out = torch.empty(len(x), HIDDEN)
        lora_forward(plan, x, [site], [out])
        return out

    return call


def run(runs: int) -> None:
    """Compares every transport at every number of tokens."""
    spec = model_pb2.ModelSpec(sites=[model_pb2.Site(name=SITE, in_features=HIDDEN, out_features=HIDDEN)])
    with tempfile.TemporaryDirectory(prefix="slotcar-bench-") as temporary:
        root = Path(temporary)
        folder = write_adapter(root)
        with SidecarProcess(root, root) as sidecar, slotcar_client.connect(sidecar.target) as client:
            for transport in TRANSPORTS:
                with client.session("bench", model_spec=spec, transport=transport) as session:
                    client.load("sql", folder)
                    for tokens in TOKENS:
                        measure(session, folder, tokens, runs)


def measure(session: slotcar_client.Session, folder: Path, tokens: int, runs: int) -> None:
    """Prints one record, after both sides gave the same deltas."""
    x = torch.randn(tokens, HIDDEN)
    session.set_mapping([("sql", tokens)])
    peer = in_process(folder, x)

    def ours() -> torch.Tensor:
        return session.forward({SITE: x})[SITE]

    torch.testing.assert_close(ours(), peer(), rtol=1e-4, atol=1e-3)
    case = {"plane": session.transport, "tokens": tokens, "hidden": HIDDEN, "rank": RANK, "dtype": "float32"}
    compare("transport", case, ours, peer, "in-process", runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    run(QUICK_RUNS if arguments.quick else RUNS)


if __name__ == "__main__":
    main()
