"""What is not exactly plain LoRA is refused, and the refusal says what, where and what would be right."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from slotcar_sidecar.core.errors import AdapterInvalid, AdapterUnsupported, SlotcarError
from slotcar_sidecar.store.fields import REFUSED
from slotcar_sidecar.store.peft import read_peft

from tests.adapters import MINIMAL_CONFIG, make_adapter, raw_tensors, tiny_llama

SITE = "model.layers.0.self_attn.q_proj"
KEY_A = f"base_model.model.{SITE}.lora_A.weight"
KEY_B = f"base_model.model.{SITE}.lora_B.weight"
GOOD = save(raw_tensors(SITE))


def refusal(config: Mapping[str, Any] | bytes, weights: bytes = GOOD) -> SlotcarError:
    data = config if isinstance(config, bytes) else json.dumps(dict(config)).encode()
    with pytest.raises((AdapterInvalid, AdapterUnsupported)) as caught:
        read_peft(data, weights, source="test")
    assert caught.value.facts["file"] in caught.value.message + "adapter_config.json adapter_model.safetensors"
    assert all(len(fact) <= 250 and fact.isprintable() for fact in caught.value.facts.values())
    assert len(caught.value.message) < 1500
    return caught.value


def config(**fields: Any) -> dict[str, Any]:
    return dict(MINIMAL_CONFIG) | fields


# Field values, by the field, that change the result in a way that is not served.
UNSUPPORTED_FIELDS: dict[str, list[Any]] = {
    "alora_invocation_tokens": [[1, 2]],
    "arrow_config": [{"top_k": 3}],
    "enable_lora": [[True, False, True]],
    "kasa_config": [{"beta": 1e-4}],
    "layer_replication": [[[0, 2], [1, 2]]],
    "megatron_config": [{"tensor_model_parallel_size": 2}],
    "modules_to_save": [["lm_head"], "lm_head"],
    "monteclora_config": [{"num_samples": 4}],
    "trainable_token_indices": [[1], {"embed_tokens": [0, 1]}],
    "use_bdlora": [{"nblocks": 2}],
    "use_qalora": [True],
    "velora_config": [{"num_groups": 64}],
    "init_lora_weights": ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga", "new", 1, {}],
    "peft_type": ["LOHA", "IA3", "VERA", "lora", ""],
    "invented_field": [1, 0, "x", True, [0], {"a": None}],
    "a\x00b": ["x"],
}


def test_every_refused_field_has_a_case() -> None:
    assert REFUSED.keys() <= UNSUPPORTED_FIELDS.keys()


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in UNSUPPORTED_FIELDS.items() for value in values]
)
def test_a_field_that_is_not_served(field: str, value: Any) -> None:
    error = refusal(config(**{field: value}))
    assert isinstance(error, AdapterUnsupported)
    assert error.facts["file"] == "adapter_config.json"
    assert error.facts["field"] in (field, repr(field))
    assert error.facts["found"]
    assert error.facts["wanted"]


HARMLESS: list[dict[str, Any]] = [
    {"bias": "none", "use_dora": False, "modules_to_save": [], "layer_replication": None, "target_parameters": []},
    {"init_lora_weights": True},
    {"init_lora_weights": None, "rank_pattern": None, "alpha_pattern": {}, "use_rslora": None},
    {"future": None, "future_flag": False, "future_list": [], "future_text": "", "future_table": {}},
]


@pytest.mark.parametrize("fields", HARMLESS)
def test_a_field_at_its_harmless_default(fields: dict[str, Any]) -> None:
    weights = read_peft(json.dumps(config(**fields)).encode(), GOOD, source="test")
    assert weights.adapter.fields_ignored == tuple(sorted(name for name in fields if name.startswith("future")))


@pytest.mark.parametrize("init", [False, "gaussian", "eva", "orthogonal", "mica", "MiCA"])
def test_an_initialisation_that_leaves_the_base_model_alone(init: Any) -> None:
    fields = {"init_lora_weights": init, "eva_config": {"rho": 2.0}, "corda_config": {"corda_method": "ipm"}}
    weights = read_peft(json.dumps(config(**fields)).encode(), GOOD, source="test")
    assert weights.adapter.fields_ignored == ("corda_config", "eva_config", "init_lora_weights")


WRONG_TYPES: dict[str, list[Any]] = {
    "r": ["x", True, 1e99, 4.0, 0, -1, None, [], 10**30],
    "lora_alpha": ["8", True, None, [], 10**400, 1e31],
    "use_rslora": [1, "true", []],
    "rank_pattern": [[], "x", {"q_proj": 0}, {"q_proj": None}, {"q_proj": 2.5}, {"(": 4}, {"a)": 4}, {"[z-a]": 4}],
    "alpha_pattern": [1, {"q_proj": "2"}, {"q_proj": False}, {"q_proj": None}],
    "peft_type": [None, 1, ["LORA"]],
    "bias": [True, "some", ["all"], 1],
    "use_dora": [1, "true", []],
    "lora_bias": [1, "true"],
    "target_parameters": ["experts.down_proj", {}, [1], ["x"] * 257],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG_TYPES.items() for value in values]
)
def test_a_field_of_the_wrong_type(field: str, value: Any) -> None:
    error = refusal(config(**{field: value}))
    assert isinstance(error, AdapterInvalid)
    assert (error.facts["file"], error.facts["field"]) == ("adapter_config.json", field)


@pytest.mark.parametrize("field", ["peft_type", "r", "lora_alpha"])
def test_a_field_that_is_needed(field: str) -> None:
    error = refusal({name: value for name, value in MINIMAL_CONFIG.items() if name != field})
    assert isinstance(error, AdapterInvalid)
    assert (error.facts["field"], error.facts["found"]) == (field, "nothing")


MALFORMED_CONFIGS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"LORA"',
    b"\xff\xfe{}",
    b"\xef\xbb\xbf{}",
    b'{"peft_type": "LORA", "r": 4, "lora_alpha": NaN}',
    b'{"peft_type": "LORA", "r": 4, "lora_alpha": Infinity}',
    b'{"peft_type": "LORA", "r": 4, "lora_alpha": 1e999}',
    b'{"peft_type": "LORA", "r": 4, "lora_alpha": ' + b"9" * 5000 + b"}",
    b'{"peft_type": "LORA", "r": 4, "r": 8, "lora_alpha": 8}',
    b'{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 4, "q_proj": 8}}',
    b'{"a":' * 5000 + b"1" + b"}" * 5000,
    b"[" * 200_000,
]


@pytest.mark.parametrize("data", MALFORMED_CONFIGS, ids=lambda data: repr(data[:60]))
def test_a_malformed_configuration(data: bytes) -> None:
    error = refusal(data)
    assert isinstance(error, AdapterInvalid)
    assert error.facts["file"] == "adapter_config.json"


def replaced(**tensors: torch.Tensor | None) -> bytes:
    """The good file with some tensors replaced, added or, for None, removed."""
    merged = raw_tensors(SITE) | {key: tensor for key, tensor in tensors.items() if tensor is not None}
    data: bytes = save({key: tensor for key, tensor in merged.items() if tensors.get(key, tensor) is not None})
    return data


NAN = torch.full((4, 64), 1.0)
NAN[3, 63] = float("nan")
INF = torch.full((64, 4), float("-inf"), dtype=torch.float16)
EXTRA = torch.ones(2, 2)

INVALID_TENSORS: list[tuple[str, dict[str, torch.Tensor | None], str]] = [
    ("A without B", {KEY_B: None}, KEY_A),
    ("B without A", {KEY_A: None}, KEY_B),
    ("NaN", {KEY_A: NAN}, KEY_A),
    ("Inf", {KEY_B: INF}, KEY_B),
    ("one dimension", {KEY_A: torch.ones(4)}, KEY_A),
    ("three dimensions", {KEY_B: torch.ones(64, 4, 1)}, KEY_B),
    ("A and B of different ranks", {KEY_B: torch.ones(64, 5)}, KEY_B),
    ("another rank than the configuration's", {KEY_A: torch.ones(5, 64), KEY_B: torch.ones(64, 5)}, KEY_A),
    ("rank 0", {KEY_A: torch.ones(0, 64), KEY_B: torch.ones(64, 0)}, KEY_A),
    ("no outputs", {KEY_B: torch.ones(0, 4)}, KEY_B),
    ("integers", {KEY_A: torch.ones(4, 64, dtype=torch.int32)}, KEY_A),
    ("an unknown key", {"whatever": EXTRA}, "whatever"),
    ("a blank in the module's name", {"a b.lora_A.weight": EXTRA}, "a b.lora_A.weight"),
    ("a long name", {f"{'a' * 501}.lora_A.weight": EXTRA}, f"{'a' * 199}…"),
    ("the same site with and without prefix", {f"{SITE}.lora_A.weight": torch.ones(4, 64)}, f"{SITE}.lora_A.weight"),
]


@pytest.mark.parametrize(("what", "tensors", "named"), INVALID_TENSORS, ids=[case[0] for case in INVALID_TENSORS])
def test_a_tensor_that_is_wrong(what: str, tensors: dict[str, torch.Tensor | None], named: str) -> None:
    error = refusal(MINIMAL_CONFIG, replaced(**tensors))
    assert isinstance(error, AdapterInvalid)
    assert error.facts["tensor"] == named
    assert error.facts["found"]
    assert error.facts["wanted"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_all_that_is_finite_and_no_more(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    good = torch.tensor([limits.max, limits.min, limits.smallest_normal, limits.smallest_normal / 2, 0.0, -0.0])
    for bad in (None, "nan", "inf", "-inf"):
        values = good if bad is None else torch.cat([good, torch.tensor([float(bad)])])
        tensors = {KEY_A: torch.ones(1, 2).to(dtype), KEY_B: values.to(dtype)[:, None]}
        if bad is None:
            read_peft(json.dumps(config(r=1)).encode(), save(tensors), source="test")
        else:
            assert refusal(config(r=1), save(tensors)).facts["tensor"] == KEY_B


def test_a_rank_that_disagrees_names_both() -> None:
    error = refusal(config(rank_pattern={"q_proj": 16}))
    assert (error.facts["field"], error.facts["found"], error.facts["wanted"]) == ("r", "4", "16")


UNSUPPORTED_TENSORS: list[tuple[str, str]] = [
    ("base_model.model.lm_head.base_layer.weight", "--base-model"),
    ("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", "embedding"),
    ("base_model.model.lm_head.modules_to_save.default.weight", "whole modules"),
    ("base_model.model.lm_head.weight", "--base-model"),
    ("base_model.model.model.embed_tokens.weight", "--base-model"),
    ("base_model.model.model.norm.weight", "full weights"),
    ("base_model.model.model.norm.bias", "no LoRA"),
    (f"base_model.model.{SITE}.weight", "full weights"),
    (f"base_model.model.{SITE}.lora_diag", "variant"),
    (f"base_model.model.{SITE}.lora_A", "variant"),
    ("base_model.model.lora_A.weight", "variant"),
]


@pytest.mark.parametrize(("key", "reason"), UNSUPPORTED_TENSORS)
def test_a_tensor_that_is_not_served(key: str, reason: str) -> None:
    error = refusal(MINIMAL_CONFIG, replaced(**{key: EXTRA}))
    assert isinstance(error, AdapterUnsupported)
    assert error.facts["tensor"] == key
    assert reason in error.message


VECTOR = torch.ones(64)

# Tensors beside a good pair, the configuration they come with, and what is wrong with them.
WRONG_VECTORS: list[tuple[str, dict[str, Any], torch.Tensor, str]] = [
    ("lora_magnitude_vector", {}, VECTOR, "use_dora false"),
    ("lora_magnitude_vector.weight", {}, VECTOR, "use_dora false"),
    ("lora_B.bias", {}, VECTOR, "lora_bias false"),
    ("lora_B.bias", {"lora_bias": True}, torch.ones(63), "has 63 values"),
    ("lora_B.bias", {"lora_bias": True}, torch.ones(64, 1), "no vector"),
    ("lora_B.bias", {"lora_bias": True}, torch.ones(0), "empty"),
    ("lora_B.bias", {"lora_bias": True}, VECTOR * torch.inf, "not finite"),
    ("lora_B.bias", {"lora_bias": True}, VECTOR.int(), "dtype I32"),
]


@pytest.mark.parametrize(("key", "fields", "tensor", "says"), WRONG_VECTORS)
def test_a_vector_that_is_wrong(key: str, fields: dict[str, Any], tensor: torch.Tensor, says: str) -> None:
    error = refusal(config(**fields), replaced(**{f"base_model.model.{SITE}.{key}": tensor}))
    assert isinstance(error, AdapterInvalid)
    assert error.facts["tensor"] == f"base_model.model.{SITE}.{key}"
    assert says in error.message


@pytest.mark.parametrize(
    ("key", "field"), [(f"{SITE}.lora_magnitude_vector", "use_dora"), (f"{SITE}.base_layer.bias", "bias")]
)
def test_what_needs_the_base_model(key: str, field: str) -> None:
    error = refusal(config(use_dora=field == "use_dora"), replaced(**{key: VECTOR}))
    assert isinstance(error, AdapterUnsupported)
    assert (error.facts["field"], error.facts["tensor"], error.facts["wanted"]) == (field, key, "--base-model")


@pytest.mark.parametrize("field", ["use_dora", "lora_bias"])
def test_what_is_announced_and_is_not_there(field: str) -> None:
    error = refusal(config(**{field: True}))
    assert isinstance(error, AdapterInvalid)
    assert (error.facts["field"], error.facts["found"]) == (field, "none")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_floats_that_are_not_served(dtype: torch.dtype) -> None:
    error = refusal(MINIMAL_CONFIG, replaced(**{KEY_A: torch.ones(4, 64).to(dtype)}))
    assert isinstance(error, AdapterUnsupported)
    assert (error.facts["tensor"], error.facts["wanted"]) == (KEY_A, "F32 or F16 or BF16")


def test_two_adapters_in_one_file() -> None:
    tensors = raw_tensors(SITE, "lm_head")
    renamed = {key.replace(".weight", f".{len(key)}.weight"): tensor for key, tensor in tensors.items()}
    error = refusal(MINIMAL_CONFIG, save(renamed))
    assert "several adapters" in error.message


def test_no_tensor_at_all() -> None:
    error = refusal(MINIMAL_CONFIG, save({}))
    assert isinstance(error, AdapterInvalid)
    assert "no LoRA weights" in error.message


HEADER_END = 8 + struct.unpack("<Q", GOOD[:8])[0]
GOOD_HEADER, GOOD_BODY = GOOD[8:HEADER_END], GOOD[HEADER_END:]
# The library takes the last of two equal keys and says nothing.
ENTRY_A = json.dumps({KEY_A: json.loads(GOOD_HEADER)[KEY_A]}).encode()[1:-1]


def raw_file(header: bytes | Mapping[str, Any], body: bytes = b"", length: int | None = None) -> bytes:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(data) if length is None else length) + data + body


def test_the_parts_of_the_good_file_are_good() -> None:
    for header in (GOOD_HEADER, GOOD_HEADER + b"  ", GOOD_HEADER.replace(b"{", b'{"__metadata__":{},', 1)):
        assert read_peft(json.dumps(config()).encode(), raw_file(header, GOOD_BODY), "test").adapter.rank == 4


def entry(start: int, end: int, dtype: str = "F32", shape: tuple[int, ...] = (1, 1)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


MALFORMED_FILES: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("7 bytes", b"\0" * 7),
    ("a header of no bytes", raw_file(b"")),
    ("a header of 2^60 bytes", raw_file(b"{}", length=1 << 60)),
    ("a header of 2^64-1 bytes", raw_file(b"{}", length=(1 << 64) - 1)),
    ("a header longer than the file", raw_file(b"{}", length=3)),
    ("a header above 8 MiB", raw_file(GOOD_HEADER + b" " * (8 << 20), GOOD_BODY)),
    ("a pickle", pickle.dumps({"weights": [1.0]}, protocol=4)),
    ("a zip", b"PK\x03\x04" + b"\0" * 100),
    ("no JSON", raw_file(b"{'a': 1}")),
    ("no UTF-8", raw_file(b'{"\xff": 1}')),
    ("no object", raw_file(b"[1]")),
    ("nesting", raw_file(b"[" * 100_000)),
    ("an entry that is no object", raw_file({KEY_A: 1})),
    ("an entry without offsets", raw_file({KEY_A: {"dtype": "F32", "shape": [1]}}, b"\0" * 4)),
    ("an unknown dtype", raw_file({KEY_A: entry(0, 4, "F99")}, b"\0" * 4)),
    ("a negative size", raw_file({KEY_A: entry(0, 4, shape=(-1, -1))}, b"\0" * 4)),
    ("a size that overflows", raw_file({KEY_A: entry(0, 4, shape=(1 << 62, 1 << 62))}, b"\0" * 4)),
    ("overlapping offsets", raw_file({KEY_A: entry(0, 4), KEY_B: entry(0, 4)}, b"\0" * 4)),
    ("offsets beyond the end", raw_file({KEY_A: entry(0, 4), KEY_B: entry(4, 8)}, b"\0" * 4)),
    ("offsets in reverse", raw_file({KEY_A: entry(4, 0), KEY_B: entry(4, 8)}, b"\0" * 8)),
    ("a hole", raw_file({KEY_A: entry(4, 8)}, b"\0" * 8)),
    ("bytes at the end", raw_file({KEY_A: entry(0, 4), KEY_B: entry(4, 8)}, b"\0" * 9)),
    ("a key twice", raw_file(b"{" + ENTRY_A + b"," + GOOD_HEADER[1:], GOOD_BODY)),
]


@pytest.mark.parametrize("data", [case[1] for case in MALFORMED_FILES], ids=[case[0] for case in MALFORMED_FILES])
def test_a_malformed_file(data: bytes) -> None:
    error = refusal(MINIMAL_CONFIG, data)
    assert isinstance(error, AdapterInvalid)
    assert error.facts["file"] == "adapter_model.safetensors"
    assert error.facts["found"]


def test_a_file_cut_at_every_interesting_byte() -> None:
    end = HEADER_END
    cuts = {*range(9), end - 1, end, end + 1, end + 1023, end + 1024, len(GOOD) - 1}
    for cut in sorted(cuts):
        assert isinstance(refusal(MINIMAL_CONFIG, GOOD[:cut]), AdapterInvalid), cut


REAL: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora"),
    ({"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, "modules_to_save"),
    ({"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    ({"init_lora_weights": "pissa", "target_modules": ["q_proj"]}, "init_lora_weights"),
    ({"target_modules": ["q_proj"], "alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ({"target_modules": ["q_proj"], "layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize(("settings", "field"), REAL, ids=[case[1] for case in REAL])
def test_what_peft_really_writes_for_them(settings: dict[str, Any], field: str, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path, tiny_llama(), **settings)
    error = refusal((folder / "adapter_config.json").read_bytes(), (folder / "adapter_model.safetensors").read_bytes())
    assert isinstance(error, AdapterUnsupported)
    assert error.facts["field"] == field
