"""What operators do to the process leaves a trace of who did it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from slotcar_sidecar.config import Config
from slotcar_sidecar.ops import logs
from slotcar_sidecar.process.ending import Stop
from slotcar_sidecar.process.operations import make_operations
from slotcar_sidecar.rpc.health import Health


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """The log's levels are as they were."""
    loggers = [logging.getLogger(name) for name in ("", "slotcar")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


async def test_a_change_of_the_log_s_level_is_audited_at_every_level(caplog: pytest.LogCaptureFixture) -> None:
    logs.set_level("info")
    caplog.set_level(logging.INFO, "slotcar.audit")
    operations = make_operations(Config(), Stop(1.0, Health()), (), "")
    assert operations.set_level("error") == "info"
    assert operations.set_level("debug") == "error"
    found = [record.__dict__["fields"] for record in caplog.records if record.name == "slotcar.audit"]
    assert found == [
        {"action": "log-level", "log_level": "error", "previous": "info"},
        {"action": "log-level", "log_level": "debug", "previous": "error"},
    ]
