"""The adapters of a soak: written from its seed, or read from a folder where they were saved."""

from __future__ import annotations

from pathlib import Path

from tests.faults.oracle import Library
from tests.soak.plan import ADAPTERS, MAX_RANK, NAMES, SITES, VERSIONS


def write_library(folder: Path, seed: int) -> Library:
    """Some versions of each name, that differ in rank and lack different sites."""
    library = Library(folder / ADAPTERS, SITES)
    sites = tuple(SITES)
    for number, name in enumerate(NAMES):
        for version in VERSIONS:
            lacking = {sites[(number + version) % len(sites)], sites[(number + 3 * version) % len(sites)]}
            rank = 4 + (5 * number + 4 * version) % (MAX_RANK - 3)
            having = [site for site in sites if site not in lacking]
            library.write(f"{name}{version}", seed=1000 * seed + 10 * number + version, sites=having, rank=rank)
    return library


def read_library(folder: Path) -> Library:
    """The adapters that `write_library` wrote."""
    library = Library(folder / ADAPTERS, SITES)
    for source in sorted(library.root.iterdir()):
        library.add(source)
    return library
