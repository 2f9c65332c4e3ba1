"""Fixtures that every suite shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.server import SidecarProcess

# vLLM has an environment of its own, in which `make test-vllm` runs that suite.
collect_ignore = [] if find_spec("vllm") else ["vllm"]


@pytest.fixture
def start_sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., SidecarProcess]]:
    """Starts sidecars that end with the test: start_sidecar(root, slots=2, max_rank=16, extra=("--flag",))."""
    with ExitStack() as stack:

        def start(root: Path, **settings: object) -> SidecarProcess:
            folder = tmp_path_factory.mktemp("s")
            return stack.enter_context(SidecarProcess(folder, root, **settings))  # type: ignore[arg-type]

        yield start
