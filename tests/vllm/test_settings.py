"""The settings of an engine come from its environment, each checked by its name; which runs a step's rows make."""

from __future__ import annotations

import pytest
from slotcar_client.engines.vllm.rows import Rows, Scheduled, rows_of
from slotcar_client.engines.vllm.settings import Settings
from slotcar_client.errors import RequestInvalid


def test_without_variables_the_defaults_hold() -> None:
    assert Settings.from_environment({}) == Settings("unix:///run/slotcar/slotcar.sock", "auto", 60.0, "wait", 0)


def test_each_variable_is_one_setting() -> None:
    found = Settings.from_environment(
        {
            "SLOTCAR_TARGET": "unix:///s.sock",
            "SLOTCAR_PLANE": "ring",
            "SLOTCAR_WAIT_SECONDS": "2.5",
            "SLOTCAR_ON_LOSS": "fail",
            "SLOTCAR_RESERVED_SLOTS": "3",
        }
    )
    assert found == Settings("unix:///s.sock", "ring", 2.5, "fail", 3)
    assert found.step_wait_seconds == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SLOTCAR_PLANE", "fast"),
        ("SLOTCAR_WAIT_SECONDS", "soon"),
        ("SLOTCAR_WAIT_SECONDS", "-1"),
        ("SLOTCAR_WAIT_SECONDS", "nan"),
        ("SLOTCAR_ON_LOSS", "base"),
        ("SLOTCAR_RESERVED_SLOTS", "1.5"),
        ("SLOTCAR_RESERVED_SLOTS", "-1"),
    ],
)
def test_a_bad_variable_is_named(name: str, text: str) -> None:
    with pytest.raises(RequestInvalid, match=name):
        Settings.from_environment({name: text})


def test_neighbours_of_one_version_are_one_run_and_what_is_not_served_is_base() -> None:
    batch = [
        Scheduled("a", "sql@1", 3, 1),
        Scheduled("b", "sql@1", 1, 1),
        Scheduled("c", None, 2, 1),
        Scheduled("d", "lost@1", 4, 2),
        Scheduled("e", "sql@1", 1, 1),
    ]
    rows = rows_of(batch, lambda ref: ref != "lost@1")
    assert rows == Rows(("sql@1", None, "sql@1"), (4, 6, 1), (2, 3, 1))
    assert rows.versions == ("sql@1",)
