"""A journal's bytes give back what was written, or are damaged."""

from __future__ import annotations

import contextlib
import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcar_sidecar.core.ids import AdapterName, AdapterRef, Digest
from slotcar_sidecar.core.journal import JournalDamaged, JournalEntry, NamesCopy, decode, encode

digests = st.integers(0, 5).map(lambda number: Digest(f"sha256:{number:064x}"))
GOOD = json.dumps(
    {"name": "sql", "digest": f"sha256:{1:064x}", "source": "/a", "keep": True, "in_slot": False, "history": []}
).encode()
names = st.from_regex(r"[a-z][a-z0-9._-]{0,9}", fullmatch=True).map(AdapterName)
entries = st.lists(
    st.builds(
        JournalEntry,
        st.builds(AdapterRef, names, digests),
        st.text(max_size=20),
        st.booleans(),
        st.booleans(),
        st.lists(digests, max_size=3).map(tuple),
    ),
    unique_by=lambda entry: entry.ref.name,
    max_size=5,
)


@given(entries)
def test_what_was_written_is_read(wanted: list[JournalEntry]) -> None:
    assert list(decode(encode(wanted))) == wanted


@given(entries, st.data())
def test_what_was_changed_is_damaged_or_means_the_same(wanted: list[JournalEntry], data: st.DataObject) -> None:
    good = encode(wanted)
    bad = bytearray(good)
    bad[data.draw(st.integers(0, len(bad) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    for each in (bytes(bad), good[: data.draw(st.integers(0, len(good) - 1))]):
        with contextlib.suppress(JournalDamaged):
            assert list(decode(each)) == wanted


@given(st.binary(max_size=200))
def test_whatever_lies_there_is_damaged(junk: bytes) -> None:
    with pytest.raises(JournalDamaged):
        decode(junk)


@pytest.mark.parametrize("head", [[], {}, 1, {"slotcar_journal": 2}, {"slotcar_journal": "1" * 1000}])
def test_another_head_is_damaged(head: object) -> None:
    with pytest.raises(JournalDamaged):
        decode(json.dumps(head).encode() + b"\n")


def sealed(body: bytes) -> bytes:
    """What somebody wrote who knows the format."""
    return json.dumps({"slotcar_journal": 1, "sha256": hashlib.sha256(body).hexdigest()}).encode() + b"\n" + body


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "its first line is not that of a journal"),
        (b"[1]\n", "its first line is not that of a journal"),
        (b"[" * 100_000, "its first line is not that of a journal"),
        (b'{"slotcar_journal": 2, "sha256": ""}\n', "it is of version 2, wanted 1"),
        (b'{"slotcar_journal": 1, "sha256": ""}\n', "its bytes are not those that were written"),
        (sealed(b"{}\n"), "line 2 does not have what a name has"),
        (sealed(GOOD + b"\n\xff\n"), "line 3 does not have what a name has"),
        (sealed(GOOD.replace(b"true", b"1")), "line 2 has a field of another type"),
        (sealed(GOOD.replace(b'"sql"', b'"../x"')), "line 2: name is '../x'"),
        (sealed(GOOD + b"\n" + GOOD), "it has a name twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_reason_is_for_people(data: bytes, why: str) -> None:
    with pytest.raises(JournalDamaged) as caught:
        decode(data)
    assert str(caught.value).startswith(why)
    assert "Error" not in str(caught.value)


def test_residents_come_first_in_their_order() -> None:
    table = {AdapterName(name): Digest(f"sha256:{number:064x}") for number, name in enumerate("abc")}
    copy = NamesCopy(
        table, dict.fromkeys(table, "/x"), {AdapterName("b")}, {AdapterName("c"): (table[AdapterName("a")],)}
    )
    found = copy.entries((table[AdapterName("c")], table[AdapterName("b")]))
    assert [(str(entry.ref.name), entry.in_slot, entry.keep, len(entry.history)) for entry in found] == [
        ("c", True, False, 1),
        ("b", True, True, 0),
        ("a", False, False, 0),
    ]
