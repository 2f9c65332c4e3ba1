"""The injector needs nothing of slotcar's other packages, and reads its surroundings in one place."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.k8s.environment import REPOSITORY, SOURCES

PACKAGE = SOURCES / "slotcar_injector"
LIBRARIES = {"aiohttp", "click", "cryptography", "prometheus_client"}
FILES = sorted(PACKAGE.rglob("*.py"))
# What decides about a pod: no clock, no network, no file.
PURE = {"annotations", "denial", "patch", "places", "placing", "pod", "review", "shape", "sidecar", "status", "values"}
IMPURE = {"asyncio", "datetime", "logging", "os", "pathlib", "random", "signal", "socket", "ssl", "sys", "time"}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module or ""


def test_it_imports_nothing_but_itself_and_few_libraries() -> None:
    for path in FILES:
        tops = {name.partition(".")[0] for name in imports(path)}
        assert tops - sys.stdlib_module_names - LIBRARIES - {"slotcar_injector"} == set(), path


def test_the_extra_names_these_libraries() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {text.partition(">")[0].replace("-", "_") for text in project["optional-dependencies"]["injector"]}
    assert names == LIBRARIES
    assert project["scripts"]["slotcar-injector"] == "slotcar_injector.cli:main"


def test_what_decides_about_a_pod_is_pure() -> None:
    for path in FILES:
        if path.stem in PURE:
            assert set(imports(path)) & IMPURE == set(), path
            assert not any(name in ("slotcar_injector.server", "slotcar_injector.tls") for name in imports(path)), path


def test_the_environment_is_read_by_click_alone() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert re.search(r"\benviron\b|\bgetenv\b|\bargv\b", text) is None, path


def test_it_runs_without_torch_and_grpc() -> None:
    code = "import sys, slotcar_injector.cli, slotcar_injector.server; print(*{'torch', 'grpc'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""


def test_no_file_is_large() -> None:
    assert [path.name for path in FILES if len(path.read_text(encoding="utf-8").splitlines()) > 400] == []
