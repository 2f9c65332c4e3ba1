"""Imports go down: the rules of the folders, checked on the syntax tree of every file.

A rule says what a layer may import of slotcar's other layers; three more say who may import grpc and torch, who may
read the environment, and who may build threads, clocks and sockets. Imports inside functions count too; imports for
type checkers only do not start anything, so the last rule lets them pass.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = ("proto", "kernels", "sidecar", "clients")

# Import package → layer; inside slotcar_sidecar each folder or module is a layer of its own.
PACKAGES = {"slotcar": "proto", "slotcar_kernels": "kernels", "slotcar_client": "clients"}

# What a module of the package is made of beside it is one layer with it.
TOGETHER = {"command": "cli", "process": "app"}

SIDECAR = {"core", "store", "device", "cache", "rpc", "ring", "sync", "ops", "config"}
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "config": {"core", "shm"},
    "store": {"core"},
    "device": {"core", "kernels", "shm"},
    "cache": {"core"},
    "rpc": {"core", "cache", "proto"},
    "ring": {"core", "cache", "rpc", "proto", "shm"},
    "sync": {"core", "cache"},
    "ops": {"core"},
    "app": SIDECAR | {"shm"},
    "demo": SIDECAR | {"app", "clients"},
    "cli": SIDECAR | {"app", "clients", "demo"},
    "proto": set(),
    "shm": set(),
    "kernels": set(),
    "clients": {"proto", "kernels", "shm"},
}

STDLIB_ONLY = {"core", "shm"}
THIRD_PARTY = {"kernels": {"torch", "triton", "numpy"}}
LIBRARY_RULES = (
    (("grpc", "grpc_health", "grpc_reflection", "grpc_status"), {"rpc", "app", "clients"}),
    (("torch",), {"device", "store", "kernels", "clients", "demo"}),
    (("google",), {"rpc", "ring", "app", "clients", "proto"}),
    (("transformers",), {"clients", "demo"}),
    (("watchfiles", "yaml"), {"sync"}),
    (("cryptography",), {"app"}),
    (("h11",), {"app"}),
    (("jinja2", "markupsafe"), {"ops"}),
    (("structlog",), {"ops"}),
    (("opentelemetry",), {"ops", "app", "clients"}),
)

MAY_READ_ENVIRONMENT = {
    "sidecar/slotcar_sidecar/config.py",
    "sidecar/slotcar_sidecar/cli.py",
    "clients/slotcar_client/config.py",
}
ENVIRONMENT = {("os", "environ"), ("os", "environb"), ("os", "getenv"), ("os", "getenvb"), ("sys", "argv")}

MAY_BUILD = {"app", "demo"}
# The hand-shake accepts connections on a socket that app.py made, and passes descriptors over them.
MAY_ALSO_BUILD = {("ring", "socket")}
BUILDERS = {"_thread", "multiprocessing", "socket", "socketserver", "threading", "time"}
BUILDER_NAMES = {
    ("asyncio", "to_thread"),
    ("concurrent.futures", "InterpreterPoolExecutor"),
    ("concurrent.futures", "ProcessPoolExecutor"),
    ("concurrent.futures", "ThreadPoolExecutor"),
    ("datetime.datetime", "now"),
    ("datetime.datetime", "today"),
    ("datetime.datetime", "utcnow"),
}


def layer_of(path: str) -> str | None:
    """The layer of a file, or None for what is no part of a package: generated code and its generator."""
    parts = Path(path).with_suffix("").parts
    if parts[:2] == ("proto", "slotcar"):
        generated = parts[-1].endswith(("_pb2", "_pb2_grpc"))
        return None if generated else "shm" if parts[2] == "shm" else "proto"
    if len(parts) < 3:
        return None
    return module_layer(".".join(parts[1:]).replace(".__main__", ".cli"))


def module_layer(module: str) -> str | None:
    """The layer of one of our modules, "sidecar" for the package itself, or None for other people's modules."""
    top, _, rest = module.partition(".")
    if module.startswith("slotcar.shm"):
        return "shm"
    if top == "slotcar_sidecar":
        inner = rest.partition(".")[0]
        return "sidecar" if inner in ("", "__init__") else TOGETHER.get(inner, inner)
    return PACKAGES.get(top)


