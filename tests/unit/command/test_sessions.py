"""Who pins what, and what there is room for."""

from __future__ import annotations

import json

import slotcar_client

from tests.server import SidecarProcess
from tests.unit.command.called import answer, call


def test_sessions_say_who_pins_which_slot(sidecar: SidecarProcess, engine: slotcar_client.Session) -> None:
    short, slot = engine.session_id[:8], answer(sidecar, "show", "sql")["slot"]
    (session,) = answer(sidecar, "sessions")
    assert (session["session"], session["client_name"], session["reserved_slots"]) == (short, "my [red]engine", 1)
    assert [(m["mapping_id"], m["slots"], m["pinned"], m["current"]) for m in session["mappings"]] == [
        (1, [slot], True, True)
    ]
    assert [(hold["hold_id"], hold["tier"]) for hold in session["holds"]] == [(9, "device"), (10, "host")]
    shown = call(sidecar, "sessions").output
    assert f"my [red]engine {short}: hold 9, mapping 1" in shown
    assert "1 min " in shown
    assert "until released" in shown
    assert f"my [red]engine {short}: hold 9, mapping 1" in call(sidecar, "list").output
    pins = answer(sidecar, "list")["pins"]
    assert [(pin["slot"], pin["session"], pin["owner"], pin["owner_id"]) for pin in pins] == [
        (slot, short, "hold", 9),
        (slot, short, "mapping", 1),
    ]


def test_list_shows_slots_that_drain(sidecar: SidecarProcess, engine: slotcar_client.Session) -> None:
    assert "drains" in call(sidecar, "unload", "sql").output
    (row,) = [line for line in call(sidecar, "list").output.splitlines() if "(draining)" in line]
    assert row.rstrip().endswith(f"my [red]engine {engine.session_id[:8]}: hold 9, mapping 1")
    assert call(sidecar, "load", "sql", str(sidecar.root / "sql")).exit_code == 0


def test_end_ends_a_session_once(sidecar: SidecarProcess, engine: slotcar_client.Session) -> None:
    short = engine.session_id[:8]
    assert call(sidecar, "end", short).exit_code == 0
    again = call(sidecar, "end", short)
    assert again.exit_code == 1
    assert short in again.stderr
    assert json.loads(call(sidecar, "end", short, "--json").stdout)["error"]["reason"] == "SESSION_NOT_FOUND"
    assert answer(sidecar, "sessions") == []
    assert "no session" in call(sidecar, "sessions").output


def test_capacity(sidecar: SidecarProcess, engine: slotcar_client.Session) -> None:
    capacity = answer(sidecar, "capacity")
    assert (capacity["slots"], capacity["slots_pinned"], capacity["slots_reserved"]) == (2, 1, 1)
    shown = call(sidecar, "capacity").output
    assert "1 pinned, 1 reserved, 1 available" in shown
    assert "of it held" in shown
