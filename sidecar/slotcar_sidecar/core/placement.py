"""Where a module of an adapter lands in the model: by its name, after the model's renames, and its kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from slotcar_sidecar.core.errors import RequestInvalid
from slotcar_sidecar.core.site import Site

__all__ = ["Placement", "Rename", "places_by_name", "renamed"]

# What the names of an adapter's modules begin with, and what those of the model begin with instead.
Rename = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Placement:
    """`part` is None where the module is all parts of the site, `expert` where it is no expert, or all of them."""

    site: Site
    part: int | None = None
    expert: int | None = None

    @property
    def parts(self) -> range:
        """Which parts of the site it has weights for."""
        return range(len(self.site.modules)) if self.part is None else range(self.part, self.part + 1)

    @property
    def out_features(self) -> int:
        return self.site.out_features if self.part is None else self.site.modules[self.part].out_features

    def takes(self, kind: str) -> bool:
        """Whether weights of a kind can be the module's: one expert's are linear ones."""
        return kind == ("linear" if self.expert is not None else self.site.kind)


def places_by_name(sites: Iterable[Site]) -> Mapping[str, Placement]:
    """The modules by name, with a `*` for the number of an expert. Raises RequestInvalid for a name of two of them."""
    places: dict[str, Placement] = {}
    for site in sites:
        for name, part in _names(site):
            if name in places:
                raise RequestInvalid("model_spec.sites", found=f"{name} twice", wanted="each module once")
            places[name] = Placement(site, part)
    return MappingProxyType(places)


def _names(site: Site) -> Iterator[tuple[str, int | None]]:
    """A packed site has a name too, for the adapters whose module it is."""
    for index, part in enumerate(site.modules):
        yield part.name, index
    if all(part.name != site.name for part in site.modules):
        yield site.name, None


def renamed(module: str, renames: Iterable[Rename]) -> str:
    """The module's name in the model, by the first rename whose whole components it begins with."""
    for mine, theirs in renames:
        if not mine or module == mine or module.startswith(f"{mine}."):
            rest = module[len(mine) :].removeprefix(".")
            return f"{theirs}.{rest}" if theirs and rest else theirs or rest
    return module


def find(places: Mapping[str, Placement], module: str) -> Placement | None:
    """The module of this name, or the one that has a `*` in the place of one of its numbers."""
    found = places.get(module)
    if found is not None:
        return None if found.site.experts and "*" in module else found
    components = module.split(".")
    for index, number in enumerate(components):
        if number.isascii() and number.isdecimal():
            found = places.get(".".join([*components[:index], "*", *components[index + 1 :]]))
            if found is not None and str(int(number)) == number and int(number) < found.site.experts:
                return Placement(found.site, found.part, int(number))
    return None
