"""What a file's text declares: strict as a whole, and lenient towards the others of a bad entry."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcar_sidecar.core.desired import DesiredSet, Malformed, Want, Wanted
from slotcar_sidecar.core.errors import RequestInvalid, SlotcarError, SourceUnavailable
from slotcar_sidecar.core.ids import AdapterName, Digest
from slotcar_sidecar.sync import declaration, file
from slotcar_sidecar.sync.declaration import MAX_ENTRIES

HEAD = "apiVersion: slotcar.dev/v1\n"
DIGEST = "sha256:" + "a" * 64
FILE = "/etc/slotcar/adapters.yaml"


def declared(text: str) -> DesiredSet:
    return declaration.declared(text, FILE)


def text(*entries: str, head: str = HEAD) -> str:
    return head + "adapters:" + "".join(f"\n- {entry}" for entry in entries) + ("\n" if entries else " []\n")


def test_entries_take_the_default_and_may_differ_from_it() -> None:
    head = HEAD + "prune: true\ndefault: {state: keep}\n"
    found = declared(
        text(
            f"{{name: sql, source: /a/sql, digest: '{DIGEST}'}}",
            "{name: chat, source: 's3://bucket/chat', state: present, tier: device}",
            "{name: far, source: /a/far, state: present, tier: disk}",
            "{name: old, source: /a/old, state: absent}",
            "{name: plain, source: /a/plain, state: present, digest: ''}",
            head=head,
        )
    )
    assert found.wants == (
        Want(AdapterName("sql"), Wanted.KEEP, "/a/sql", Digest(DIGEST), in_slot=True),
        Want(AdapterName("chat"), Wanted.PRESENT, "s3://bucket/chat", in_slot=True),
        Want(AdapterName("far"), Wanted.PRESENT, "/a/far", on_disk=True),
        Want(AdapterName("old"), Wanted.ABSENT),
        Want(AdapterName("plain"), Wanted.PRESENT, "/a/plain"),
    )
    assert found.prune
    assert found.malformed == ()


def test_a_name_is_what_is_written() -> None:
    names = ["on", "1e5", "0123", "null", "2026-01-01"]
    found = declared(text(*(f"{{name: {name}, source: /a}}" for name in names)))
    assert [str(want.name) for want in found.wants] == names


BAD_ENTRIES = [
    ("{source: /a}", "adapters[1].name"),
    ("{name: ../x, source: /a}", "adapters[1].name"),
    ("{name: [x], source: /a}", "adapters[1].name"),
    ("{name: x}", "adapters[1].source"),
    ("{name: x, source: {a: b}}", "adapters[1].source"),
    ("{name: x, source: /a, digest: sha256:1}", "adapters[1].digest"),
    ("{name: x, source: /a, state: here}", "adapters[1].state"),
    ("{name: x, source: /a, tier: moon}", "adapters[1].tier"),
    ("{name: x, source: /a, state: keep, tier: host}", "adapters[1].tier"),
    ("{name: x, source: /a, colour: red}", "adapters[1].colour"),
    ("{name: x, source: /a, source: /b}", "adapters[1].source"),
    ("just text", "adapters[1]"),
    ("[a]", "adapters[1]"),
]


@pytest.mark.parametrize(("entry", "field"), BAD_ENTRIES)
def test_a_malformed_entry_is_its_own_matter(entry: str, field: str) -> None:
    found = declared(text("{name: a, source: /a}", entry, "{name: b, source: /b}"))
    assert [str(want.name) for want in found.wants] == ["a", "b"]
    (broken,) = found.malformed
    assert broken.place == "adapters[1]"
    assert broken.cause.reason == "REQUEST_INVALID"
    assert broken.cause.message.startswith(f"{field} is ")


def test_a_name_in_two_entries_is_in_none() -> None:
    found = declared(text("{name: a, source: /a}", "{name: b, source: /b}", "{name: a, source: /c}"))
    assert [str(want.name) for want in found.wants] == ["b"]
    assert [(each.place, each.name) for each in found.malformed] == [("adapters[0]", "a"), ("adapters[2]", "a")]


BAD_TEXTS = {
    "nothing": "",
    "only a comment": "# adapters\n",
    "no version": "adapters: []\n",
    "another version": "apiVersion: slotcar.dev/v2\nadapters: []\n",
    "no list": HEAD,
    "an empty list value": HEAD + "adapters:\n",
    "an unknown key": HEAD + "adapters: []\nadaptors: []\n",
    "a key twice": HEAD + "adapters: []\nadapters: [{name: a, source: /a}]\n",
    "two documents": text() + "---\n" + text(),
    "cut in a flow": HEAD + "adapters: [{name: a",
    "a tab": HEAD + "adapters:\n\t- name: a\n",
    "an alias": HEAD + "default: &x {state: keep}\nadapters: [*x]\n",
    "a tag": HEAD + "adapters: !!python/object/apply:os.system [ls]\n",
    "a tagged scalar": HEAD + "prune: !!bool true\nadapters: []\n",
    "a default that is none": HEAD + "default: {tier: moon}\nadapters: []\n",
    "prune that is neither": HEAD + "prune: maybe\nadapters: []\n",
    "a list at the top": "- a\n",
    "deep nesting": HEAD + "adapters: " + "[" * 100_000,
    "deep nesting of mappings": HEAD + "adapters: " + "{a: " * 50_000,
    "a key that is a list": HEAD + "? [a]\n: b\nadapters: []\n",
    "a control character": HEAD + "adapters: [\x00]\n",
    "too many": text(*(f"n{number}" for number in range(MAX_ENTRIES + 1))),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_a_bad_text_declares_nothing(name: str) -> None:
    with pytest.raises(RequestInvalid):
        declared(BAD_TEXTS[name])


@pytest.mark.parametrize("name", ["cut in a flow", "a tab", "two documents", "a control character"])
def test_a_text_that_is_no_yaml_is_refused_with_the_name_of_its_file(name: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        declared(BAD_TEXTS[name])
    assert f'in "{FILE}", ' in caught.value.facts["found"]
    assert "<unicode string>" not in str(caught.value)


def test_a_bomb_of_aliases_is_refused_at_the_first() -> None:
    levels = [f"a{level}: &a{level} [*a{level - 1}, *a{level - 1}]" for level in range(1, 30)]
    with pytest.raises(RequestInvalid, match="alias"):
        declared("a0: &a0 [x]\n" + "\n".join(levels))


def test_a_number_of_a_million_digits_is_a_text() -> None:
    found = declared(text("{name: x, source: /a, digest: " + "1:" * 200_000 + "1}"))
    assert isinstance(found.malformed[0], Malformed)
    assert len(found.malformed[0].cause.message) < 1000


@given(st.text(alphabet="apiVersion: slotcr.dev/1\n-[]{}&*!|>'\"%@`#?,~tue", max_size=200))
def test_no_text_does_more_than_be_refused(noise: str) -> None:
    for source in (noise, HEAD + noise, text(noise)):
        with contextlib.suppress(RequestInvalid):
            declared(source)


# The file


def test_a_file_is_read_with_the_digest_of_its_text(tmp_path: Path) -> None:
    path = tmp_path / "adapters.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + text("{name: a, source: /a}").encode())
    first = file.read(path)
    assert first.version.startswith("sha256:")
    assert [str(want.name) for want in first.desired.wants] == ["a"]
    path.write_text(text("{name: b, source: /a}"))
    assert file.read(path).version != first.version


def unreadable(path: Path) -> None:
    path.write_bytes(text().encode("utf-16"))


def huge(path: Path) -> None:
    path.write_bytes(b"#" * (file.MAX_FILE_BYTES + 1))


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda path: None, SourceUnavailable),
        (lambda path: path.mkdir(), SourceUnavailable),
        (os.mkfifo, SourceUnavailable),
        (lambda path: path.symlink_to(path), SourceUnavailable),
        (lambda path: path.symlink_to("/dev/zero"), SourceUnavailable),
        (unreadable, RequestInvalid),
        (huge, RequestInvalid),
    ],
    ids=["missing", "folder", "pipe", "circle", "device", "utf-16", "huge"],
)
def test_what_is_no_file_is_refused(make: object, wanted: type[SlotcarError], tmp_path: Path) -> None:
    path = tmp_path / "adapters.yaml"
    make(path)  # type: ignore[operator]
    with pytest.raises(wanted):
        file.read(path)


def test_the_identity_follows_links(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    path = tmp_path / "adapters.yaml"
    assert file.identity(path) is None
    path.symlink_to("one")
    first = file.identity(path)
    assert first is not None
    assert file.identity(path) == first
    path.unlink()
    path.symlink_to("two")
    assert file.identity(path) != first
