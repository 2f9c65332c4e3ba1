"""Measures speed and memory: `python -m tests.bench.vllm [--quick|--smoke] [--out FILE.jsonl] [--table FILE.md]`.

Prints a JSON line for each side, and writes them to `--out`; the page of all goes to `--table`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from slotcar_sidecar.demo.model import smollm2_available, smollm2_folder
from transformers import LlamaConfig, LlamaForCausalLM

from tests.bench.sizes import Size, add_sizes
from tests.bench.stage import Site, adapter_weights, write_adapter
from tests.bench.vllm.engine import Engine
from tests.bench.vllm.memory import memories
from tests.bench.vllm.speed import Group, speeds
from tests.bench.vllm.table import page

ROWS = 32
ADAPTERS = 8
RANK = 16
PROMPT_TOKENS = 12
CACHE_BYTES = 256 << 20
_CACHE = Path(__file__).resolve().parents[3] / ".cache" / "slotcar"


@contextlib.contextmanager
def prepared(size: Size) -> Iterator[Engine]:
    """The model, and adapters for it in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="slotcar-bench-") as temporary:
        folder = Path(temporary)
        real = size > Size.SMOKE and smollm2_available()
        model = smollm2_folder(_CACHE) if real else tiny_model(folder / "tiny")
        sites = linear_sites(model)
        adapters = {}
        for seed in range(ADAPTERS):
            weights = adapter_weights(sites, rank=RANK, dtype=torch.float32, seed=seed)
            adapters[f"a{seed}"] = str(write_adapter(folder / "adapters" / f"a{seed}", weights))
        yield Engine(str(model), adapters, RANK, ROWS, PROMPT_TOKENS, CACHE_BYTES)


def tiny_model(folder: Path) -> Path:
    """A random Llama with the smallest heads that vLLM has on the CPU."""
    config = LlamaConfig(
        vocab_size=10_000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(str(folder))
    return folder


def linear_sites(folder: Path) -> list[Site]:
    """Every linear layer of a Llama but its head."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, wide),
        "mlp.up_proj": (hidden, wide),
        "mlp.down_proj": (wide, hidden),
    }
    layers = range(config["num_hidden_layers"])
    return [Site(f"model.layers.{layer}.{name}", *shape) for layer in layers for name, shape in shapes.items()]


def lines(settings: Engine, size: Size) -> Iterator[dict[str, Any]]:
    """Every line, as it comes."""
    groups = [Group.of(1, size.pick((2,), (ADAPTERS,), (2, ADAPTERS)))]
    groups += [Group.of(2, (ADAPTERS,))] if size is Size.FULL else []
    steps, rounds = size.pick(2, 8, 16), size.pick(1, 3, 5)
    timed = (speeds(settings, group, steps, rounds) for group in groups)
    return chain(*timed, memories(settings, size.pick(1, 2, 3)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the lines")
    parser.add_argument("--table", type=Path, help="file for the page")
    add_sizes(parser)
    arguments = parser.parse_args()
    start, found = time.monotonic(), []
    with prepared(arguments.size) as settings:
        for line in lines(settings, arguments.size):
            found.append(line)
            print(json.dumps(line), flush=True)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in found), encoding="utf-8")
    if arguments.table is not None:
        arguments.table.write_text(page(found), encoding="utf-8")
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
