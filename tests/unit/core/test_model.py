"""Sites of every kind: what a spec may say, how ranks share it, and where an adapter's modules land."""

from __future__ import annotations

from dataclasses import replace

import pytest
from slotcar_sidecar.core.errors import ModelMismatch, RequestInvalid
from slotcar_sidecar.core.model import ModelSpec, Site, SitePart
from slotcar_sidecar.rpc.convert_model import from_model, to_model

QKV = (SitePart("l.0.q", 8), SitePart("l.0.k", 4, 2), SitePart("l.0.v", 4, 2))
SPEC = ModelSpec.of(
    [
        Site("embed", 10, 6, "embedding"),
        Site("l.0.qkv", 6, 16, "linear", QKV, 0, "column"),
        Site("l.0.o", 8, 6, shard="row"),
        Site("l.0.experts.gate_up", 6, 8, "experts", (SitePart("l.0.e.*.gate", 4), SitePart("l.0.e.*.up", 4)), 12),
        Site("l.0.experts.down", 4, 6, "experts", (), 12),
        Site("head", 6, 10),
    ],
    tensor_parallel=4,
    renames=(("model.language_model", "l"), ("model.vision", "tower.v"), ("drop", "")),
)


def test_a_spec_survives_both_round_trips() -> None:
    assert ModelSpec.from_dict(SPEC.to_dict()) == SPEC
    assert to_model(from_model(SPEC)) == SPEC
    plain = ModelSpec.of([Site("a", 1, 2)])
    assert plain.to_dict() == {
        "sites": [{"name": "a", "in_features": 1, "out_features": 2, "kind": "linear"}],
        "tensor_parallel": 1,
    }


def test_leaves_are_in_the_order_of_sites_and_parts() -> None:
    assert [(leaf.name, leaf.in_features, leaf.out_features, leaf.experts) for leaf in SPEC.leaves] == [
        ("embed", 10, 6, 1),
        ("head", 6, 10, 1),
        ("l.0.experts.down", 4, 6, 12),
        ("l.0.e.*.gate", 6, 4, 12),
        ("l.0.e.*.up", 6, 4, 12),
        ("l.0.o", 8, 6, 1),
        ("l.0.q", 6, 8, 1),
        ("l.0.k", 6, 4, 1),
        ("l.0.v", 6, 4, 1),
    ]
    assert SPEC.leaves_of["l.0.qkv"] == range(6, 9)


