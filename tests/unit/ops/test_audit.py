"""The audit stream: who did what, from the events of a real cache."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from contextvars import copy_context

import pytest
from slotcar_sidecar.core.call import CALL, Call
from slotcar_sidecar.core.caller import CALLER, Caller
from slotcar_sidecar.core.events import Event, EventKind
from slotcar_sidecar.core.ids import AdapterName, Digest, SessionId, SlotId
from slotcar_sidecar.ops import audit, logs

DIGEST = Digest("sha256:" + "ab" * 32)
SECRET = "0123456789abcdef" * 2


class Kept(logging.Handler):
    """The lines, read back."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, object]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


@pytest.fixture
def kept() -> Iterator[Kept]:
    """What goes to a file of its own."""
    handler, log = Kept(), logging.getLogger("slotcar.audit")
    level, propagate = log.level, log.propagate
    audit.configure(handler)
    yield handler
    log.handlers[:], log.level, log.propagate = [], level, propagate


def event(kind: EventKind, **subject: object) -> Event:
    return Event(1, kind, 0.0, 7, **subject)  # type: ignore[arg-type]


def test_a_line_has_the_whole_digest_and_who_called(kept: Kept) -> None:
    def load() -> None:
        CALLER.set(Caller("router"))
        CALL.set(Call("LoadAdapter", "ipv4:10.0.0.1:99", "cd" * 16))
        audit.audit_event(
            event(EventKind.LOADED, name=AdapterName("sql"), digest=DIGEST, slot=SlotId(0), source="/srv/sql")
        )

    copy_context().run(load)
    (line,) = kept.lines
    assert line.pop("time")
    assert line == {
        "level": "info",
        "logger": "slotcar.audit",
        "message": "audit",
        "caller": "router",
        "trace_id": "cd" * 16,
        "action": "load",
        "peer": "ipv4:10.0.0.1:99",
        "adapter": "sql",
        "digest": str(DIGEST),
        "source": "/srv/sql",
        "outcome": "done",
        "generation": 7,
    }


@pytest.mark.parametrize(
    ("kind", "method", "action"),
    [
        (EventKind.LOADED, "LoadAdapter", "load"),
        (EventKind.LOADED, "", "load"),
        (EventKind.LOADED, "LoadAdapterStream", "upload"),
        (EventKind.REFUSED, "LoadAdapterStream", "upload"),
        (EventKind.REPLACED, "LoadAdapter", "replace"),
        (EventKind.UNLOADED, "UnloadAdapter", "unload"),
        (EventKind.EVICTED, "SetMapping", "evict"),
        (EventKind.KEPT, "KeepAdapter", "keep"),
        (EventKind.KEEP_RELEASED, "ReleaseKeep", "release"),
    ],
)
def test_each_verb_has_its_action(kept: Kept, kind: EventKind, method: str, action: str) -> None:
    def tell() -> None:
        CALL.set(Call(method))
        audit.audit_event(event(kind, name=AdapterName("sql"), digest=DIGEST))

    copy_context().run(tell)
    assert [line["action"] for line in kept.lines] == [action]


def test_a_session_is_named_by_its_prefix_alone(kept: Kept) -> None:
    """The whole id is what a client acts by."""
    audit.audit_event(event(EventKind.SESSION_ENDED, session=SessionId(SECRET), reason="ended by an operator"))
    assert SECRET not in json.dumps(kept.lines)
    assert kept.lines[0]["session"] == SessionId(SECRET).short


@pytest.mark.parametrize("kind", [EventKind.FORWARD_STALE, EventKind.HELD, EventKind.FREED, EventKind.SESSION_OPENED])
def test_what_nobody_did_is_no_part_of_it(kept: Kept, kind: EventKind) -> None:
    audit.audit_event(event(kind, name=AdapterName("sql"), digest=DIGEST))
    audit.audit_event(event(EventKind.REFUSED, session=SessionId(SECRET), reason="SLOTS_EXHAUSTED: no"))
    assert kept.lines == []


def test_the_level_of_the_log_holds_nothing_back(kept: Kept) -> None:
    loggers = [logging.getLogger(name) for name in ("", "slotcar")]
    before = [logger.level for logger in loggers]
    try:
        logs.set_level("error")
        audit.audit("denied", verb="LoadAdapter", adapter="a\nb", reason="NOT_ALLOWED")
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
    assert kept.lines[0]["adapter"] == "a\nb"


async def test_what_outlives_its_caller_keeps_it(kept: Kept) -> None:
    """As a load does, in a task that its call began."""
    go_on = asyncio.Event()

    async def load() -> None:
        await go_on.wait()
        audit.audit_event(event(EventKind.LOADED, name=AdapterName("sql"), digest=DIGEST))

    async def call() -> asyncio.Task[None]:
        CALLER.set(Caller("router"))
        return asyncio.create_task(load())

    task = await asyncio.create_task(call())
    go_on.set()
    await task
    assert [line["caller"] for line in kept.lines] == ["router"]
