"""Log lines: one event each, for people or as JSON, with who called and in which trace; nothing per Forward.

Invariant: a line is a line and a field is a field, whatever stands in names, messages and reasons; what is too long is
cut where it stands, so that a line of JSON stays one.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from structlog.processors import format_exc_info
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict

from slotcar_sidecar.core.call import CALL
from slotcar_sidecar.core.caller import CALLER
from slotcar_sidecar.core.events import Event
from slotcar_sidecar.core.ids import Epoch

LEVELS = ("debug", "info", "warning", "error")

_log = logging.getLogger("slotcar.events")

MOST_LINE_BYTES = 64 << 10
_MOST_CHARACTERS = 16 << 10
"""Of a message or a value: names are short, and of what a peer said the beginning is enough."""
_FEW_CHARACTERS = 256
"""The same where a line would be too long."""
_HEAD = ("time", "level", "logger", "message")
_process: dict[str, str] = {}


def formatter(log_format: str) -> logging.Formatter:
    """Makes lines of records; `extra={"fields": {...}}` adds fields to one."""
    render = _json if log_format == "json" else _human
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
    if "exception" in event:
        event["exception"] = _ends(event["exception"])
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    own = {key: _value(value) for key, value in fields.items() if key not in head}
    return {**head, **{key: value for key, value in context().items() if key not in own}, **own, **event}


def _value(value: Any) -> Any:
    """What a field has: one value, or several."""
    return _several(value) if isinstance(value, list | tuple) else _bounded(value)


def _several(values: Iterable[Any]) -> list[Any]:
    """The first, as many as have room for the characters of one."""
    some: list[Any] = []
    left = _MOST_CHARACTERS
    for value in values:
        if left <= 0:
            return [*some, "…"]
        some.append(_bounded(value, left))
        left -= len(str(some[-1])) + 1
    return some


def _bounded(value: Any, most: int = _MOST_CHARACTERS) -> Any:
    """Nothing is too long for a line, or no JSON."""
    if value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= most else text[:most] + "…"


def _ends(trace: str) -> str:
    """A traceback begins with who called, and ends with what was raised."""
    half = _MOST_CHARACTERS // 2
    return trace if len(trace) <= _MOST_CHARACTERS else f"{trace[:half]}\n…\n{trace[-half:]}"


def _json(_logger: Any, _method: str, event: EventDict) -> str:
    """One object; escapes may make six bytes of a character, and more."""
    line = json.dumps(event, default=str)
    if len(line) <= MOST_LINE_BYTES:
        return line
    return json.dumps({key: _bounded(value, _FEW_CHARACTERS) for key, value in event.items()})


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
