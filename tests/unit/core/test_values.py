"""Identities, models and tensors: what cannot be built, and what is said about it."""

from __future__ import annotations

import pytest
from slotcar_sidecar.core.errors import ModelMismatch, RequestInvalid, ShapeMismatch
from slotcar_sidecar.core.ids import AdapterName, AdapterRef, Digest, SlotId
from slotcar_sidecar.core.marks import Marks
from slotcar_sidecar.core.model import ModelSpec, Site
from slotcar_sidecar.core.tensor import Matrix

DIGEST = "sha256:" + "0" * 64
A_SITE = {"name": "a", "in_features": 1, "out_features": 1}


@pytest.mark.parametrize(
    "text", ["", "sha256:", DIGEST.upper(), DIGEST[:-1], DIGEST + "0", "md5:" + "0" * 64, DIGEST + "\n"]
)
def test_digests_that_are_none(text: str) -> None:
    with pytest.raises(RequestInvalid) as refusal:
        Digest(text)
    assert refusal.value.field == "digest"


@pytest.mark.parametrize("text", ["sql", "team/sql", "a.b-c_d", "0", "a" * 200])
def test_names_that_are_fine(text: str) -> None:
    assert str(AdapterName(text)) == text


@pytest.mark.parametrize(
    "text", ["", "/a", "a/", "a//b", "../a", "a/../b", "a/.", ".a", "-a", "a b", "a\n", "a\0", "é", "a" * 201, "a@b"]
)
def test_names_that_are_none(text: str) -> None:
    with pytest.raises(RequestInvalid):
        AdapterName(text)


def test_a_ref_is_a_name_with_or_without_a_digest() -> None:
    assert AdapterRef.parse("a") == AdapterRef(AdapterName("a"))
    assert str(AdapterRef.parse(f"a@{DIGEST}")) == f"a@{DIGEST}"
    for text in ("a@", "@", f"@{DIGEST}", f"a@{DIGEST}@{DIGEST}"):
        with pytest.raises(RequestInvalid):
            AdapterRef.parse(text)


@pytest.mark.parametrize("name", ["", "q\n", "q\ud800", "\x1b[2J"])
def test_a_sites_name_can_be_shown_and_sent(name: str) -> None:
    with pytest.raises(RequestInvalid) as refusal:
        Site(name, 2, 3)
    assert refusal.value.facts["field"] == "site.name"


def test_a_model_spec_survives_a_round_trip() -> None:
    spec = ModelSpec.of([Site("b", 2, 3), Site("a", 1, 1)], dtype="bfloat16", fingerprint="f")
    assert ModelSpec.from_dict(spec.to_dict()) == spec
    assert [site.name for site in spec.sites] == ["a", "b"]
    assert spec.slot_bytes(max_rank=4, item_bytes=2) == (1 + 1 + 2 + 3) * 4 * 2 + (1 + 3) * 2 * 4


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ([], "model_spec"),
        ({}, "model_spec.sites"),
        ({"sites": 3}, "model_spec.sites"),
        ({"sites": []}, "model_spec.sites"),
        ({"sites": [{"name": "a", "in_features": 1}]}, "model_spec.sites[0].out_features"),
        ({"sites": [{"name": "a", "in_features": 1, "out_features": 1, "x": 1}]}, "model_spec.sites[0].x"),
        ({"sites": [{"name": 5, "in_features": 1, "out_features": 1}]}, "model_spec.sites[0].name"),
        ({"sites": [{"name": "a", "in_features": True, "out_features": 1}]}, "model_spec.sites[0].in_features"),
        ({"sites": [{"name": "a", "in_features": 0, "out_features": 1}]}, "model_spec.sites[0].in_features"),
        ({"sites": [{"name": "a", "in_features": 1, "out_features": 1 << 40}]}, "model_spec.sites[0].out_features"),
        ({"sites": [A_SITE] * 2}, "model_spec.sites"),
        ({"sites": [A_SITE], "dtype": "int8"}, "model_spec.dtype"),
        ({"sites": [A_SITE], "fingerprint": 1}, "model_spec.fingerprint"),
        ({"sites": [A_SITE], "extra": 1}, "model_spec.extra"),
        ({"sites": [A_SITE], "tensor_parallel": 0}, "model_spec.tensor_parallel"),
    ],
)
def test_a_model_spec_that_is_none_is_refused_by_field(data: object, field: str) -> None:
    with pytest.raises(RequestInvalid) as refusal:
        ModelSpec.from_dict(data)
    assert refusal.value.field == field


def test_a_difference_between_models_is_told() -> None:
    server = ModelSpec.of([Site("a", 1, 1), Site("b", 2, 3)], dtype="float32")
    server.check_agrees(ModelSpec.of([Site("b", 2, 3), Site("a", 1, 1)]))
    with pytest.raises(ModelMismatch) as refusal:
        server.check_agrees(ModelSpec.of([Site("b", 2, 4), Site("c", 1, 1)], dtype="float16"))
    difference = refusal.value.facts["difference"]
    for part in ("float32", "float16", "only the server has a", "only the engine has c", "b [3, 2]", "b [4, 2]"):
        assert part in difference


def test_a_matrix_needs_exactly_its_bytes() -> None:
    assert Matrix.checked("x", "float32", 2, 3, 0, bytes(24)).row_stride == 3
    assert Matrix.checked("x", "bfloat16", 2, 3, 5, bytes(16)).row_stride == 5
    assert Matrix.checked("x", "float16", 0, 3, 0, b"").rows == 0
    for dtype, rows, stride, size, field in (
        ("float32", 2, 0, 23, "x.inline"),
        ("float32", 2, 0, 25, "x.inline"),
        ("float32", 0, 0, 4, "x.inline"),
        ("float32", 1 << 40, 0, 24, "x.inline"),
        ("float32", 2, 2, 24, "x.row_stride"),
        ("int8", 2, 0, 6, "x.dtype"),
        ("", 2, 0, 6, "x.dtype"),
    ):
        with pytest.raises(ShapeMismatch) as refusal:
            Matrix.checked("x", dtype, rows, 3, stride, bytes(size))
        assert refusal.value.field == field


def test_the_last_reader_wakes_the_writer_once() -> None:
    marks, calls = Marks(), []
    slot, other = SlotId(0), SlotId(1)
    with marks.reading([slot, other]):
        with marks.reading([slot]):
            marks.when_unread(slot, lambda: calls.append("written"))
        assert marks.is_read(slot)
        assert calls == []
    assert calls == ["written"]
    with marks.reading([slot]):
        pass
    assert calls == ["written"]
    marks.when_unread(slot, lambda: calls.append("at once"))
    assert calls == ["written", "at once"]
