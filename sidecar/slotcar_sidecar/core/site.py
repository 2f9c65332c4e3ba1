"""One place of the base model where LoRAs apply: its kind, what is packed into it, and how ranks share it.

Features are those of the whole model, all ranks together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slotcar_sidecar.core.errors import RequestInvalid

__all__ = ["KINDS", "SHARDS", "Leaf", "Site", "SitePart"]

KINDS = ("linear", "embedding", "experts")
SHARDS = ("none", "column", "row")
_MAX_FEATURES = 1 << 24
_MAX_EXPERTS = 1 << 12
MAX_RANKS = 1 << 10
_MAX_PARTS = 64
_MAX_NAME = 500


@dataclass(frozen=True, slots=True)
class SitePart:
    """A module that the model packs with others along the output of a site.

    `name` is the module's; at a site of experts a `*` stands for the expert's number. `copies`: how many neighbouring
    ranks have the same shard of it, as those of key and value heads do when there are more ranks than heads.
    """

    name: str
    out_features: int
    copies: int = 1

    def __post_init__(self) -> None:
        _check_name("name", self.name)
        _check_number("out_features", self.out_features, _MAX_FEATURES)
        _check_number("copies", self.copies, MAX_RANKS)

    @classmethod
    def checked(cls, field: str, values: tuple[Any, ...]) -> SitePart:
        """The part of these values; what is refused is named as a part of `field`."""
        try:
            return cls(*values)
        except RequestInvalid as error:
            raise error.at(f"{field}.{error.facts['field'].removeprefix('site.')}") from None


@dataclass(frozen=True, slots=True)
class Site:
    """One place where a LoRA applies; `kind` says how.

    linear:    y += scale · (x Aᵀ) Bᵀ
    embedding: y += scale · A[:, id]ᵀ Bᵀ; in_features counts the tokens, ids come in place of x
    experts:   y += scale_e · (x A_eᵀ) B_eᵀ, with the expert e of each row; `experts` of them have this shape

    `parts` are packed along the output in their order; without any the site is the one module of its name. `shard`:
    the output is split over the ranks ("column"), or the input, and the engine sums the outputs ("row").
    """

    name: str
    in_features: int
    out_features: int
    kind: str = "linear"
    parts: tuple[SitePart, ...] = ()
    experts: int = 0
    shard: str = "none"

    def __post_init__(self) -> None:
        _check_name("name", self.name)
        _check_number("in_features", self.in_features, _MAX_FEATURES, of=self.name)
        _check_number("out_features", self.out_features, _MAX_FEATURES, of=self.name)
        for field, found, known in (("kind", self.kind, KINDS), ("shard", self.shard, SHARDS)):
            if found not in known:
                raise RequestInvalid(f"site.{field}", found=found, wanted=" or ".join(known))
        self._check_experts()
        self._check_parts()
        if self.kind == "embedding" and self.shard != "none":
            raise RequestInvalid("site.shard", found=self.shard, wanted=f"none for an embedding (site {self.name})")

    def _check_experts(self) -> None:
        if self.kind == "experts":
            _check_number("experts", self.experts, _MAX_EXPERTS, of=self.name)
        elif type(self.experts) is not int or self.experts:
            raise RequestInvalid("site.experts", found=self.experts, wanted=f"0 at kind {self.kind} (site {self.name})")

    def _check_parts(self) -> None:
        parts = self.parts
        if not parts:
            return
        most = 0 if self.kind == "embedding" else _MAX_PARTS
        if len(parts) > most:
            raise RequestInvalid("site.parts", found=f"{len(parts)} parts", wanted=f"at most {most} (site {self.name})")
        if (found := sum(part.out_features for part in parts)) != self.out_features:
            wanted = f"{self.out_features}, the site's out_features (site {self.name})"
            raise RequestInvalid("site.parts", found=f"{found} features", wanted=wanted)
        for index, part in enumerate(parts):
            if part.copies > 1 and self.shard != "column":
                raise RequestInvalid(f"site.parts[{index}].copies", found=part.copies, wanted="1 without shard column")
            if part.name.count("*") > (self.kind == "experts"):
                wanted = "at most one * at kind experts, none at others"
                raise RequestInvalid(f"site.parts[{index}].name", found=part.name, wanted=wanted)

    def check_ranks(self, ranks: int) -> None:
        """Raises RequestInvalid unless so many ranks can share the site, each with as many features as the others."""
        if self.shard == "row" and self.in_features % ranks:
            wanted = f"a multiple of {ranks}, the ranks (site {self.name})"
            raise RequestInvalid("site.in_features", found=self.in_features, wanted=wanted)
        if self.shard != "column":
            return
        for part in self.modules:
            if ranks % part.copies:
                wanted = f"a divisor of {ranks}, the ranks (part {part.name})"
                raise RequestInvalid("site.parts.copies", found=part.copies, wanted=wanted)
            if part.out_features % (ranks // part.copies):
                wanted = f"a multiple of {ranks // part.copies}, the shards (part {part.name})"
                raise RequestInvalid("site.out_features", found=part.out_features, wanted=wanted)

    def rank_features(self, ranks: int) -> tuple[int, int]:
        """Width of the input and of the output of each rank."""
        if self.shard == "row":
            return self.in_features // ranks, self.out_features
        if self.shard == "column":
            return self.in_features, sum(part.out_features * part.copies // ranks for part in self.modules)
        return self.in_features, self.out_features

    @property
    def modules(self) -> tuple[SitePart, ...]:
        """The parts; of a site without any, the one that is named as the site."""
        return self.parts or (SitePart(self.name, self.out_features),)

    @classmethod
    def checked(cls, field: str, values: tuple[Any, ...]) -> Site:
        """The site of these values; what is refused is named as a part of `field`."""
        try:
            return cls(*values)
        except RequestInvalid as error:
            raise error.at(f"{field}.{error.facts['field'].removeprefix('site.')}") from None

    def __str__(self) -> str:
        said = [f"{self.name} [{self.out_features}, {self.in_features}]"]
        if self.kind != "linear":
            said.append(f"kind {self.kind}")
        if self.experts:
            said.append(f"{self.experts} experts")
        if self.parts:
            said.append(f"parts {'; '.join(f'{part.name} {part.out_features} x{part.copies}' for part in self.parts)}")
        if self.shard != "none":
            said.append(f"shard {self.shard}")
        return " ".join(said)


@dataclass(frozen=True, slots=True)
class Leaf:
    """What slots have arrays for: one part of a site, with all its experts."""

    site: Site
    part: SitePart

    @property
    def name(self) -> str:
        return self.part.name

    @property
    def in_features(self) -> int:
        return self.site.in_features

    @property
    def out_features(self) -> int:
        return self.part.out_features

    @property
    def experts(self) -> int:
        """How many pairs of A and B there are: one but for a site of experts."""
        return self.site.experts or 1


def _check_name(field: str, name: object) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME or not name.isprintable():
        found, wanted = str(name)[:_MAX_NAME], f"1 to {_MAX_NAME} printable characters"
        raise RequestInvalid(f"site.{field}", found=found, wanted=wanted)


def _check_number(field: str, value: object, most: int, of: str = "") -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise RequestInvalid(f"site.{field}", found=value, wanted=f"1 to {most}{f' (site {of})' if of else ''}")
