"""The base model as far as slots are shaped by it: its sites and what else adapters depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from slotcar_sidecar.core.errors import ModelMismatch, RequestInvalid
from slotcar_sidecar.core.placement import Placement, Rename, find, places_by_name, renamed
from slotcar_sidecar.core.site import MAX_RANKS, Leaf, Site, SitePart

__all__ = ["DTYPES", "ModelSpec", "Site", "SitePart"]

DTYPES = ("float32", "float16", "bfloat16")
_MAX_RECORDS = 1 << 18
MAX_RENAMES = 64
_MAX_SHOWN = 5
_SITE_FIELDS = ("name", "in_features", "out_features", "kind")
_PART_FIELDS = ("name", "out_features")
_VECTOR_BYTES = 8  # gain and bias of one feature, as float32


@dataclass(frozen=True)
class ModelSpec:
    """Sites in order of their names; `dtype` and `fingerprint` are None when unknown and then not compared.

    `renames` are for adapters whose modules have other names than the model's.
    """

    sites: tuple[Site, ...]
    dtype: str | None = None
    tensor_parallel: int = 1
    fingerprint: str | None = None
    renames: tuple[Rename, ...] = ()
    _places: Mapping[str, Placement] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [site.name for site in self.sites]
        if not names:
            raise RequestInvalid("model_spec.sites", found="no site", wanted="at least one")
        if names != sorted(set(names)):
            raise RequestInvalid("model_spec.sites", found="repeated or unsorted names", wanted="each name once")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise RequestInvalid("model_spec.dtype", found=self.dtype, wanted=" or ".join(DTYPES))
        if self.fingerprint is not None and not isinstance(self.fingerprint, str):
            raise RequestInvalid("model_spec.fingerprint", found=self.fingerprint, wanted="a string")
        self._check_ranks()
        _check_renames(self.renames)
        records = sum(leaf.experts for leaf in self.leaves)
        if records > _MAX_RECORDS:
            found = f"{records} parts and experts"
            raise RequestInvalid("model_spec.sites", found=found, wanted=f"at most {_MAX_RECORDS}")
        object.__setattr__(self, "_places", places_by_name(self.sites))

    def _check_ranks(self) -> None:
        ranks = self.tensor_parallel
        if type(ranks) is not int or not 1 <= ranks <= MAX_RANKS:
            raise RequestInvalid("model_spec.tensor_parallel", found=ranks, wanted=f"1 to {MAX_RANKS}")
        for index, site in enumerate(self.sites):
            try:
                site.check_ranks(ranks)
            except RequestInvalid as error:
                raise error.at(f"model_spec.sites[{index}].{error.facts['field'].removeprefix('site.')}") from None

    @classmethod
    def of(cls, sites: list[Site], **rest: Any) -> ModelSpec:
        """A spec from sites in any order."""
        return cls(tuple(sorted(sites, key=lambda site: site.name)), **rest)

    @classmethod
    def from_dict(cls, data: object) -> ModelSpec:
        """Reads what `to_dict` wrote; an unknown or malformed field is refused by name."""
        known = {"sites", "dtype", "tensor_parallel", "fingerprint", "renames"}
        fields = _checked_fields(data, "model_spec", known, required={"sites"})
        sites = [_site(f"model_spec.sites[{i}]", s) for i, s in enumerate(_checked_list(fields, "sites"))]
        rest = {key: value for key, value in fields.items() if key not in ("sites", "renames")}
        if "renames" in fields:
            renames = _checked_list(fields, "renames")
            rest["renames"] = tuple(tuple(rename) if isinstance(rename, list) else rename for rename in renames)
        return cls.of(sites, **rest)

    def to_dict(self) -> dict[str, object]:
        data: dict[str, object] = {"sites": [_site_to_dict(site) for site in self.sites]}
        rest = {"dtype": self.dtype, "tensor_parallel": self.tensor_parallel, "fingerprint": self.fingerprint}
        if self.renames:
            data["renames"] = [list(rename) for rename in self.renames]
        return data | {key: value for key, value in rest.items() if value is not None}

    @cached_property
    def by_name(self) -> Mapping[str, Site]:
        return MappingProxyType({site.name: site for site in self.sites})

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """What slots have arrays for, in the order of the sites and of their parts."""
        return tuple(Leaf(site, part) for site in self.sites for part in site.modules)

    @cached_property
    def leaves_of(self) -> Mapping[str, range]:
        """Which of `leaves` are a site's, by its name."""
        ranges, start = {}, 0
        for site in self.sites:
            ranges[site.name] = range(start, start + len(site.modules))
            start += len(site.modules)
        return MappingProxyType(ranges)

    def place(self, module: str, kind: str) -> Placement | None:
        """Where an adapter's module lands, if the model has one of that name and kind."""
        found = find(self._places, renamed(module, self.renames))
        return found if found is not None and found.takes(kind) else None

    def rank_features(self, site: str) -> tuple[int, int]:
        """Width of the input and of the output that each rank has at a site; of an embedding the first is unused."""
        return self._rank_features[site]

    @cached_property
    def _rank_features(self) -> dict[str, tuple[int, int]]:
        return {site.name: site.rank_features(self.tensor_parallel) for site in self.sites}

    def slot_bytes(self, max_rank: int, item_bytes: int) -> int:
        """Size of one slot over all leaves: A [max_rank, in], B [max_rank, out] and, but for experts, two vectors."""
        return sum(
            leaf.experts * (leaf.in_features + leaf.out_features) * max_rank * item_bytes
            + (0 if leaf.site.experts else leaf.out_features * _VECTOR_BYTES)
            for leaf in self.leaves
        )

    def check_agrees(self, other: ModelSpec) -> None:
        """Raises ModelMismatch with the difference between this spec (the server's) and an engine's."""
        differences = [
            f"{name}: server {mine}, engine {theirs}"
            for name, mine, theirs in (
                ("dtype", self.dtype, other.dtype),
                ("fingerprint", self.fingerprint, other.fingerprint),
                ("tensor_parallel", self.tensor_parallel, other.tensor_parallel),
            )
            if mine is not None and theirs is not None and mine != theirs
        ]
        if other.renames and other.renames != self.renames:
            differences.append(f"renames: server {_said(self.renames)}, engine {_said(other.renames)}")
        only_here = [s.name for s in self.sites if s.name not in other.by_name]
        only_there = [s.name for s in other.sites if s.name not in self.by_name]
        shapes = [
            f"server {site}, engine {other.by_name[site.name]}"
            for site in self.sites
            if site.name in other.by_name and other.by_name[site.name] != site
        ]
        for title, names in (("only the server has", only_here), ("only the engine has", only_there), ("", shapes)):
            if names:
                more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
                differences.append(f"{title} {', '.join(names[:_MAX_SHOWN])}{more}".strip())
        if differences:
            text = "; ".join(differences)
            raise ModelMismatch(f"the engine's model is not the server's: {text}", difference=tuple(differences))


