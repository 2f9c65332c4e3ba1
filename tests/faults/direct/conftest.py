"""Three adapters, and sidecars that serve them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import slotcar_client
from slotcar_client import Client

from tests.faults.direct.units import SITES, A, B, C, Serve
from tests.faults.oracle import Library, spec_file
from tests.server import SidecarProcess

IDLE_SECONDS = 0.5


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    library = Library(tmp_path_factory.mktemp("adapters"), SITES)
    for seed, name in enumerate((A, B, C)):
        library.write(name, seed, list(SITES))
    return library


@pytest.fixture(scope="module")
def digests(library: Library) -> dict[str, str]:
    return dict(zip((A, B, C), library.parts, strict=True))


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory, library: Library) -> Iterator[Serve]:
    """Starts a sidecar with that many slots."""
    with ExitStack() as stack:

        def start(slots: int) -> SidecarProcess:
            folder = tmp_path_factory.mktemp("s")
            flags = ("--model-spec", str(spec_file(folder, SITES)), "--metrics", "127.0.0.1:0")
            idle = ("--mapping-idle-seconds", str(IDLE_SECONDS))
            return stack.enter_context(SidecarProcess(folder, library.root, slots, extra=(*flags, *idle)))

        yield start


@pytest.fixture(scope="module")
def one_slot(serve: Serve) -> SidecarProcess:
    return serve(1)


@pytest.fixture(scope="module")
def served(serve: Serve) -> SidecarProcess:
    return serve(3)


@pytest.fixture
def client(served: SidecarProcess, library: Library) -> Iterator[Client]:
    with slotcar_client.connect(served.target, timeout_seconds=30) as client:
        for name in (A, B, C):
            client.load(name, library.root / name)
        yield client
