"""The images that `make image` built; without them, or what runs them, these tests are skipped and say why."""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.adapters import WEIGHTS_FILE
from tests.faults.oracle import Library, spec_file
from tests.image.container import SidecarContainer, owned, podman

REPOSITORY = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

SITE, FEATURES = "layer.q", (64, 48)
NAMES = ("adapter-a", "adapter-b")

Make = Callable[..., SidecarContainer]


def _built(variable: str, name: str) -> str:
    if os.geteuid() != 0:
        pytest.skip("without root there are no such containers")
    for program in ("buildah", "podman", "runc"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is missing: `make apt-image` installs it")
    image = os.environ.get(variable) or f"localhost/{name}:{VERSION}"
    if podman("image", "exists", image).returncode != 0:
        pytest.skip(f"there is no image {image}: `make image` builds it")
    return image


@pytest.fixture(scope="session")
def image() -> str:
    """The sidecar's image."""
    return _built("SLOTCAR_IMAGE", "slotcar")


@pytest.fixture(scope="session")
def injector_image() -> str:
    return _built("SLOTCAR_INJECTOR_IMAGE", "slotcar-injector")


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short path, as those of sockets must be."""
    return tmp_path_factory.mktemp("i")


@pytest.fixture
def library(folder: Path) -> Library:
    library = Library(folder / "adapters", {SITE: FEATURES})
    for seed, name in enumerate(NAMES):
        library.write(name, seed, [SITE])
        (library.root / name / WEIGHTS_FILE).chmod(0o644)  # safetensors makes it its writer's alone
    return library


@pytest.fixture
def make(image: str, folder: Path, library: Library) -> Iterator[Make]:
    """Containers, not yet started, that know the adapters and their model; they end with the test.

    make(*settings of serve, options=("--of", "podman"))
    """
    home = owned(folder / "run")
    spec_file(library.root, library.sites)
    serve = ("--root", "/adapters", "--model-spec", "/adapters/spec.json", "--slots", "4", "--max-rank", "16")
    volume = ("--volume", f"{library.root}:/adapters:ro")
    with ExitStack() as stack:

        def one(*settings: str, options: tuple[str, ...] = ()) -> SidecarContainer:
            container = SidecarContainer(image, home, (*serve, *settings), (*volume, *options))
            stack.callback(container.remove)
            return container

        yield one