def test_what_each_rank_has_of_a_site() -> None:
    assert SPEC.rank_features("l.0.qkv") == (6, 8 // 4 + 4 * 2 // 4 + 4 * 2 // 4)
    assert SPEC.rank_features("l.0.o") == (2, 6)
    assert SPEC.rank_features("head") == (6, 10)


@pytest.mark.parametrize(
    ("module", "kind", "place"),
    [
        ("head", "linear", ("head", 0, None)),
        ("embed", "embedding", ("embed", 0, None)),
        ("l.0.k", "linear", ("l.0.qkv", 1, None)),
        ("l.0.qkv", "linear", ("l.0.qkv", None, None)),
        ("l.0.e.0.gate", "linear", ("l.0.experts.gate_up", 0, 0)),
        ("l.0.e.11.up", "linear", ("l.0.experts.gate_up", 1, 11)),
        ("l.0.experts.gate_up", "experts", ("l.0.experts.gate_up", None, None)),
        ("l.0.experts.down", "experts", ("l.0.experts.down", 0, None)),
        ("model.language_model.0.o", "linear", ("l.0.o", 0, None)),
        ("model.language_model.0.e.3.gate", "linear", ("l.0.experts.gate_up", 0, 3)),
        ("drop.head", "linear", ("head", 0, None)),
        ("embed", "linear", None),
        ("head", "embedding", None),
        ("l.0.e.3.gate", "experts", None),
        ("l.0.experts.down", "linear", None),
        ("l.0.e.12.up", "linear", None),
        ("l.0.e.01.up", "linear", None),
        ("l.0.e.-1.up", "linear", None),
        ("l.0.e.\u0661.up", "linear", None),
        ("l.0.e.*.up", "linear", None),
        ("l.1.e.1.up", "linear", None),
        ("model.language_models.0.o", "linear", None),
        ("dropped.head", "linear", None),
        ("", "linear", None),
    ],
)
def test_where_a_module_lands(module: str, kind: str, place: tuple[str, int | None, int | None] | None) -> None:
    found = SPEC.place(module, kind)
    assert (found and (found.site.name, found.part, found.expert)) == place


def test_the_first_rename_that_fits_is_used() -> None:
    spec = replace(SPEC, renames=(("a.b", "l"), ("a", "head"), ("", "l.0")))
    found = [spec.place(module, "linear") for module in ("a.b.0.o", "a", "o", "a.bc")]
    assert [place and place.site.name for place in found] == ["l.0.o", "head", "l.0.o", None]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kind": "conv"}, "site.kind"),
        ({"shard": "both"}, "site.shard"),
        ({"experts": 2}, "site.experts"),
        ({"kind": "experts"}, "site.experts"),
        ({"kind": "experts", "experts": 1 << 13}, "site.experts"),
        ({"parts": (SitePart("a", 3),)}, "site.parts"),
        ({"parts": (SitePart("a", 4, 2),)}, "site.parts[0].copies"),
        ({"parts": (SitePart("a.*", 4),)}, "site.parts[0].name"),
        ({"kind": "embedding", "parts": (SitePart("a", 4),)}, "site.parts"),
        ({"kind": "embedding", "shard": "row"}, "site.shard"),
    ],
)
def test_a_site_that_is_none(change: dict[str, object], field: str) -> None:
    with pytest.raises(RequestInvalid) as refused:
        replace(Site("a", 4, 4), **change)  # type: ignore[arg-type]
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("sites", "rest", "field"),
    [
        ([Site("a", 4, 6, shard="column")], {"tensor_parallel": 4}, "model_spec.sites[0].out_features"),
        ([Site("a", 6, 4, shard="row")], {"tensor_parallel": 4}, "model_spec.sites[0].in_features"),
        ([Site("a", 4, 4), Site("b", 4, 4, "linear", (SitePart("a", 4),))], {}, "model_spec.sites"),
        ([Site("a", 4, 4)], {"tensor_parallel": "2"}, "model_spec.tensor_parallel"),
        ([Site("a", 4, 4)], {"renames": (("a.", "b"),)}, "model_spec.renames[0]"),
        ([Site("a", 4, 4)], {"renames": (("a",),)}, "model_spec.renames[0]"),
        ([Site("a", 4, 4)], {"renames": (("a", "b"),) * 65}, "model_spec.renames"),
        ([Site(f"s{n}", 4, 4, "experts", (), 4096) for n in range(65)], {}, "model_spec.sites"),
    ],
)
def test_a_spec_that_is_none(sites: list[Site], rest: dict[str, object], field: str) -> None:
    with pytest.raises(RequestInvalid) as refused:
        ModelSpec.of(sites, **rest)
    assert refused.value.field == field


def test_a_difference_in_what_is_packed_or_renamed_is_told() -> None:
    with pytest.raises(ModelMismatch) as refused:
        SPEC.check_agrees(replace(SPEC, tensor_parallel=2, renames=(("a", "b"),)))
    assert "tensor_parallel: server 4, engine 2" in refused.value.message
    assert "renames: server model.language_model -> l; " in refused.value.message
    SPEC.check_agrees(replace(SPEC, renames=()))
    other = [replace(site, parts=()) if site.name == "l.0.qkv" else site for site in SPEC.sites]
    with pytest.raises(ModelMismatch, match=r"parts l\.0\.q 8 x1; l\.0\.k 4 x2"):
        SPEC.check_agrees(ModelSpec.of(other, tensor_parallel=4))
