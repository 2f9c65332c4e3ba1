"""Small adapters for the disk tier, and sidecars that share its folder."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import torch
from slotcar_sidecar.core.adapter import SiteLora
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.store.disk.folder import DiskFolder, Step
from slotcar_sidecar.store.weights import HostWeights, Origin, SiteVectors, SiteWeights

_owners = itertools.count()


def stored_weights(seed: int, *, source: str = "/adapters/x", features: int = 64, sites: int = 2) -> HostWeights:
    """An adapter of `sites` sites whose bytes `seed` gives."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def site(index: int) -> SiteWeights:
        dtype = dtypes[index % len(dtypes)]
        a = torch.randn(4, features, generator=generator).to(dtype)
        b = torch.randn(features, 4, generator=generator).to(dtype)
        extras = {"magnitude": torch.rand(features, generator=generator)} if index else {}
        vectors = SiteVectors(torch.rand(features, generator=generator), None) if index else None
        part = SiteLora(f"layers.{index}.proj", 4, 0.1 + index, features, features, has_gain=bool(index))
        return SiteWeights(part, a, b, extras, vectors)

    origin = Origin(source, "F32", fields_ignored=("task_type",), warnings=("a warning",))
    return HostWeights.of(map(site, range(sites)), origin)


def open_folder(
    path: Path,
    capacity_bytes: int = 1 << 20,
    *,
    clock: Callable[[], float] = lambda: 1000.0,
    reach: Callable[[Step], None] = lambda _: None,
) -> DiskFolder:
    """One more sidecar at the folder `path`."""
    return DiskFolder.open(path, f"{os.getpid()}-{next(_owners)}", capacity_bytes, clock, reach)


def entry_path(path: Path, digest: Digest) -> Path:
    name = digest.value.removeprefix("sha256:")
    return path / "sha256" / name[:2] / name


def same(one: HostWeights, other: HostWeights | None) -> bool:
    """Equal in every bit, and in all that is said of them."""
    return (
        other is not None
        and one.adapter == other.adapter
        and all(_same_site(mine, its) for mine, its in zip(one.sites(), other.sites(), strict=True))
    )


def _same_site(one: SiteWeights, other: SiteWeights) -> bool:
    vectors = [(*(each.vectors or (None, None)),) for each in (one, other)]
    return (
        one.part == other.part
        and _same(one.a, other.a)
        and _same(one.b, other.b)
        and one.extras.keys() == other.extras.keys()
        and all(_same(one.extras[name], other.extras[name]) for name in one.extras)
        and all(map(_same, *vectors))
    )


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)
