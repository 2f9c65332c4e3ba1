"""The server under test: one per process of pytest, or the one that the environment names.

SLOTCAR_CONFORMANCE_TARGET is the address of a running server with at least two slots, and SLOTCAR_CONFORMANCE_ROOT a
folder beneath one of its roots that this suite may write to; no other client may use that server meanwhile, so run with
`-n 0`. SLOTCAR_CONFORMANCE_METRICS, the URL of its metrics, lets the suite compare the gauges too. Forwards travel over
each plane in turn; ring and direct need a unix socket. Tests about
settings, start and end of a server start their own in any case.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conformance.target import Target, start
from tests.planes.stub import PLANES

CRAMPED_BYTES = 10_000


# Some of the tests use the stream whatever the plane is, so that all of them over it are for the long suites.
_PLANES = [pytest.param(plane, marks=pytest.mark.full) if plane == "stream" else plane for plane in PLANES]


@pytest.fixture(scope="session", params=_PLANES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """The server under test; its model is known. Its engine's Forwards travel over the plane."""
    environment, plane = os.environ, request.param
    address = environment.get("SLOTCAR_CONFORMANCE_TARGET")
    if address is not None:
        root, metrics = environment["SLOTCAR_CONFORMANCE_ROOT"], environment.get("SLOTCAR_CONFORMANCE_METRICS")
        if plane in ("ring", "direct") and not address.startswith("unix:"):
            pytest.skip(f"{plane} needs a unix socket")
        target = Target(address, Path(root), metrics, plane=plane).learn()
        yield target
        target.unload_all()
        target.close()
        return
    with ExitStack() as stack:
        yield start(stack, *folders(tmp_path_factory), plane=plane).learn()


@pytest.fixture
def target(server: Target) -> Iterator[Target]:
    """The server under test, without adapters."""
    server.unload_all()
    yield server
    assert server.has_nothing_of_sessions(), "the test left a session"


@pytest.fixture(scope="session")
def cramped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A server whose host tier has room for three of `Target.write`'s adapters."""
    with ExitStack() as stack:
        yield start(stack, *folders(tmp_path_factory), extra=("--host-bytes", str(CRAMPED_BYTES))).learn()


@pytest.fixture
def pressed(cramped: Target) -> Iterator[Target]:
    """A server whose host tier has room for three adapters, without adapters."""
    cramped.unload_all()
    yield cramped
    assert cramped.has_nothing_of_sessions(), "the test left a session"


@pytest.fixture(scope="module")
def start_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Target]]:
    """Starts servers with settings of their own, until the module ends: start_target(slots=2, extra=("--flag",))."""
    with ExitStack() as stack:
        yield lambda **settings: start(stack, *folders(tmp_path_factory), **settings)


def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """For a server, and for its adapters."""
    return tmp_path_factory.mktemp("s"), tmp_path_factory.mktemp("root")
