"""What the sidecar knows of an adapter without touching its weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from slotcar_sidecar.core.errors import AdapterInvalid, AdapterUnsupported
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.placement import Placement


@dataclass(frozen=True, slots=True)
class SiteLora:
    """An adapter's part at one of its modules, of the kind that core.site.Site describes.

    delta = scale · (x Aᵀ) Bᵀ + gain ⊙ y_base + bias, the last two where `has_gain` and `has_bias`. `experts` counts
    those of a module of kind "experts" and is 0 otherwise.
    """

    site: str
    rank: int
    scale: float
    in_features: int
    out_features: int
    kind: str = "linear"
    experts: int = 0
    has_gain: bool = False
    has_bias: bool = False


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
        """Raises AdapterInvalid unless every part lands in a place of its own with its shape and an allowed rank.

        Raises AdapterUnsupported for what slots of experts cannot hold.
        """
        taken: dict[tuple[str, int, int | None], str] = {}
        for part in self.parts:
            place = model.place(part.site, part.kind)
            if place is None:
                raise AdapterInvalid(
                    f"the adapter has {_adjective(part.kind)}weights for {part.site}, and the model spec has no such "
                    f"site: {_advice(part, model)}",
                    tensor=part.site,
                    found=part.site,
                    wanted="a site of the model",
                )
            _check_shape(part, place)
            _check_rank(part, max_rank)
            for index in place.parts:
                other = taken.setdefault((place.site.name, index, place.expert), part.site)
                if other != part.site:
                    raise AdapterInvalid(
                        f"the adapter's {other} and {part.site} are both {place.site.modules[index].name} of the model",
                        tensor=part.site,
                        found=f"{other} and {part.site}",
                        wanted="one of them",
                    )

    def sites_zero(self, model: ModelSpec) -> tuple[str, ...]:
        """The modules of `model`, sites or their parts, for which the adapter has no weights, sorted."""
        mine = {
            (place.site.name, index)
            for part in self.parts
            if (place := model.place(part.site, part.kind)) is not None
            for index in place.parts
        }
        return tuple(
            sorted(
                part.name
                for site in model.sites
                for index, part in enumerate(site.modules)
                if (site.name, index) not in mine
            )
        )

    def sites_in(self, model: ModelSpec) -> tuple[str, ...]:
        """The sites of `model` at which it has weights, sorted; a module that is none of them by its own name."""
        places = ((part.site, model.place(part.site, part.kind)) for part in self.parts)
        return tuple(sorted({module if place is None else place.site.name for module, place in places}))

    def sites_needing_base(self, model: ModelSpec) -> tuple[str, ...]:
        """The sites of `model` at which a Forward of the adapter's rows needs the base model's output, sorted."""
        places = [model.place(part.site, part.kind) for part in self.parts if part.has_gain]
        return tuple(sorted({place.site.name for place in places if place is not None}))

    @cached_property
    def needs_base(self) -> bool:
        """Whether there may be such sites."""
        return any(part.has_gain for part in self.parts)


def _adjective(kind: str) -> str:
    return "" if kind == "linear" else f"{kind} "


def _advice(part: SiteLora, model: ModelSpec) -> str:
    """How the model may get the site: a spec has what few adapters target only if it is asked for."""
    kinds, path = {site.kind for site in model.sites}, part.site.split(".")
    is_of_experts = part.kind == "experts" or "experts" in path or path[-1] == "gate"
    option = ""
    if part.kind == "embedding" and "embedding" not in kinds:
        option = "embeddings"
    elif path[-1] == "lm_head" and part.site not in model.by_name:
        option = "tied-head"
    elif is_of_experts and "experts" not in kinds:
        option = "experts"
    if not option:
        return "was it trained on another base model? Where only the names differ, the spec's renames can say so"
    argument = option.replace("-", "_")
    return f"make the spec with `slotcar spec --{option}`, or {argument}=True in the engine's model_spec"


def _check_shape(part: SiteLora, place: Placement) -> None:
    site = place.site
    found, wanted = (part.in_features, part.out_features), (site.in_features, place.out_features)
    if found != wanted:
        raise AdapterInvalid(
            f"the adapter's {part.site} is {found[0]} → {found[1]}, the model's is {wanted[0]} → {wanted[1]}: "
            "was it trained on another base model?",
            tensor=part.site,
            found=f"{found[0]} -> {found[1]}",
            wanted=f"{wanted[0]} -> {wanted[1]}",
        )
    if place.expert is None and part.experts != site.experts:
        raise AdapterInvalid(
            f"the adapter's {part.site} has {part.experts} experts, the model's has {site.experts}",
            tensor=part.site,
            found=part.experts,
            wanted=site.experts,
        )
    if site.experts and (part.has_gain or part.has_bias):
        what = "DoRA" if part.has_gain else "a bias"
        raise AdapterUnsupported(
            f"the adapter has {what} at {part.site}, which is of experts: slots have no place for it",
            tensor=part.site,
            found=what,
            wanted="plain LoRA at experts",
        )


def _check_rank(part: SiteLora, max_rank: int) -> None:
    if part.rank > max_rank:
        raise AdapterInvalid(
            f"the adapter's rank at {part.site} is {part.rank}, the server's maximum is {max_rank}: "
            f"serve with --max-rank {part.rank} or more",
            tensor=part.site,
            field="r",
            found=part.rank,
            wanted=f"at most {max_rank}",
        )
