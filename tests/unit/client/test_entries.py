"""What a caller may write as the entries of a mapping."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from slotcar_client import BASE, RequestInvalid
from slotcar_client.entries import Entries, parse_entries

DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("entries", "wanted"),
    [
        ([("sql", 3), (BASE, 1)], Entries(("sql", BASE), (3, 1))),
        (["sql", BASE, "sql"], Entries(("sql", BASE, "sql"), None)),
        ([(f"sql@{DIGEST}", 0)], Entries((f"sql@{DIGEST}",), (0,))),
        (iter([BASE]), Entries((BASE,), None)),
        ([], Entries((), None)),
    ],
)
def test_entries_keep_their_order_and_counts(entries: Any, wanted: Entries) -> None:
    assert parse_entries(entries) == wanted


@pytest.mark.parametrize(
    ("entries", "field"),
    [
        ("sql", "entries"),
        (["sql", ("chat", 1)], "entries[1]"),
        ([("chat", 1), BASE], "entries[1]"),
        ([("sql", -1)], "entries[0]"),
        ([("sql", 1.0)], "entries[0]"),
        ([("sql", True)], "entries[0]"),
        ([("sql", 1, 2)], "entries[0]"),
        ([("sql",)], "entries[0]"),
        ([""], "entries[0]"),
        ([None], "entries[0]"),
        ([0], "entries[0]"),
        (["BASE", None], "entries[1]"),
    ],
)
def test_what_cannot_be_an_entry_is_named(entries: Any, field: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        parse_entries(entries)
    assert caught.value.metadata["field"] == field


def test_base_is_one_value_and_no_name() -> None:
    assert copy.deepcopy(BASE) is BASE
    assert repr(BASE) == "BASE"
    assert BASE != "BASE"
