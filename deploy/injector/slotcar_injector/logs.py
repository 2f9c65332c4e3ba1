"""Log lines: one JSON object each, with the fields that the record's `facts` has."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

log = logging.getLogger("slotcar_injector")


class JsonLines(logging.Formatter):
    """Whatever a pod's fields are, a line has no newline and nothing but ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def write_to_stderr() -> None:
    """Every logger's lines, those of the libraries from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    log.setLevel(logging.INFO)


def say(event: str, level: int = logging.INFO, **facts: object) -> None:
    """One line."""
    log.log(level, event, extra={"facts": facts})
