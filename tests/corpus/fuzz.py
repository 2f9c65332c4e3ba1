"""Files of strangers by the thousand: each is read or refused for a reason of the table, and nothing else happens.

`python -m tests.corpus.fuzz --minutes 30` goes on until the time is over; tests/unit/store/test_fuzz.py runs for
seconds. An example that takes longer than a minute ends the process with its stack.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import resource
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from slotcar_sidecar.core.errors import Reason, SlotcarError
from slotcar_sidecar.store import fields
from slotcar_sidecar.store.base_model import BaseModel
from slotcar_sidecar.store.peft import read_peft
from slotcar_sidecar.store.shards import Shards, shard_names

from tests.adapters import MINIMAL_CONFIG, raw_tensors, tiny_llama

REASONS = {Reason.ADAPTER_INVALID, Reason.ADAPTER_UNSUPPORTED}
MODULES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.mlp.down_proj",
    "model.embed_tokens",
    "lm_head",
    "model.layers.0.mlp.experts",
    "model.layers.0.mlp.experts.base_layer",
    "model.layers.0.mlp.experts.3.w1",
    "model.norm",
)
SUFFIXES = (
    "lora_A.weight",
    "lora_B.weight",
    "lora_A.default.weight",
    "lora_B.default.weight",
    "lora_B.bias",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
    "lora_magnitude_vector.default.weight",
    "base_layer.weight",
    "base_layer.bias",
    "weight",
    "bias",
    "modules_to_save.default.weight",
    "token_adapter.trainable_tokens_delta",
    "lora_diag",
)
EFFECTS: dict[str, st.SearchStrategy[Any]] = {
    "use_dora": st.booleans(),
    "lora_bias": st.booleans(),
    "use_rslora": st.booleans(),
    "bias": st.sampled_from(["none", "all", "lora_only"]),
    "target_parameters": st.lists(st.sampled_from(["experts.down_proj", "mlp.experts.gate_up_proj", "w", "."])),
    "rank_pattern": st.dictionaries(
        st.sampled_from(["q_proj", ".*", "(", "(a+)+$", "experts.down_proj"]), st.integers(0, 5)
    ),
    "alpha_pattern": st.dictionaries(st.text(max_size=6), st.integers() | st.floats()),
    "r": st.integers(-1, 9) | st.just(1 << 70),
    "lora_alpha": st.integers() | st.floats(),
}


class Files(NamedTuple):
    """What a stranger gave as the files of an adapter."""

    config: bytes
    weights: bytes | Shards


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
known = sorted(fields.EFFECTIVE.keys() | fields.WITHOUT_EFFECT.keys() | fields.REFUSED.keys() | {fields.INIT_FIELD})


@st.composite
def configurations(draw: st.DrawFn) -> bytes:
    """Mostly well formed, as what is malformed is refused at once."""
    how = draw(st.integers(0, 19))
    if how == 0:
        return draw(st.binary(max_size=200))
    if how == 1:
        depth = draw(st.integers(1, 100_000))
        return b'{"a":' + b"[" * depth + b"]" * depth + b"}"
    config = dict(MINIMAL_CONFIG) | draw(st.fixed_dictionaries({}, optional=EFFECTS))
    if how < 8:
        config |= draw(st.dictionaries(st.sampled_from(known) | st.text(max_size=8), values, max_size=3))
    data = json.dumps(config).encode()
    if how == 2:  # a key twice
        data = data[:-1] + b', "r": 4}'
    return data


keys = st.builds(
    lambda prefix, module, suffix: f"{prefix}{module}.{suffix}",
    st.sampled_from(["", "base_model.model.", "base_model.model.base_model.model."]),
    st.sampled_from(MODULES) | st.text(max_size=8),
    st.sampled_from(SUFFIXES),
) | st.text(max_size=12)
shapes = st.lists(st.sampled_from([0, 1, 2, 4, 8, 12, 64, 256]), max_size=3)
kinds = st.sampled_from(["F32", "F16", "BF16", "I8", "F64", "F8_E4M3", "BOOL", "F4", "X"])
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "F64": 8, "F8_E4M3": 1, "BOOL": 1}


@st.composite
def pairs(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """LoRA weights of a module or two with tensors beside them that may fit."""
    tensors: dict[str, torch.Tensor] = {}
    for module in draw(st.lists(st.sampled_from(MODULES), min_size=1, max_size=2, unique=True)):
        rank, inputs, outputs = draw(st.sampled_from([4, 8])), draw(st.sampled_from([64, 128])), 64
        if draw(st.booleans()) and "embed" in module:
            tensors[f"{module}.lora_embedding_A"] = torch.ones(rank, 256)
            tensors[f"{module}.lora_embedding_B"] = torch.ones(outputs, rank)
        else:
            tensors |= raw_tensors(module, rank=rank, features=(inputs, outputs), prefix="")
        for suffix in draw(st.lists(st.sampled_from(SUFFIXES), max_size=2)):
            shape = draw(st.just([outputs]) | st.just([256, 64]) | shapes)
            fill = draw(st.sampled_from([0.0, 1.0, -1e38, float("nan")]))
            tensors.setdefault(f"{module}.{suffix}", torch.full(shape, fill))
    return tensors


@st.composite
def weight_files(draw: st.DrawFn) -> bytes:
    how = draw(st.integers(0, 9))
    if how == 0:
        data = draw(st.binary(max_size=100))
        return struct.pack("<Q", draw(st.sampled_from([len(data), 1 << 60, (1 << 64) - 1]))) + data
    if how <= 6:
        data = bytearray(save(draw(pairs())))
        if how <= 2:
            for place, value in draw(
                st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), max_size=3)
            ):
                data[place] = value
        return bytes(data)
    header, size = {}, 0
    for key in draw(st.lists(keys, max_size=4)):
        kind, shape = draw(kinds), draw(shapes)
        count = SIZES.get(kind, 1)
        for extent in shape:
            count *= extent
        start = size + draw(st.sampled_from([0, 0, 0, 0, -1, 8, 1 << 60]))
        header[key] = {"dtype": kind, "shape": shape, "data_offsets": [start, start + count]}
        size += min(count, 1 << 20)
    if how == 9:
        header |= draw(st.dictionaries(keys, values, max_size=2))
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


@st.composite
def shards(draw: st.DrawFn) -> Shards:
    names = [f"adapter_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    tensors = draw(pairs())
    weight_map: dict[str, Any] = {key: draw(st.sampled_from(names)) for key in tensors}
    files = {name: save({key: tensor for key, tensor in tensors.items() if weight_map[key] == name}) for name in names}
    odd = st.sampled_from([*names, "../x.safetensors", "/etc/passwd", "adapter_model.safetensors", "", "a\x00b"])
    for key in draw(st.lists(st.sampled_from(sorted(tensors)) | keys, max_size=2)):
        weight_map[key] = draw(odd | scalars)
    index = json.dumps({"metadata": {}, "weight_map": draw(st.just(weight_map) | values)}).encode()
    return Shards(draw(st.just(index) | st.binary(max_size=30)), files)


files = st.builds(Files, configurations(), weight_files() | weight_files() | shards())


def outcome(given_files: Files, base: BaseModel | None) -> str:
    """Says "read", or the reason of the refusal; whatever else is raised is a bug."""
    config, weights = given_files
    if isinstance(weights, Shards):
        index = weights.index
        _check(_refusal(lambda: shard_names(index)))
    error = _refusal(lambda: read_peft(config, weights, source="fuzz", base=base))
    _check(error)
    return "read" if error is None else error.reason.value


def _refusal(call: Callable[[], object]) -> SlotcarError | None:
    try:
        call()
    except SlotcarError as error:
        return error
    return None


def _check(error: SlotcarError | None) -> None:
    if error is not None:
        assert error.reason in REASONS, error
        assert error.message.isprintable()
        assert error.facts["file"]


def many_keys(count: int) -> Files:
    """A file of so many modules, each as small as can be."""
    modules = [f"model.layers.{number}.q_proj" for number in range(count // 2)]
    config = dict(MINIMAL_CONFIG) | {"r": 1, "target_parameters": [f"experts.w{number}" for number in range(256)]}
    return Files(json.dumps(config).encode(), save(raw_tensors(*modules, rank=1, features=(1, 1))))


def run(examples: int, seed: int, seen: Callable[[str], None], base: BaseModel | None) -> None:
    """So many examples; an error shows the smallest that gives it."""

    @hypothesis.seed(seed)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    @given(files)
    def one(given_files: Files) -> None:
        faulthandler.dump_traceback_later(60, exit=True)
        seen(outcome(given_files, base))

    one()
    faulthandler.cancel_dump_traceback_later()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        tiny_llama().save_pretrained(folder)
        base = BaseModel(Path(folder))
        end, seed = time.monotonic() + options.minutes * 60, options.seed
        counts[outcome(many_keys(10_000), base)] += 1
        while time.monotonic() < end:
            run(500, seed, lambda name: counts.update([name]), base if seed % 2 else None)
            seed += 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{sum(counts.values())} examples, seeds {options.seed} to {seed - 1}: {dict(counts)}; peak {peak} MiB")


if __name__ == "__main__":
    main()