class Imports(ast.NodeVisitor):
    """Collects (line, module, name or None, for type checkers only) of every import and of every use of one."""

    def __init__(self, path: str) -> None:
        parts = Path(path).with_suffix("").parts[1:]
        self._package = parts[:-1]
        self._typing = 0
        self._aliases: dict[str, str] = {}
        self.imports: list[tuple[int, str, str | None, bool]] = []
        self.uses: list[tuple[int, str, str]] = []

    def visit_If(self, node: ast.If) -> None:
        guard = ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        self._typing += guard
        for child in node.body:
            self.visit(child)
        self._typing -= guard
        self.visit(node.test)
        for child in node.orelse:
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.imports.append((node.lineno, alias.name, None, bool(self._typing)))
            top = alias.name.partition(".")[0]
            self._aliases[alias.asname or top] = alias.name if alias.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level:
            base = self._package[: len(self._package) - node.level + 1]
            module = ".".join((*base, *([module] if module else [])))
        for alias in node.names:
            self.imports.append((node.lineno, module, alias.name, bool(self._typing)))
            self._aliases[alias.asname or alias.name] = f"{module}.{alias.name}"

    def visit_Call(self, node: ast.Call) -> None:
        dynamic = ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")
        if dynamic and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            self.imports.append((node.lineno, node.args[0].value, None, False))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        top, dot, rest = ast.unparse(node.value).partition(".")
        if top in self._aliases:
            self.uses.append((node.lineno, self._aliases[top] + dot + rest, node.attr))
        self.generic_visit(node)


def violations(path: str, source: str) -> Iterator[str]:
    """What `source` at `path` (relative to the repository) imports or uses against the rules, with its line."""
    layer = layer_of(path)
    if layer is None:
        return
    seen = Imports(path)
    seen.visit(ast.parse(source))
    for line, module, name, typing_only in seen.imports:
        at = f"{path}:{line}: {layer}"
        yield from _import_violations(at, layer, module, name)
        builds = module in BUILDERS or (module, name) in BUILDER_NAMES
        builds = builds and (layer, module) not in MAY_ALSO_BUILD
        if builds and path.startswith("sidecar/") and layer not in MAY_BUILD and not typing_only:
            yield f"{at} imports {module}: only app.py and process/ build threads, clocks and sockets"
        if (module, name) in ENVIRONMENT and path not in MAY_READ_ENVIRONMENT:
            yield f"{at} reads {module}.{name}: only the config modules and cli.py do"
    for line, module, name in seen.uses:
        at = f"{path}:{line}: {layer}"
        if (module, name) in ENVIRONMENT and path not in MAY_READ_ENVIRONMENT:
            yield f"{at} reads {module}.{name}: only the config modules and cli.py do"
        if path.startswith("sidecar/") and layer not in MAY_BUILD and (module, name) in BUILDER_NAMES:
            yield f"{at} uses {module}.{name}: only app.py and process/ build threads, clocks and sockets"


def _import_violations(at: str, layer: str, module: str, name: str | None) -> Iterator[str]:
    top = module.partition(".")[0]
    if top in ("tests", "conftest"):
        yield f"{at} imports {module}: nothing imports tests"
        return
    target = module_layer(f"{module}.{name}" if module == "slotcar_sidecar" and name else module)
    if target is not None:
        if target not in (layer, "sidecar") and target not in MAY_IMPORT.get(layer, set()):
            yield f"{at} imports {target} ({module})"
        if target == "sidecar" and layer in ("proto", "shm", "kernels", "clients"):
            yield f"{at} imports {target} ({module})"
        return
    if top in sys.stdlib_module_names:
        return
    if layer in STDLIB_ONLY or top not in THIRD_PARTY.get(layer, {top}):
        yield f"{at} imports {module}: a library it may not depend on"
    for libraries, layers in LIBRARY_RULES:
        if top in libraries and layer not in layers:
            yield f"{at} imports {module}: only {', '.join(sorted(layers))} may"


