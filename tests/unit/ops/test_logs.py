"""Log lines: what is said, and what is not taken for a fault."""

from __future__ import annotations

import json
import logging

import pytest
from slotcar_sidecar.ops import logs


class ExecuteBatchError(Exception):
    """Has the name of what gRPC raises when a peer is gone."""


@pytest.fixture(autouse=True)
def _restored() -> object:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_a_caller_that_vanished_is_no_fault_and_all_else_is(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json")
    log = logging.getLogger("grpc._cython.cygrpc")
    for error in (ExecuteBatchError(), ValueError("a fault")):
        try:
            raise error
        except Exception:
            log.exception("raised by a servicer method")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert ["a fault" in line["exception"] for line in lines] == [True]
