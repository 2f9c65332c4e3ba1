"""What is in the images: labels, a user without rights, nothing that gives any, and a list of what is installed."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.image.conftest import REPOSITORY, VERSION
from tests.image.container import PODMAN, USER, inspected, podman, python, ran

pytestmark = [pytest.mark.image, pytest.mark.timeout(600)]

PACKAGES = {
    "slotcar": REPOSITORY / "proto",
    "slotcar_kernels": REPOSITORY / "kernels",
    "slotcar_sidecar": REPOSITORY / "sidecar",
    "slotcar_client": REPOSITORY / "clients",
    "slotcar_injector": REPOSITORY / "deploy" / "injector",
}
SBOM = "/opt/slotcar/sbom.cdx.json"

PRIVILEGED = """
import json, os, stat
found = []
for folder, inner, names in os.walk("/"):
    inner[:] = [name for name in inner if folder != "/" or name not in ("proc", "sys", "dev")]
    for path in (os.path.join(folder, name) for name in names):
        mode = os.lstat(path).st_mode
        if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
            found.append(path)
print(json.dumps(found))
"""
WRITABLE = """
import json, os
found = []
for folder, inner, names in os.walk("/"):
    inner[:] = [name for name in inner if folder != "/" or name not in ("proc", "sys")]
    found += [path for path in (folder, *(os.path.join(folder, name) for name in names)) if os.access(path, os.W_OK)]
print(json.dumps([path for path in found if not path.startswith("/dev")]))
"""
INSTALLED = """
import json
from importlib.metadata import distributions
print(json.dumps({d.metadata["Name"]: d.version for d in distributions()}))
"""
LISTED = f"print(open({SBOM!r}).read())"
DIGESTS = """
import hashlib, json, pathlib, sys
site = pathlib.Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages")
print(json.dumps({
    str(path.relative_to(site)): hashlib.sha256(path.read_bytes()).hexdigest()
    for package in PACKAGES for path in (site / package).rglob("*.py")
}))
"""
# Flags 1: the source is known by its hash, and is not looked at.
BYTECODE = """
import json, pathlib
lib = pathlib.Path("/opt/slotcar/lib")
print(json.dumps([str(path) for path in lib.rglob("*.pyc") if path.read_bytes()[4:8] != bytes([1, 0, 0, 0])]))
"""
UNCOMPILED = """
import json, pathlib
from importlib.util import cache_from_source
sources = pathlib.Path("/opt/slotcar/lib").glob("python3.*/site-packages/slotcar*/**/*.py")
print(json.dumps([str(path) for path in sources if not pathlib.Path(cache_from_source(path)).exists()]))
"""


@pytest.fixture(params=["image", "injector_image"])
def either(request: pytest.FixtureRequest) -> str:
    """The sidecar's image, then the injector's."""
    image: str = request.getfixturevalue(request.param)
    return image


def normal(name: str) -> str:
    """The name of a distribution as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_labels(either: str) -> None:
    labels = inspected("image", either)["Labels"]
    prefix = "org.opencontainers.image."
    assert labels[prefix + "version"] == VERSION
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", labels[prefix + "revision"])
    assert labels[prefix + "licenses"] == "Apache-2.0"
    assert either.rpartition("/")[2].startswith(labels[prefix + "title"])
    assert labels[prefix + "description"]
    assert labels[prefix + "base.name"]


def test_it_starts_as_a_user_without_rights_and_without_a_shell(either: str) -> None:
    config = inspected("image", either)["Config"]
    assert config["User"] == f"{USER}:{USER}"
    (program,) = config["Entrypoint"]
    assert program.startswith("/opt/slotcar/bin/slotcar")
    assert config.get("Cmd") in (None, ["serve"])
    assert not config.get("Volumes")


def test_no_file_gives_more_rights(either: str, folder: Path) -> None:
    assert python(either, folder, PRIVILEGED) == []


def test_nothing_can_be_written(either: str, folder: Path) -> None:
    assert python(either, folder, WRITABLE) == []


def test_shells_are_out_of_the_way(either: str, folder: Path) -> None:
    """What the other tests rely on when they say that no shell is needed."""
    done = ran(either, folder, "-c", "exit 0", options=("--entrypoint", "/bin/sh"))
    assert done.returncode == 126, done.stderr


def test_all_that_is_installed_is_listed(either: str, folder: Path) -> None:
    sbom: dict[str, Any] = python(either, folder, LISTED)
    assert sbom["bomFormat"] == "CycloneDX"
    listed = {normal(part["name"]): part["version"] for part in sbom["components"]}
    installed = {normal(name): version for name, version in python(either, folder, INSTALLED).items()}
    assert listed == installed
    assert "pip" not in installed
    assert ("torch" in installed) == ("injector" not in either)


def test_the_list_comes_out_without_running_anything(image: str, tmp_path: Path) -> None:
    container = subprocess.run([*PODMAN, "create", image], check=True, capture_output=True, text=True).stdout.strip()
    try:
        assert podman("cp", f"{container}:{SBOM}", str(tmp_path)).returncode == 0
    finally:
        podman("rm", container)
    assert json.loads((tmp_path / "sbom.cdx.json").read_text(encoding="utf-8"))["components"]


def test_it_is_of_this_tree(either: str, folder: Path) -> None:
    """Otherwise all these tests are of something else: `make image` builds it anew."""
    here = {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for package, root in PACKAGES.items()
        for path in (root / package).rglob("*.py")
    }
    assert python(either, folder, DIGESTS.replace("PACKAGES", repr(tuple(PACKAGES)))) == here


def test_bytecode_is_there_and_depends_on_sources_alone(either: str, folder: Path) -> None:
    assert python(either, folder, BYTECODE) == []
    assert python(either, folder, UNCOMPILED) == []


def test_the_compiled_kernel_is_in_it(image: str, folder: Path) -> None:
    assert python(
        image, folder, "import json; from slotcar_kernels import native; print(json.dumps(native.best_isa()))"
    )


@pytest.mark.parametrize("words", [("--version",), ("--help",)])
def test_both_programs_run(either: str, folder: Path, words: tuple[str, ...]) -> None:
    done = ran(either, folder, *words)
    assert done.returncode == 0, done.stderr
    assert "slotcar" in done.stdout


def test_a_wrong_flag_ends_with_2(either: str, folder: Path) -> None:
    done = ran(either, folder, "serve", "--no-such-flag")
    assert done.returncode == 2
    assert "--no-such-flag" in done.stderr
