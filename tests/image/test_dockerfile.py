"""The Dockerfile is well formed, and only what an image is made of reaches its build."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.image.conftest import REPOSITORY

PACKAGES = {
    "clients/slotcar_client",
    "deploy/image",
    "deploy/injector",
    "kernels/slotcar_kernels",
    "proto/slotcar",
    "sidecar/slotcar_sidecar",
}


def tracked(*folders: str) -> set[str]:
    """What git would have in the folders once all was added."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    listed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.split()
    return {path for path in listed if (REPOSITORY / path).exists()}


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, REPOSITORY / "deploy" / "Dockerfile"], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.image
def test_the_context_is_what_wheels_are_made_of() -> None:
    """And nothing else: no environment, no cache, no compiled library, no test, no notes of whoever builds it."""
    if shutil.which("buildah") is None:
        pytest.skip("buildah is missing: `make apt-image` installs it")
    found = context()
    files = {"LICENSE", "README.md", "hatch_build.py", "kernels/build_native.py", "pyproject.toml"}
    files |= {"constraints/dev.txt", "constraints/image.txt"}
    assert found == files | tracked(*PACKAGES)


def context() -> set[str]:
    """The files that reach a build, in a container that nothing is run in."""

    def buildah(*words: str) -> str:
        return subprocess.run(
            ["buildah", *words], check=True, capture_output=True, text=True, timeout=120
        ).stdout.strip()

    container = buildah("from", "scratch")
    try:
        ignored = ("--ignorefile", str(REPOSITORY / ".dockerignore"), "--contextdir", str(REPOSITORY))
        buildah("add", *ignored, container, str(REPOSITORY), "/")
        root = Path(buildah("mount", container))
        return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    finally:
        buildah("rm", container)
