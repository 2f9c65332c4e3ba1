"""States of a server, made by hand."""

from __future__ import annotations

from slotcar_sidecar.ops.state import (
    Adapter,
    Declared,
    DeclaredFile,
    Event,
    Failure,
    Hold,
    Left,
    Load,
    MappingRow,
    Pin,
    Promised,
    Server,
    Session,
    Slot,
    State,
    Tier,
)

NOW = 1_800_000_000.0
DIGEST = "sha256:0123456789ab"
PROMISED = Promised({"free": 1, "filling": 0, "occupied": 1, "draining": 0}, 1, 0, 1, 1, 0, 3, 100, 1, 8, 0, {})
EMPTY = State(
    time=NOW,
    server=Server(
        "pod-0", "0.1", "e" * 16, 7, "ready", 90.0, "cpu", "avx2", 100, "float32", 16, "lru", ("stream", "ring"), 4
    ),
    tiers=(Tier("device", 100, 200, 100, 1), Tier("host", 0, 1000, 0, 0), Tier("disk", 0, 0, 0, 0)),
    promised=PROMISED,
    slots=(),
    adapters=(),
    sessions=(),
    file=None,
    declared=(),
    loads=(),
    events=(),
    left_out=dict.fromkeys(("slots", "adapters", "sessions", "declared", "lost"), 0),
)


def full(name: str = "sql", text: str = "out of luck") -> State:
    """One of everything, with a name and a text of the caller's choice wherever somebody else could choose them."""
    mapping = MappingRow(3, 6, (f"{name}@{DIGEST}",), 2, (0,), is_pinned=True, is_current=False, idle_seconds=2.0)
    hold = Hold(9, f"{name}@{DIGEST}", keeps_slot=True, left_seconds=None)
    return State(
        time=NOW,
        server=EMPTY.server,
        tiers=EMPTY.tiers,
        promised=Promised(PROMISED.slots, 1, 0, 1, 1, 2, 3, 100, 1, 8, 1, {name: text}),
        slots=(
            Slot(0, "occupied", (name,), DIGEST, 5, 61.0, 9, (Pin("abcdef01", name, "mapping", 3),)),
            Slot(1, "free", (), "", 0, None, 0, ()),
        ),
        adapters=(
            Adapter(name, "device", DIGEST, 0, 8, 4096, True, 9, 61.0, ("sha256:ba9876543210",)),
            Adapter("evicted", "host", DIGEST, rank=8, bytes=4096, left=Left(NOW - 5, f"slot taken by {name}")),
            Adapter("broken", "none", failure=Failure(NOW - 10, text)),
            Adapter("mended", "host", DIGEST, failure=Failure(NOW - 20, text, is_over=True)),
        ),
        sessions=(Session("abcdef01", name, 12.0, 2, 1, ("ring",), 1, 1, 5, (mapping,), 1, (hold,)),),
        file=DeclaredFile("/etc/adapters.yaml", "sha256:0", {"failed": 1, "invalid": 1}, text),
        declared=(
            Declared(name, "", "keep", "failed", "SOURCE_UNAVAILABLE", text, 3, 8.0, 30.0),
            Declared("", "adapters[4]", "", "invalid", "REQUEST_INVALID", text, 0, None, 30.0),
        ),
        loads=(
            Load(name, DIGEST, NOW - 8, (("read", 0.2), ("wait", 0.0), ("fill", 0.05))),
            Load("", DIGEST, NOW - 50, (("read", 2.0),)),
        ),
        events=(
            Event(12, NOW - 5, "evicted", 7, name, DIGEST, 0, "", f"slot taken by {name}"),
            Event(11, NOW - 10, "refused", 6, "broken", "", None, "abcdef01", text),
        ),
        left_out=EMPTY.left_out | {"adapters": 9800},
    )
