"""Weights in several files: index and shards agree on every key, and an index names nothing but files beside it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save
from slotcar_sidecar.core.errors import AdapterInvalid
from slotcar_sidecar.store.peft import read_peft
from slotcar_sidecar.store.shards import INDEX_FILE, MAX_INDEX_BYTES, Shards, shard_names

from tests.adapters import MINIMAL_CONFIG, raw_tensors

CONFIG = json.dumps(dict(MINIMAL_CONFIG)).encode()
SITES = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"
FIRST, SECOND = "adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors"
TENSORS = raw_tensors(*SITES)
MAP = {key: FIRST if number % 2 else SECOND for number, key in enumerate(TENSORS)}


def index(weight_map: object) -> bytes:
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()


def files(weight_map: dict[str, str] = MAP) -> dict[str, bytes | memoryview]:
    return {
        name: save({key: TENSORS[key] for key, file in weight_map.items() if file == name}) for name in (FIRST, SECOND)
    }


def refusal(shards: Shards) -> AdapterInvalid:
    with pytest.raises(AdapterInvalid) as caught:
        read_peft(CONFIG, shards, source="test")
    return caught.value


def test_they_are_one_adapter() -> None:
    weights = read_peft(CONFIG, Shards(index(MAP), files()), source="test")
    assert weights.adapter.sites == SITES
    assert weights.adapter.digest == read_peft(CONFIG, save(TENSORS), source="test").adapter.digest
    assert shard_names(index(MAP)) == (FIRST, SECOND)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "", "x.bin", ".x.safetensors", "a\0.safetensors",
             "adapter_model.safetensors", 1, None, ["x"], "x" * 250 + ".safetensors"]
)  # fmt: skip
def test_an_index_names_files_beside_it_alone(name: Any) -> None:
    with pytest.raises(AdapterInvalid) as caught:
        shard_names(index({"key": name}))
    assert (caught.value.facts["file"], caught.value.facts["field"]) == (INDEX_FILE, "weight_map")


@pytest.mark.parametrize("weight_map", [{}, [], None, "x", {f"k{n}": f"{n}.safetensors" for n in range(1001)}])
def test_an_index_without_a_map_or_of_too_many_files(weight_map: object) -> None:
    with pytest.raises(AdapterInvalid) as caught:
        shard_names(index(weight_map))
    assert caught.value.facts["field"] == "weight_map"


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b"x" * (MAX_INDEX_BYTES + 1), b'{"weight_map": {"a": "b", "a": "b"}}']
)
def test_an_index_that_is_none(data: bytes) -> None:
    with pytest.raises(AdapterInvalid) as caught:
        shard_names(data)
    assert caught.value.facts["file"] == INDEX_FILE


KEY = next(iter(MAP))


def test_a_key_that_is_not_there() -> None:
    error = refusal(Shards(index(MAP | {"more": FIRST}), files()))
    assert (error.facts["file"], error.facts["tensor"]) == (FIRST, "more")


def test_a_key_that_the_index_does_not_have() -> None:
    error = refusal(Shards(index({key: file for key, file in MAP.items() if key != KEY}), files()))
    assert (error.facts["file"], error.facts["tensor"], error.facts["wanted"]) == (SECOND, KEY, "no file")


def test_a_key_in_another_file() -> None:
    error = refusal(Shards(index(MAP | {KEY: FIRST}), files()))
    assert (error.facts["file"], error.facts["tensor"], error.facts["wanted"]) == (SECOND, KEY, FIRST)


def test_a_key_in_two_files() -> None:
    both = files()
    both[FIRST] = save({key: TENSORS[key] for key, file in MAP.items() if file == FIRST} | {KEY: torch.ones(4, 64)})
    assert refusal(Shards(index(MAP), both)).facts["tensor"] == KEY


def test_a_file_that_is_missing_or_damaged() -> None:
    assert refusal(Shards(index(MAP), {FIRST: files()[FIRST]})).facts["file"] == SECOND
    assert refusal(Shards(index(MAP), files() | {SECOND: b"\0" * 9})).facts["file"] == SECOND
