"""Single tensors of a base model: found by the names of modules, read as they were at the start, or refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from slotcar_sidecar.core.errors import RequestInvalid, SourceUnavailable
from slotcar_sidecar.store.base_model import BaseModel

from tests.adapters import tiny_gpt2, tiny_llama, tiny_qwen2

HEAD = "lm_head.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path)
    return tmp_path


def test_a_tensor_is_the_models(folder: Path) -> None:
    base, model = BaseModel(folder), tiny_llama()
    for name in (HEAD, QUERY, "model.norm.weight"):
        stored = base.find(name)
        assert stored is not None
        assert torch.equal(base.tensor(stored), model.get_parameter(name))
    assert base.find("model.layers.9.self_attn.q_proj.weight") is None


def test_rows_come_in_any_number(folder: Path) -> None:
    base, wanted = BaseModel(folder), tiny_llama().get_parameter(HEAD)
    stored = base.find(HEAD)
    assert stored is not None
    for count in (1, 100, 256, 1000):
        rows = list(base.rows(stored, count))
        assert max(map(len, rows)) <= count
        assert torch.equal(torch.cat(rows), wanted)


@pytest.mark.parametrize(("build", "name"), [(tiny_qwen2, "model.embed_tokens"), (tiny_gpt2, "transformer.wte")])
def test_a_tied_head_is_the_embedding(build: object, name: str, tmp_path: Path) -> None:
    assert callable(build)
    model = build()
    model.save_pretrained(tmp_path)
    base = BaseModel(tmp_path)
    stored = base.find(HEAD)
    assert stored is not None
    assert stored == base.find(f"{name}.weight")
    assert torch.equal(base.tensor(stored), model.get_input_embeddings().weight)


def test_shards_and_a_model_without_its_head(tmp_path: Path) -> None:
    model = tiny_llama()
    model.model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    base = BaseModel(tmp_path)
    stored = base.find(QUERY)
    assert stored is not None
    assert torch.equal(base.tensor(stored), model.get_parameter(QUERY))


def test_a_file_that_changed_is_not_read(folder: Path) -> None:
    base = BaseModel(folder)
    stored = base.find(QUERY)
    assert stored is not None
    path = folder / "model.safetensors"
    before = path.stat()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(SourceUnavailable, match="changed since the server started"):
        base.tensor(stored)
    path.unlink()
    with pytest.raises(SourceUnavailable, match="No such file"):
        base.tensor(stored)


def test_the_fingerprint_tells_fine_tunes_from_each_other(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first = BaseModel(folder).fingerprint
    assert BaseModel(folder).fingerprint == first
    copy = tmp_path_factory.mktemp("same")
    tiny_llama().save_pretrained(copy)
    assert BaseModel(copy).fingerprint == first
    tensors = load_file(copy / "model.safetensors")
    tensors[QUERY] += 1e-3
    save_file(tensors, copy / "model.safetensors")
    assert BaseModel(copy).fingerprint != first


BAD_ENTRIES = [
    {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [1], "data_offsets": [0, 1 << 60]},
    {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]},
    {"dtype": "X", "shape": [1], "data_offsets": [0, 1 << 60]},
    {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]},
    [],
]


@pytest.mark.parametrize("entry", BAD_ENTRIES)
def test_a_header_that_lies(entry: object, folder: Path) -> None:
    text = json.dumps({"lm_head.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(RequestInvalid) as caught:
        BaseModel(folder)
    assert caught.value.facts["field"] == "base_model"
