"""The file of --policy: strict, small, and without secrets in memory."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest
from slotcar_sidecar.core.access import GROUPS, Identity, Proof
from slotcar_sidecar.core.errors import RequestInvalid, SourceUnavailable
from slotcar_sidecar.process.policy import PolicyFile, parse_policy

SOUND = "name: x, uid: [1], verbs: [read], adapters: ['*']"
HEAD = "apiVersion: slotcar.dev/v1\nclients:\n"


def refusal(text: str) -> RequestInvalid:
    with pytest.raises(RequestInvalid) as refused:
        parse_policy(text, "policy.yaml", lambda file: file)
    return refused.value


def test_a_whole_entry(tmp_path: Path) -> None:
    token, file = tmp_path / "token", tmp_path / "policy.yaml"
    token.write_text("a secret of some length\n", encoding="utf-8")
    file.write_text(
        f"{HEAD}  - {{name: x, uid: 1, gid: [2, 3], san: [engine.example, 'spiffe://a/b'], token_file: {token},\n"
        "     verbs: [engine, GetAdapter], adapters: ['a/*', b], planes: [stream, direct],\n"
        "     max_sessions: 2, max_reserved_slots: 3}\n",
        encoding="utf-8",
    )
    source = PolicyFile(file)
    (client,) = source.read().clients
    assert source.files() == (file, token)
    hashed = hashlib.sha256(b"a secret of some length").hexdigest()
    assert client.identities == {
        Identity(Proof.UID, "1"),
        Identity(Proof.GID, "2"),
        Identity(Proof.GID, "3"),
        Identity(Proof.SAN, "engine.example"),
        Identity(Proof.SAN, "spiffe://a/b"),
        Identity(Proof.TOKEN, hashed),
    }
    assert "secret" not in repr(client)
    assert client.verbs == GROUPS["engine"] | {"GetAdapter"}
    assert client.planes == {"stream", "direct"}
    assert (client.max_sessions, client.max_reserved_slots) == (2, 3)


def test_planes_in_shared_memory_are_given_by_name_alone() -> None:
    (client,) = parse_policy(f"{HEAD}  - {{{SOUND}}}\n", "policy.yaml", lambda file: file).clients
    assert client.planes == {"stream"}


@pytest.mark.parametrize(
    ("entry", "field", "found"),
    [
        (SOUND + ", uids: [2]", "clients[0].uids", "line 3"),
        (SOUND + ", name: y", "clients[0].name", "two values"),
        (SOUND.replace("uid: [1], ", ""), "clients[0].uid", "nothing"),
        (SOUND.replace("[1]", "[-1]"), "clients[0].uid", "-1"),
        (SOUND.replace("[1]", "[4294967295]"), "clients[0].uid", "4294967295"),
        (SOUND.replace("verbs: [read], ", ""), "clients[0].verbs", "nothing"),
        (SOUND.replace("[read]", "[write]"), "clients[0].verbs", "write"),
        (SOUND.replace(", adapters: ['*']", ""), "clients[0].adapters", "nothing"),
        (SOUND.replace("'*'", "'../*'"), "clients[0].adapters", "../*"),
        (SOUND.replace("'*'", "'a*b'"), "clients[0].adapters", "a*b"),
        (SOUND + ", planes: [shared]", "clients[0].planes", "shared"),
        (SOUND + ", max_sessions: many", "clients[0].max_sessions", "many"),
        (SOUND + ", token_sha256: [abc]", "clients[0].token_sha256", "abc"),
        (SOUND + ", san: ['a b']", "clients[0].san", "a b"),
        (SOUND.replace("name: x", "name: 'a\\nb'").replace("'a", '"a').replace("b'", 'b"'), "clients[0].name", "a"),
    ],
)
def test_what_is_wrong_is_named(entry: str, field: str, found: str) -> None:
    """To see it fail: pass over what is not known."""
    error = refusal(f"{HEAD}  - {{{entry}}}\n")
    assert error.field == field
    assert found in error.facts["found"]


def test_one_identity_in_two_entries_is_refused() -> None:
    assert refusal(f"{HEAD}  - {{{SOUND}}}\n  - {{{SOUND.replace('x', 'y')}}}\n").field == "clients[1].uid"


@pytest.mark.parametrize("text", ["", "[]", "clients: []", "apiVersion: v2\nclients: []", f"{HEAD}  - &a {{b: *a}}\n"])
def test_what_is_no_policy_is_refused(text: str) -> None:
    assert refusal(text).field in ("the file", "apiVersion")


@pytest.mark.parametrize(("size", "is_sound"), [(1 << 20, False), (100, True)])
def test_a_large_file_is_not_read_further(tmp_path: Path, size: int, is_sound: bool) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(f"{HEAD}  - {{{SOUND}}}\n# {'x' * size}\n", encoding="utf-8")
    if is_sound:
        assert PolicyFile(file).read().clients
    else:
        with pytest.raises(RequestInvalid, match="at most 1048576"):
            PolicyFile(file).read()


@pytest.mark.parametrize("name", [r"/a\0b", r"/\ud800", "token", r"/a\nb"])
def test_what_can_be_no_path_is_refused(tmp_path: Path, name: str) -> None:
    """And nothing is looked at by it afterwards."""
    file = tmp_path / "policy.yaml"
    file.write_text(f'{HEAD}  - {{{SOUND}, token_file: "{name}"}}\n', encoding="utf-8")
    source = PolicyFile(file)
    with pytest.raises(RequestInvalid, match="an absolute path"):
        source.read()
    assert source.files() == (file,)


def test_a_pipe_is_no_file_to_wait_for(tmp_path: Path) -> None:
    file, pipe = tmp_path / "policy.yaml", tmp_path / "pipe"
    os.mkfifo(pipe)
    file.write_text(f"{HEAD}  - {{{SOUND}, token_file: {pipe}}}\n", encoding="utf-8")
    for path in (file, pipe):
        with pytest.raises(SourceUnavailable, match="no regular file"):
            PolicyFile(path).read()


@pytest.mark.parametrize("token", ["short", ""])
def test_a_token_that_can_be_guessed_is_refused(tmp_path: Path, token: str) -> None:
    secret, file = tmp_path / "token", tmp_path / "policy.yaml"
    secret.write_text(token, encoding="utf-8")
    file.write_text(f"{HEAD}  - {{{SOUND}, token_file: {secret}}}\n", encoding="utf-8")
    with pytest.raises(RequestInvalid, match="token_file"):
        PolicyFile(file).read()


def test_the_policy_in_the_documentation_is_one() -> None:
    text = (Path(__file__).parents[3] / "docs/security.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    found = parse_policy(example, "policy.yaml", lambda file: file)
    assert [client.name for client in found.clients] == ["engine", "trainer", "router", "operator"]
    for group, verbs in GROUPS.items():
        (row,) = re.findall(rf"\| `{group}` \| (.*?) \|", text)
        assert set(row.split(", ")) == verbs
