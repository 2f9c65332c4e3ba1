"""Whatever the bytes, an adapter is read or refused by a domain error: nothing else escapes."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from slotcar_sidecar.core.errors import SlotcarError
from slotcar_sidecar.store import fields
from slotcar_sidecar.store.peft import read_peft

from tests.adapters import MINIMAL_CONFIG, raw_tensors

SITE = "model.layers.0.self_attn.q_proj"
GOOD_CONFIG = json.dumps(dict(MINIMAL_CONFIG)).encode()
GOOD = save(raw_tensors(SITE, features=(2, 2)))
HEADER_END = 8 + struct.unpack("<Q", GOOD[:8])[0]

quick = settings(max_examples=100, deadline=None)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
names = st.sampled_from(sorted(fields.EFFECTIVE | fields.WITHOUT_EFFECT.keys() | fields.REFUSED.keys())) | st.text()


def read(config: bytes, weights: bytes) -> None:
    with suppress(SlotcarError):
        read_peft(config, weights, source="fuzz")


@quick
@given(st.binary(max_size=200))
def test_any_configuration_bytes(data: bytes) -> None:
    read(data, GOOD)


@quick
@given(st.dictionaries(names, values, max_size=4))
def test_any_configuration_fields(config: dict[str, Any]) -> None:
    read(json.dumps(dict(MINIMAL_CONFIG) | config).encode(), GOOD)


@quick
@given(st.binary(max_size=100), st.booleans())
def test_any_weight_bytes(data: bytes, with_length: bool) -> None:
    read(GOOD_CONFIG, (struct.pack("<Q", len(data)) if with_length else b"") + data)


@quick
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_flipped_bytes(flips: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for position, value in flips:
        data[position] = value
    read(GOOD_CONFIG, bytes(data))


entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F16", "I8", "F4", "BOOL", "F99"]),
        "shape": st.lists(st.integers(-1, 1 << 64) | st.integers(0, 4), max_size=3),
        "data_offsets": st.lists(st.integers(-1, 70), min_size=2, max_size=2) | values,
    }
)
keys = st.sampled_from([f"{SITE}.lora_A.weight", f"{SITE}.lora_B.weight", "__metadata__"]) | st.text(max_size=5)


@quick
@given(st.dictionaries(keys, entries | values, max_size=3), st.integers(0, 70))
def test_any_header(header: dict[str, Any], size: int) -> None:
    data = json.dumps(header).encode()
    read(GOOD_CONFIG, struct.pack("<Q", len(data)) + data + bytes(size))