def files() -> list[str]:
    return sorted(
        path.relative_to(REPOSITORY).as_posix() for root in ROOTS for path in (REPOSITORY / root).rglob("*.py")
    )


def test_imports_go_down() -> None:
    found = [text for path in files() for text in violations(path, (REPOSITORY / path).read_text(encoding="utf-8"))]
    assert not found, "\n".join(["", *dict.fromkeys(found)])


def test_every_module_has_a_layer_with_a_rule() -> None:
    known = {None, "sidecar", *MAY_IMPORT}
    assert [path for path in files() if layer_of(path) not in known] == [], "give these a rule"


PLANTED = [
    ("sidecar/slotcar_sidecar/core/x.py", "import numpy", "a library it may not depend on"),
    ("sidecar/slotcar_sidecar/core/x.py", "from slotcar_sidecar.store import peft", "imports store"),
    ("sidecar/slotcar_sidecar/core/x.py", "from slotcar_sidecar import cache", "imports cache"),
    ("sidecar/slotcar_sidecar/core/x.py", "from ..device import cpu", "imports device"),
    ("sidecar/slotcar_sidecar/core/x.py", "def f():\n    import slotcar_kernels", "imports kernels"),
    ("sidecar/slotcar_sidecar/core/x.py", "import importlib\nimportlib.import_module('grpc')", "may not depend on"),
    ("sidecar/slotcar_sidecar/store/x.py", "import slotcar_sidecar.device.cpu", "imports device"),
    ("sidecar/slotcar_sidecar/store/x.py", "import grpc", "imports grpc: only"),
    ("sidecar/slotcar_sidecar/store/x.py", "from slotcar.v1 import adapter_pb2", "imports proto"),
    ("sidecar/slotcar_sidecar/device/x.py", "from slotcar_sidecar.store import tier", "imports store"),
    ("sidecar/slotcar_sidecar/cache.py", "from slotcar_sidecar.device import cpu", "imports device"),
    ("sidecar/slotcar_sidecar/cache.py", "import torch", "imports torch: only"),
    ("sidecar/slotcar_sidecar/cache.py", "from google.protobuf import message", "imports google.protobuf: only"),
    ("sidecar/slotcar_sidecar/rpc/x.py", "from slotcar_sidecar.store import peft", "imports store"),
    ("sidecar/slotcar_sidecar/rpc/x.py", "import torch", "imports torch: only"),
    ("sidecar/slotcar_sidecar/ops/x.py", "from slotcar_sidecar import rpc", "imports rpc"),
    ("sidecar/slotcar_sidecar/ops/x.py", "from grpc import aio", "imports grpc: only"),
    ("sidecar/slotcar_sidecar/sync/x.py", "from slotcar_sidecar.store import tiers", "imports store"),
    ("sidecar/slotcar_sidecar/store/x.py", "import yaml", "imports yaml: only"),
    ("sidecar/slotcar_sidecar/config.py", "from slotcar_sidecar.cache import AdapterCache", "imports cache"),
    ("sidecar/slotcar_sidecar/app.py", "import slotcar_client", "imports clients"),
    ("sidecar/slotcar_sidecar/app.py", "import torch", "imports torch: only"),
    ("sidecar/slotcar_sidecar/app.py", "from slotcar_sidecar import cli", "imports cli"),
    ("sidecar/slotcar_sidecar/cli.py", "import torch", "imports torch: only"),
    ("sidecar/slotcar_sidecar/store/x.py", "from transformers import AutoConfig", "imports transformers: only"),
    ("kernels/slotcar_kernels/x.py", "import safetensors", "a library it may not depend on"),
    ("kernels/slotcar_kernels/x.py", "from slotcar_sidecar.core import ids", "imports core"),
    ("kernels/slotcar_kernels/x.py", "import slotcar_sidecar", "imports sidecar"),
    ("kernels/slotcar_kernels/x.py", "import slotcar_client", "imports clients"),
    ("clients/slotcar_client/x.py", "from slotcar_sidecar.core import errors", "imports core"),
    ("clients/slotcar_client/engines/x.py", "from tests.fakes import model", "nothing imports tests"),
    ("proto/slotcar/shm/x.py", "import numpy", "a library it may not depend on"),
    ("sidecar/slotcar_sidecar/store/x.py", "import os\nroot = os.environ['ROOT']", "reads os.environ"),
    ("sidecar/slotcar_sidecar/app.py", "from os import getenv", "reads os.getenv"),
    ("sidecar/slotcar_sidecar/demo/x.py", "import sys as s\ns.argv[1]", "reads sys.argv"),
    ("clients/slotcar_client/x.py", "import os\nos.getenv('A')", "reads os.getenv"),
    ("kernels/slotcar_kernels/x.py", "import os\nos.environ.get('A')", "reads os.environ"),
    ("sidecar/slotcar_sidecar/cache.py", "import threading", "only app.py and"),
    ("sidecar/slotcar_sidecar/rpc/x.py", "from time import monotonic", "only app.py and"),
    ("sidecar/slotcar_sidecar/rpc/x.py", "def f():\n    import time", "only app.py and"),
    ("sidecar/slotcar_sidecar/ops/x.py", "import socket", "only app.py and"),
    ("sidecar/slotcar_sidecar/ring/x.py", "import threading", "only app.py and"),
    ("sidecar/slotcar_sidecar/rpc/x.py", "from slotcar.shm import region", "imports shm"),
    (
        "sidecar/slotcar_sidecar/store/x.py",
        "from concurrent.futures import ThreadPoolExecutor",
        "only app.py and process/ build",
    ),
    (
        "sidecar/slotcar_sidecar/device/x.py",
        "import concurrent.futures as f\nf.ThreadPoolExecutor()",
        "only app.py and process/ build",
    ),
    (
        "sidecar/slotcar_sidecar/cache.py",
        "from datetime import datetime\ndatetime.now()",
        "only app.py and process/ build",
    ),
    ("sidecar/slotcar_sidecar/cache.py", "import asyncio\nasyncio.to_thread(print)", "only app.py and"),
]


