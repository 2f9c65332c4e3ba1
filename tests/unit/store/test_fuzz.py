"""Whatever the bytes, an adapter is read or refused by a reason of the table: nothing else escapes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from slotcar_sidecar.store.base_model import BaseModel

from tests.adapters import MINIMAL_CONFIG, raw_tensors, tiny_llama
from tests.corpus import fuzz
from tests.corpus.fuzz import Files, outcome

SITE = "model.layers.0.self_attn.q_proj"
GOOD_CONFIG = json.dumps(dict(MINIMAL_CONFIG)).encode()
GOOD = save(raw_tensors(SITE, features=(2, 2)))

quick = settings(max_examples=100)


@quick
@given(st.binary(max_size=200))
def test_any_configuration_bytes(data: bytes) -> None:
    outcome(Files(data, GOOD), None)


@quick
@given(fuzz.configurations())
def test_any_configuration(data: bytes) -> None:
    outcome(Files(data, GOOD), None)


@quick
@given(st.binary(max_size=100), st.booleans())
def test_any_weight_bytes(data: bytes, with_length: bool) -> None:
    outcome(Files(GOOD_CONFIG, (struct.pack("<Q", len(data)) if with_length else b"") + data), None)


@quick
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_flipped_bytes(flips: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for position, value in flips:
        data[position] = value
    outcome(Files(GOOD_CONFIG, bytes(data)), None)


entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F16", "I8", "F4", "BOOL", "F99"]),
        "shape": st.lists(st.integers(-1, 1 << 64) | st.integers(0, 4), max_size=3),
        "data_offsets": st.lists(st.integers(-1, 70), min_size=2, max_size=2) | fuzz.values,
    }
)
names = st.sampled_from([f"{SITE}.lora_A.weight", f"{SITE}.lora_B.weight", "__metadata__"]) | fuzz.keys


@quick
@given(st.dictionaries(names, entries | fuzz.values, max_size=3), st.integers(0, 70))
def test_any_header(header: dict[str, Any], size: int) -> None:
    data = json.dumps(header).encode()
    outcome(Files(GOOD_CONFIG, struct.pack("<Q", len(data)) + data + bytes(size)), None)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    folder: Path = tmp_path_factory.mktemp("base")
    tiny_llama().save_pretrained(folder)
    return BaseModel(folder)


@pytest.mark.parametrize("with_base", [False, True])
def test_any_files(with_base: bool, base: BaseModel) -> None:
    seen: list[str] = []
    fuzz.run(200, 1, seen.append, base if with_base else None)
    assert seen


def test_ten_thousand_modules_and_many_targets() -> None:
    assert outcome(fuzz.many_keys(10_000), None) == "read"
