"""Log lines: one event each, for people or as JSON, with who called and in which trace; nothing per Forward.

Invariant: a line is a line and a field is a field, whatever stands in names, messages and reasons.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from structlog.processors import JSONRenderer, format_exc_info
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict

from slotcar_sidecar.core.call import CALL
from slotcar_sidecar.core.caller import CALLER
from slotcar_sidecar.core.events import Event
from slotcar_sidecar.core.ids import Epoch

LEVELS = ("debug", "info", "warning", "error")

_log = logging.getLogger("slotcar.events")

_MOST_CHARACTERS = 16 << 10
"""Of a message or a value: names are short, and of what a peer said the beginning is enough."""
_HEAD = ("time", "level", "logger", "message")
_process: dict[str, str] = {}


def formatter(log_format: str) -> logging.Formatter:
    """Makes lines of records; `extra={"fields": {...}}` adds fields to one."""
    render = JSONRenderer(serializer=json.dumps, default=str) if log_format == "json" else _human
    return ProcessorFormatter(
        foreign_pre_chain=[format_exc_info, _described], processors=[ProcessorFormatter.remove_processors_meta, render]
    )


def bind(epoch: Epoch) -> None:
    """Every line of this process says its epoch from now on."""
    _process["epoch"] = str(epoch)


def configure(handler: logging.Handler, log_format: str, level: str) -> None:
    """Sends all log lines to `handler`."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_vanished_caller)
    # It would tell of each change in the folder, of the log's own too.
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    logging.captureWarnings(capture=True)
    handler.setFormatter(formatter(log_format))
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)


def set_level(level: str) -> None:
    """From "debug" to "error", for all lines but the audit's. What others' libraries say at "debug" is never shown."""
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger("slotcar").setLevel(number)
    logging.getLogger().setLevel(max(number, logging.INFO))


def level() -> str:
    """What is shown now."""
    return logging.getLevelName(logging.getLogger("slotcar").getEffectiveLevel()).lower()


def log_event(event: Event) -> None:
    """Writes an event, with digests and secrets cut to a prefix."""
    fields = {
        "generation": event.generation,
        "adapter": str(event.name or ""),
        "digest": event.digest.short if event.digest else "",
        "slot": event.slot,
        "session": event.session.short if event.session else "",
        "reason": event.reason,
    }
    _log.info(event.kind.value, extra={"fields": fields})


def utc_text(seconds: float) -> str:
    """Unix seconds as ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def context() -> dict[str, str]:
    """What is known of the process and of the call that runs now, without what is not."""
    call = CALL.get()
    known = {**_process, "caller": CALLER.get().name, "trace_id": call.trace}
    return {key: value for key, value in known.items() if value}


def _is_no_vanished_caller(record: logging.LogRecord) -> bool:
    """False for what gRPC takes for a fault of the server: a caller that was gone when its answer was written."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"


def _described(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """The head of a line, its own fields, and the context; a field can take the place of no other part."""
    record: logging.LogRecord = event["_record"]
    head = {
        "time": utc_text(record.created),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": _bounded(event.pop("event")),
    }
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    own = {key: _bounded(value) for key, value in fields.items() if key not in head}
    return {**head, **{key: value for key, value in context().items() if key not in own}, **own, **event}


def _bounded(value: Any) -> Any:
    """Nothing is too long for a line, or no JSON."""
    if isinstance(value, str) and len(value) > _MOST_CHARACTERS:
        return value[:_MOST_CHARACTERS] + "…"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _human(_logger: Any, _method: str, event: EventDict) -> str:
    """Time, level, message, and the fields as key=value; a traceback follows in lines that are set in."""
    time = datetime.fromisoformat(event["time"]).astimezone().strftime("%H:%M:%S")
    trace = event.pop("exception", "")
    message = _printable(event["message"])
    pairs = [f"{key}={_quoted(value)}" for key, value in event.items() if key not in _HEAD and value not in (None, "")]
    line = "  ".join([f"{time} {event['level'].upper():<7} {message}", *pairs])
    return "\n    ".join([line, *map(_printable, trace.splitlines())])


def _quoted(value: Any) -> str:
    """As it is, or between quotes where that would not be one value."""
    text = str(value)
    if text.isprintable() and not set(text) & set(' "='):
        return text
    return '"' + _printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _printable(text: str) -> str:
    """What would break the line, or move a terminal's cursor, as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
