"""Log lines: what is said, to whom it belongs, and that nothing that stands in a name can forge any of it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcar_sidecar.core.call import CALL, Call
from slotcar_sidecar.core.caller import CALLER, Caller
from slotcar_sidecar.core.events import Event, EventKind
from slotcar_sidecar.core.ids import AdapterName, Digest, Epoch, SlotId
from slotcar_sidecar.ops import audit, logs

HOSTILE = [
    "a\nb",
    "a\r\n12:00:00 INFO    shutting down",
    'a" level="error',
    "a  reason=forged",
    "\x1b[2J\x1b]0;title\x07",
    "\x00\x08\x7f\x85\u2028\u2029\u202e",
    "lone \ud800 half",
    '{"level": "error"}',
    "back\\slash",
    "x" * 100_000,
]


class Kept(logging.Handler):
    """The lines as JSON, read back."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logs.formatter("json"))
        self.lines: list[dict[str, object]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


class ExecuteBatchError(Exception):
    """Has the name of what gRPC raises when a peer is gone."""


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """The process's logging is as it was."""
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in ("slotcar", "slotcar.audit"))]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate
    logging.captureWarnings(capture=False)
    logs._process.clear()


def line_of(log_format: str, text: str, /, **fields: object) -> str:
    record = logging.LogRecord("slotcar.test", logging.INFO, __file__, 1, text, (), None)
    record.fields = fields
    return logs.formatter(log_format).format(record)


def test_a_caller_that_vanished_is_no_fault_and_all_else_is(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(logging.StreamHandler(), "json", "info")
    log = logging.getLogger("grpc._cython.cygrpc")
    for error in (ExecuteBatchError(), ValueError("a fault")):
        try:
            raise error
        except Exception:
            log.exception("raised by a servicer method")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert ["a fault" in line["exception"] for line in lines] == [True]


def test_a_line_says_when_who_and_in_which_trace() -> None:
    def write() -> str:
        CALLER.set(Caller("router"))
        CALL.set(Call("LoadAdapter", "unix:", "ab" * 16))
        return line_of("json", "loaded", adapter="sql", digest="0123")

    logs.bind(Epoch("e1"))
    line = json.loads(copy_context().run(write))
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "slotcar.test",
        "message": "loaded",
        "epoch": "e1",
        "caller": "router",
        "trace_id": "ab" * 16,
        "adapter": "sql",
        "digest": "0123",
    }
    assert list(json.loads(line_of("json", "loaded"))) == ["time", "level", "logger", "message", "epoch"]


def test_a_field_takes_the_place_of_no_other_part() -> None:
    line = json.loads(line_of("json", "said", time="never", level="error", logger="root", message="other", event="e"))
    assert (line["level"], line["logger"], line["message"]) == ("info", "slotcar.test", "said")
    assert line["time"] != "never"


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("log_format", ["human", "json"])
def test_hostile_text_stays_in_its_field(log_format: str, text: str) -> None:
    for line in (line_of(log_format, "m", name=text), line_of(log_format, text)):
        assert line.isprintable()
        assert len(line) < 70_000
    if log_format == "json" and len(text) < 1000:
        found = json.loads(line_of("json", text, name=text))
        assert (found["message"], found["name"], found["level"]) == (text, text, "info")


@pytest.mark.parametrize("letter", ["x", '"', "\N{ROCKET}", "\x00"])
def test_a_line_of_json_stays_one_however_much_there_is(letter: str) -> None:
    """A traceback has its two ends, a list its beginning."""
    long = letter * 100_000
    record = logging.LogRecord("slotcar.test", logging.INFO, __file__, 1, long, (), None)
    record.fields = {"name": long, "many": [long] * 100, "numbers": list(range(100_000)), "path": Path(long)}
    try:
        raise ValueError(long + "at the end")
    except ValueError:
        record.exc_info = sys.exc_info()
    text = logs.formatter("json").format(record)
    line = json.loads(text)
    assert len(text) <= logs.MOST_LINE_BYTES
    assert all(line[name].startswith(letter) for name in ("message", "name", "path"))
    assert line["exception"].startswith("Traceback")


def test_of_a_long_traceback_the_two_ends_are_shown() -> None:
    record = logging.LogRecord("slotcar.test", logging.INFO, __file__, 1, "fault", (), None)
    try:
        raise ValueError("x" * 100_000 + " at the end")
    except ValueError:
        record.exc_info = sys.exc_info()
    found = json.loads(logs.formatter("json").format(record))["exception"]
    assert (found.startswith("Traceback"), found.endswith("x at the end"), len(found) < 20_000) == (True, True, True)


