"""What operators may ask of this process: its end, the level of its log, and what it is.

No setting is a secret, as credentials are named by file or variable; so all of them are told.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from slotcar_sidecar.config import Address, Config
from slotcar_sidecar.ops import logs
from slotcar_sidecar.ops.audit import audit
from slotcar_sidecar.process.ending import Stop
from slotcar_sidecar.rpc.operator_service import Operations, ProcessFacts

__all__ = ["make_operations"]


def make_operations(config: Config, stop: Stop, addresses: Sequence[Address], metrics_url: str) -> Operations:
    """`addresses` are read at each call: they are known when the server is bound."""
    started, settings = time.time(), {name: _text(value) for name, value in config.to_dict().items()}

    def facts() -> ProcessFacts:
        where = tuple(map(str, addresses))
        return ProcessFacts(settings, os.getpid(), started, str(Path.cwd()), where, metrics_url)

    return Operations(stop.ask, _set_level, logs.level, facts)


def _set_level(level: str) -> str:
    """Returns the level before."""
    previous = logs.level()
    logs.set_level(level)
    audit("log-level", log_level=level, previous=previous)
    return previous


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(value) if isinstance(value, list) else str(value)
