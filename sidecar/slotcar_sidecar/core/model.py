"""The base model as far as slots are shaped by it: its sites and what else adapters depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from slotcar_sidecar.core.errors import ModelMismatch, RequestInvalid

DTYPES = ("float32", "float16", "bfloat16")
_MAX_FEATURES = 1 << 24
_SITE_FIELDS = ("name", "in_features", "out_features", "kind")
_MAX_NAME = 500
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Site:
    """One place where a LoRA applies; `kind` says how ("linear": y += scale · (x Aᵀ) Bᵀ)."""

    name: str
    in_features: int
    out_features: int
    kind: str = "linear"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 1 <= len(self.name) <= _MAX_NAME:
            raise RequestInvalid("site.name", found=str(self.name)[:_MAX_NAME], wanted=f"1 to {_MAX_NAME} characters")
        for field, value in (("in_features", self.in_features), ("out_features", self.out_features)):
            if type(value) is not int or not 1 <= value <= _MAX_FEATURES:
                raise RequestInvalid(f"site.{field}", found=value, wanted=f"1 to {_MAX_FEATURES} (site {self.name})")
        if self.kind != "linear":
            raise RequestInvalid("site.kind", found=self.kind, wanted="linear")

    @classmethod
    def checked(cls, field: str, values: tuple[Any, ...]) -> Site:
        """The site of these values; what is refused is named as a part of `field`."""
        try:
            return cls(*values)
        except RequestInvalid as error:
            raise error.at(f"{field}.{error.facts['field'].removeprefix('site.')}") from None

    def __str__(self) -> str:
        return f"{self.name} [{self.out_features}, {self.in_features}]"


@dataclass(frozen=True)
class ModelSpec:
    """Sites in order of their names; `dtype` and `fingerprint` are None when unknown and then not compared."""

    sites: tuple[Site, ...]
    dtype: str | None = None
    tensor_parallel: int = 1
    fingerprint: str | None = None

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
        if self.tensor_parallel != 1:
            raise RequestInvalid("model_spec.tensor_parallel", found=self.tensor_parallel, wanted=1)

    @classmethod
    def of(cls, sites: list[Site], **rest: Any) -> ModelSpec:
        """A spec from sites in any order."""
        return cls(tuple(sorted(sites, key=lambda site: site.name)), **rest)

    @classmethod
    def from_dict(cls, data: object) -> ModelSpec:
        """Reads what `to_dict` wrote; an unknown or malformed field is refused by name."""
        known = {"sites", "dtype", "tensor_parallel", "fingerprint"}
        _check_fields(data, "model_spec", known, required={"sites"})
        assert isinstance(data, dict)
        if not isinstance(data["sites"], list):
            raise RequestInvalid("model_spec.sites", found=type(data["sites"]).__name__, wanted="a list")
        for index, site in enumerate(data["sites"]):
            _check_fields(
                site,
                f"model_spec.sites[{index}]",
                set(_SITE_FIELDS),
                required=set(_SITE_FIELDS) - {"kind"},
            )
        sites = [
            Site.checked(f"model_spec.sites[{index}]", tuple(site[name] for name in _SITE_FIELDS if name in site))
            for index, site in enumerate(data["sites"])
        ]
        return cls.of(sites, **{k: v for k, v in data.items() if k != "sites"})

    def to_dict(self) -> dict[str, object]:
        data: dict[str, object] = {
            "sites": [
                {"name": s.name, "in_features": s.in_features, "out_features": s.out_features, "kind": s.kind}
                for s in self.sites
            ]
        }
        rest = {"dtype": self.dtype, "tensor_parallel": self.tensor_parallel, "fingerprint": self.fingerprint}
        return data | {key: value for key, value in rest.items() if value is not None}

    @cached_property
    def by_name(self) -> Mapping[str, Site]:
        return MappingProxyType({site.name: site for site in self.sites})

    def slot_bytes(self, max_rank: int, item_bytes: int) -> int:
        """Size of one slot over all sites: A [max_rank, in] and B [max_rank, out] each."""
        return sum(site.in_features + site.out_features for site in self.sites) * max_rank * item_bytes

    def check_agrees(self, other: ModelSpec) -> None:
        """Raises ModelMismatch with the difference between this spec (the server's) and an engine's."""
        differences = [
            f"{field}: server {mine}, engine {theirs}"
            for field, mine, theirs in (
                ("dtype", self.dtype, other.dtype),
                ("fingerprint", self.fingerprint, other.fingerprint),
                ("tensor_parallel", self.tensor_parallel, other.tensor_parallel),
            )
            if mine is not None and theirs is not None and mine != theirs
        ]
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


def _check_fields(data: object, field: str, known: set[str], required: set[str]) -> None:
    if not isinstance(data, dict):
        raise RequestInvalid(field, found=type(data).__name__, wanted="an object")
    if unknown := sorted(set(data) - known):
        raise RequestInvalid(f"{field}.{unknown[0]}", found="an unknown field", wanted=", ".join(sorted(known)))
    if missing := sorted(required - set(data)):
        raise RequestInvalid(f"{field}.{missing[0]}", found="nothing", wanted="a value")