def test_of_a_long_list_the_beginning_is_shown() -> None:
    found = json.loads(line_of("json", "said", many=["a" * 100] * 1000, few=["a", 1, None], deep=[[float("nan")]]))
    assert (found["few"], found["deep"]) == (["a", 1, None], ["[nan]"])
    assert (found["many"][:160], found["many"][-1], len(found["many"]) < 200) == (["a" * 100] * 160, "…", True)


@given(st.text())
def test_a_line_for_people_reads_back(text: str) -> None:
    """A value is bare only if no reader can take it for more than one."""
    line = line_of("human", "m", name=text, after="x")
    assert line.isprintable()
    _, _, value = line.partition("  name=")
    value = value.removesuffix("  after=x")
    if not text:
        assert "name=" not in line
    elif value == text:
        assert not set(text) & set(' "=')
    else:
        assert value.startswith('"')
        assert value.endswith('"')
        assert '"' not in value[1:-1].replace("\\\\", "").replace('\\"', "")


def test_a_traceback_cannot_look_like_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(logging.StreamHandler(), "human", "info")
    try:
        raise ValueError("bad name: \n12:00:00 INFO    all is well\x1b[2J")
    except ValueError:
        logging.getLogger("slotcar").exception("fault")
    first, *rest = capsys.readouterr().err.split("\n")[:-1]
    assert first.endswith("ERROR   fault")
    assert rest
    assert all(line.startswith("    ") and line.isprintable() for line in rest)


def test_a_number_that_is_none_is_still_json() -> None:
    assert json.loads(line_of("json", "m", a=float("inf"), b=float("nan"), c=1.5))["c"] == 1.5
    assert "NaN" not in line_of("json", "m", b=float("nan"))


def test_levels_change_while_it_runs_and_never_silence_the_audit(caplog: pytest.LogCaptureFixture) -> None:
    log, other, audit = (logging.getLogger(name) for name in ("slotcar.x", "urllib3", "slotcar.audit"))
    audit.setLevel(logging.INFO)
    for level, wanted in (("debug", (True, False)), ("info", (False, False)), ("error", (False, False))):
        logs.set_level(level)
        assert logs.level() == level
        assert (log.isEnabledFor(logging.DEBUG), other.isEnabledFor(logging.DEBUG)) == wanted
        assert log.isEnabledFor(logging.INFO) == (level != "error")
        assert audit.isEnabledFor(logging.INFO)
    with pytest.raises(KeyError):
        logs.set_level("loud")


def example(name: str) -> dict[str, object]:
    """The line that docs/operations.md shows."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "operations.md").read_text(encoding="utf-8")
    found: dict[str, object] = json.loads(text.partition(f"<!-- {name}-example -->\n```json\n")[2].partition("\n")[0])
    return found


@pytest.mark.parametrize("name", ["log", "audit"])
def test_the_lines_of_the_documentation_are_what_is_written(name: str) -> None:
    """The same keys in the same order, and the same values but for the time."""
    shown, written = example(name), Kept()
    logging.getLogger("slotcar").addHandler(written)

    def write() -> None:
        CALLER.set(Caller("router"))
        CALL.set(Call("LoadAdapter", "ipv4:10.0.0.7:51234", "0af7651916cd43dd8448eb211c80319c"))
        logs.set_level("info")
        if name == "log":
            digest = Digest("sha256:1f0c3b5f9a8e" + "0" * 52)
            reason, at = "slot taken by chat", {"name": AdapterName("sql"), "digest": digest, "slot": SlotId(3)}
            logs.log_event(Event(1, EventKind.EVICTED, 0.0, 12, **at, reason=reason))
        else:
            digest = Digest("sha256:" + "ab" * 32)
            audit.configure(None)
            audit.audit_event(
                Event(1, EventKind.LOADED, 0.0, 13, AdapterName("chat"), digest, source="/srv/adapters/chat")
            )

    logs.bind(Epoch("2b0b8133bb11df66"))
    try:
        copy_context().run(write)
    finally:
        logging.getLogger("slotcar").removeHandler(written)
    (line,) = written.lines
    assert list(line) == list(shown)
    assert {**line, "time": ""} == {**shown, "time": ""}
