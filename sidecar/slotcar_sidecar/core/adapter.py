"""What the sidecar knows of an adapter without touching its weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from slotcar_sidecar.core.errors import AdapterInvalid
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.core.model import ModelSpec


@dataclass(frozen=True, slots=True)
class SiteLora:
    """An adapter's part at one site: delta = scale · (x Aᵀ) Bᵀ with A [rank, in] and B [out, rank]."""

    site: str
    rank: int
    scale: float
    in_features: int
    out_features: int


@dataclass(frozen=True)
class Adapter:
    """Immutable LoRA weights by their digest, and where they came from.

    `parts` are in order of their sites; `bytes` is the size of the weights in the host tier.
    """

    digest: Digest
    parts: tuple[SiteLora, ...]
    bytes: int
    file_dtype: str
    source: str
    fields_ignored: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @cached_property
    def rank(self) -> int:
        """The largest rank over all sites."""
        return max(part.rank for part in self.parts)

    @cached_property
    def sites(self) -> tuple[str, ...]:
        return tuple(part.site for part in self.parts)

    def check_fits(self, model: ModelSpec, max_rank: int) -> None:
        """Raises AdapterInvalid unless every part lands on a site of `model` with its shape and an allowed rank."""
        for part in self.parts:
            site = model.by_name.get(part.site)
            if site is None:
                raise AdapterInvalid(
                    f"the adapter has weights for {part.site}, which the model does not have",
                    tensor=part.site,
                    found=part.site,
                    wanted="a site of the model",
                )
            found, wanted = (part.in_features, part.out_features), (site.in_features, site.out_features)
            if found != wanted:
                raise AdapterInvalid(
                    f"the adapter's {part.site} is {found[0]} → {found[1]}, the model's is {wanted[0]} → {wanted[1]}: "
                    "was it trained on another base model?",
                    tensor=part.site,
                    found=f"{found[0]} -> {found[1]}",
                    wanted=f"{wanted[0]} -> {wanted[1]}",
                )
            if part.rank > max_rank:
                raise AdapterInvalid(
                    f"the adapter's rank at {part.site} is {part.rank}, the server's maximum is {max_rank}: "
                    f"serve with --max-rank {part.rank} or more",
                    tensor=part.site,
                    field="r",
                    found=part.rank,
                    wanted=f"at most {max_rank}",
                )

    def sites_zero(self, model: ModelSpec) -> tuple[str, ...]:
        """The sites of `model` for which the adapter has no weights."""
        mine = set(self.sites)
        return tuple(site.name for site in model.sites if site.name not in mine)