def _said(renames: tuple[Rename, ...]) -> str:
    return "; ".join(f"{mine or 'nothing'} -> {theirs or 'nothing'}" for mine, theirs in renames) or "none"


def _check_renames(renames: object) -> None:
    if not isinstance(renames, tuple) or len(renames) > MAX_RENAMES:
        raise RequestInvalid("model_spec.renames", found=str(renames), wanted=f"at most {MAX_RENAMES} pairs")
    for index, rename in enumerate(renames):
        pair = isinstance(rename, tuple) and len(rename) == 2 and all(isinstance(text, str) for text in rename)
        if not pair or any(text != ".".join(filter(None, text.split("."))) for text in rename):
            wanted = "two prefixes of whole names, the adapter's and the model's"
            raise RequestInvalid(f"model_spec.renames[{index}]", found=str(rename), wanted=wanted)


def _site(field: str, data: object) -> Site:
    values = _checked_fields(data, field, {*_SITE_FIELDS, "parts", "experts", "shard"}, required=set(_SITE_FIELDS[:3]))
    parts = tuple(
        _part(f"{field}.parts[{index}]", part)
        for index, part in enumerate(_checked_list(values, "parts", field) if "parts" in values else ())
    )
    rest = parts, values.get("experts", 0), values.get("shard", "none")
    return Site.checked(field, (*(values.get(name, "linear") for name in _SITE_FIELDS), *rest))


def _part(field: str, data: object) -> SitePart:
    values = _checked_fields(data, field, {*_PART_FIELDS, "copies"}, required=set(_PART_FIELDS))
    return SitePart.checked(field, (*map(values.get, _PART_FIELDS), values.get("copies", 1)))


def _site_to_dict(site: Site) -> dict[str, object]:
    data: dict[str, object] = {
        "name": site.name,
        "in_features": site.in_features,
        "out_features": site.out_features,
        "kind": site.kind,
    }
    if site.parts:
        data["parts"] = [
            {"name": part.name, "out_features": part.out_features, "copies": part.copies} for part in site.parts
        ]
    if site.experts:
        data["experts"] = site.experts
    if site.shard != "none":
        data["shard"] = site.shard
    return data


def _checked_list(data: dict[str, Any], name: str, field: str = "model_spec") -> list[Any]:
    if not isinstance(data[name], list):
        raise RequestInvalid(f"{field}.{name}", found=type(data[name]).__name__, wanted="a list")
    values: list[Any] = data[name]
    return values


def _checked_fields(data: object, field: str, known: set[str], required: set[str]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise RequestInvalid(field, found=type(data).__name__, wanted="an object")
    if unknown := sorted(set(data) - known):
        raise RequestInvalid(f"{field}.{unknown[0]}", found="an unknown field", wanted=", ".join(sorted(known)))
    if missing := sorted(required - set(data)):
        raise RequestInvalid(f"{field}.{missing[0]}", found="nothing", wanted="a value")
    return data
