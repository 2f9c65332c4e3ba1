"""A server with a policy, as its address shows it: who is known by nothing, and who may not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import slotcar_client
from slotcar.v1 import adapter_service_pb2
from slotcar_client import NotAllowed, Unauthenticated

from tests.conformance.refusals import refused
from tests.conformance.target import MODEL, PATIENCE_SECONDS, Target
from tests.waiting import eventually

POLICY = """\
apiVersion: slotcar.dev/v1
clients:
  - {{name: engine, uid: [{user}], verbs: [engine, read, LoadAdapter], adapters: ["mine/*"], planes: [stream, ring]}}
"""
LIST = adapter_service_pb2.ListAdaptersRequest()


def put(file: Path, text: str) -> None:
    """As a ConfigMap does: whole, or not at all."""
    new = file.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.rename(file)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("policy") / "policy.yaml"


@pytest.fixture(scope="module")
def closed(start_target: Callable[..., Target], file: Path) -> Target:
    """A server that knows this process by its user, and nobody else."""
    put(file, POLICY.format(user=os.geteuid()))
    return start_target(extra=("--policy", str(file)))


def test_a_call_without_credentials_is_unauthenticated(closed: Target) -> None:
    refusal = refused(closed.adapters.ListAdapters, LIST, timeout=PATIENCE_SECONDS)
    assert (refusal.reason, refusal.metadata["found"]) == ("UNAUTHENTICATED", "no credentials")
    made_up = (("authorization", "Bearer made-up"),)
    refusal = refused(closed.adapters.ListAdapters, LIST, timeout=PATIENCE_SECONDS, metadata=made_up)
    assert refusal.reason == "UNAUTHENTICATED"


def test_a_client_may_what_its_entry_says_and_no_more(closed: Target) -> None:
    with slotcar_client.connect(closed.address) as client:
        assert client.list() == ()
        for denied, call in {
            "verb": lambda: client.end_session("12345678"),
            "adapter": lambda: client.load("theirs/x", "/nowhere"),
        }.items():
            with pytest.raises(NotAllowed) as refusal:
                call()
            assert refusal.value.metadata["client"] == "engine"
            assert denied in refusal.value.metadata
        with client.session("engine", transport="stream") as session:
            assert session.session_id


@pytest.mark.parametrize("plane", ["ring", "stream"])
def test_a_client_that_leaves_the_policy_leaves_the_server(closed: Target, file: Path, plane: str) -> None:
    """Its sessions end, and whoever comes back needs no restart."""
    put(file, POLICY.format(user=os.geteuid()))

    def is_known() -> bool:
        try:
            return bool(client.capacity().slots)
        except Unauthenticated:
            return False

    with slotcar_client.connect(closed.address) as client:
        eventually(is_known)
        with client.session("engine", transport=plane, model_spec=MODEL):
            put(file, POLICY.format(user=os.geteuid() + 1))
            eventually(lambda: not is_known())
        put(file, POLICY.format(user=os.geteuid()))
        eventually(is_known)
        assert client.sessions() == ()


def test_a_policy_that_cannot_be_read_changes_nothing(closed: Target, file: Path) -> None:
    put(file, "apiVersion: slotcar.dev/v1\nclients: [{name: x}]\n")
    assert closed.process is not None
    log = closed.process
    eventually(lambda: "cannot reload" in log.log and "clients[0]" in log.log)
    with slotcar_client.connect(closed.address) as client:
        assert client.capacity().slots
    put(file, POLICY.format(user=os.geteuid()))
