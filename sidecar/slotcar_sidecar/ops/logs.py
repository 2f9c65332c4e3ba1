"""Log lines: one event each, for people or as JSON; nothing per Forward."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from slotcar_sidecar.core.events import Event
from slotcar_sidecar.core.ids import Epoch

_log = logging.getLogger("slotcar.events")


class JsonFormatter(logging.Formatter):
    """One JSON object a line; `extra={"fields": {...}}` adds fields."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class HumanFormatter(logging.Formatter):
    """Time, level, message, and the fields as key=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s%(pairs)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        record.pairs = "".join(f"  {key}={value}" for key, value in fields.items() if value not in (None, ""))
        return super().format(record)


def _is_no_vanished_caller(record: logging.LogRecord) -> bool:
    """False for what gRPC takes for a fault of the server: a caller that was gone when its answer was written."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"


def configure(log_format: str) -> None:
    """Sends all log lines to standard error in the given format."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_vanished_caller)
    # It would tell of each change in the folder, of the log's own too.
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else HumanFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def log_event(epoch: Epoch, event: Event) -> None:
    """Writes an event, with digests and secrets cut to a prefix."""
    fields = {
        "epoch": epoch,
        "generation": event.generation,
        "adapter": str(event.name or ""),
        "digest": event.digest.short if event.digest else "",
        "slot": event.slot,
        "session": event.session.short if event.session else "",
        "reason": event.reason,
    }
    _log.info(event.kind.value, extra={"fields": fields})