@pytest.mark.parametrize(("path", "source", "wanted"), PLANTED)
def test_a_planted_violation_is_found(path: str, source: str, wanted: str) -> None:
    found = list(violations(path, source))
    assert len(found) >= 1, "not found"
    assert wanted in found[0]


ALLOWED = [
    ("sidecar/slotcar_sidecar/core/x.py", "import hashlib\nfrom slotcar_sidecar.core.ids import Digest"),
    ("sidecar/slotcar_sidecar/core/x.py", "from .ids import Digest"),
    ("sidecar/slotcar_sidecar/store/x.py", "import torch\nfrom slotcar_sidecar.core import ids"),
    ("sidecar/slotcar_sidecar/device/x.py", "import torch\nfrom slotcar_kernels import cpu"),
    (
        "sidecar/slotcar_sidecar/rpc/x.py",
        "import grpc\nfrom slotcar.v1 import error_pb2\nfrom google.rpc import code_pb2",
    ),
    ("sidecar/slotcar_sidecar/app.py", "import threading, time, socket, grpc\nfrom slotcar_sidecar import rpc, ops"),
    ("sidecar/slotcar_sidecar/demo/x.py", "import slotcar_client, torch, transformers, time, socket"),
    ("sidecar/slotcar_sidecar/cli.py", "import os, slotcar_client\nos.environ\nfrom slotcar_sidecar import app"),
    ("sidecar/slotcar_sidecar/config.py", "import os\nos.environ.get('A')"),
    ("sidecar/slotcar_sidecar/cache.py", "from concurrent.futures import Executor"),
    ("sidecar/slotcar_sidecar/cache.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import threading"),
    ("kernels/slotcar_kernels/x.py", "import torch, numpy, triton, math"),
    ("clients/slotcar_client/x.py", "import grpc, torch, threading, time\nfrom slotcar.v1 import tensor_pb2"),
    ("proto/slotcar/v1/adapter_service_pb2_grpc.py", "import grpc"),
]


@pytest.mark.parametrize(("path", "source"), ALLOWED)
def test_what_the_rules_allow_passes(path: str, source: str) -> None:
    assert list(violations(path, source)) == []
