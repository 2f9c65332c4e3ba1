"""The budgets of CONTRIBUTING, measured on the syntax tree of every file that is neither generated nor a test."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from itertools import filterfalse
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = ("proto", "kernels", "sidecar", "clients", "deploy", "examples")

FILE_LINES = 400
KERNEL_FILE_LINES = 500
FUNCTION_LINES = 60
PARAMETERS = 6

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files() -> list[str]:
    paths = (path for root in ROOTS for path in (REPOSITORY / root).rglob("*.py"))
    return sorted(
        path.relative_to(REPOSITORY).as_posix() for path in paths if not path.stem.endswith(("_pb2", "_grpc"))
    )


def long_files(path: str, source: str) -> Iterator[str]:
    limit = KERNEL_FILE_LINES if path.startswith("kernels/") else FILE_LINES
    lines = len(source.splitlines())
    if lines > limit:
        yield f"{path} has {lines} lines, the limit is {limit}"


def long_functions(path: str, source: str) -> Iterator[str]:
    for node in _functions(source):
        assert node.end_lineno is not None
        start = node.body[0].lineno if _is_gpu_kernel(node) else node.lineno
        lines = node.end_lineno - start + 1
        if lines > FUNCTION_LINES:
            yield f"{path}:{node.lineno} {node.name} has {lines} lines, the limit is {FUNCTION_LINES}"


def many_parameters(path: str, source: str) -> Iterator[str]:
    for node in filterfalse(_is_gpu_kernel, _functions(source)):
        names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len(names) - (names[:1] in (["self"], ["cls"]))
        if count > PARAMETERS:
            yield f"{path}:{node.lineno} {node.name} has {count} parameters, the limit is {PARAMETERS}"


def missing_docstrings(path: str, source: str) -> Iterator[str]:
    if not ast.get_docstring(ast.parse(source)):
        yield f"{path} does not open with its purpose"


def _functions(source: str) -> Iterator[Function]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, Function))


def _is_gpu_kernel(node: Function) -> bool:
    """A kernel's parameters are the arguments and constants of its launch, which has no other form."""
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)


RULES = [long_files, long_functions, many_parameters, missing_docstrings]


@pytest.mark.parametrize("rule", RULES)
def test_every_file_is_within_budget(rule: Callable[[str, str], Iterator[str]]) -> None:
    found = [text for path in files() for text in rule(path, (REPOSITORY / path).read_text(encoding="utf-8"))]
    assert not found, "\n".join(["", *found])


OFFENDERS = [
    (long_files, "sidecar/x.py", "\n" * 401),
    (long_files, "kernels/x.py", "\n" * 501),
    (long_functions, "sidecar/x.py", "def f():\n" + "    pass\n" * 60),
    (long_functions, "sidecar/x.py", "class C:\n    async def f(self):\n" + "        pass\n" * 60),
    (many_parameters, "sidecar/x.py", "def f(a, b, c, d, e, *, f, g): ..."),
    (many_parameters, "sidecar/x.py", "class C:\n    def f(self, a, b, c, d, e, f, g): ..."),
    (many_parameters, "kernels/x.py", "@cache\ndef f(a, b, c, d, e, f, g): ..."),
    (long_functions, "kernels/x.py", "@triton.jit\ndef f():\n" + "    pass\n" * 61),
    (missing_docstrings, "sidecar/x.py", "import os"),
]


@pytest.mark.parametrize(("rule", "path", "source"), OFFENDERS)
def test_an_offender_is_named(rule: Callable[[str, str], Iterator[str]], path: str, source: str) -> None:
    assert path in next(rule(path, source), "")


def test_what_is_at_the_limit_passes() -> None:
    source = '"""Purpose."""\n\nclass C:\n    def f(self, a, b, c, d, e, f):\n' + "        pass\n" * 59
    assert [text for rule in RULES for text in rule("sidecar/x.py", source)] == []
    kernel = '"""Purpose."""\n\n@triton.jit\ndef f(a, b, c, d,\n    e, f, g):\n' + "    pass\n" * 60
    assert [text for rule in RULES for text in rule("kernels/x.py", kernel)] == []
