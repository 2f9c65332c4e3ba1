"""Fixtures that every suite shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.server import SidecarProcess

# These have environments of their own, in which `make test-vllm` and `make test-k8s` run them.
collect_ignore = [
    folder for folder, needed in (("vllm", "vllm"), ("k8s", "kubernetes_validate")) if not find_spec(needed)
]


@pytest.fixture
def start_sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., SidecarProcess]]:
    """Starts sidecars that end with the test: start_sidecar(root, slots=2, max_rank=16, extra=("--flag",))."""
    with ExitStack() as stack:

        def start(root: Path, **settings: object) -> SidecarProcess:
            folder = tmp_path_factory.mktemp("s")
            return stack.enter_context(SidecarProcess(folder, root, **settings))  # type: ignore[arg-type]

        yield start
