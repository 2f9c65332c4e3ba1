"""A plug-in of pytest: `-p tests.gpu.shares --share I/N` is every Nth test, from number I on, for N processes."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", default="0/1", help="I/N: every Nth test, from number I on")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    index, count = map(int, config.getoption("--share").split("/"))
    items[:] = items[index::count]
