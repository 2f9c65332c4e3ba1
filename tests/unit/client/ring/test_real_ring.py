"""The ring of a real sidecar: results, what is under way, and what it goes through."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import slotcar_client
import torch
from slotcar_client import BASE, Client, Session
from slotcar_client.engines.transformers import model_spec

from tests.adapters import make_adapter, peft_deltas, tiny_llama
from tests.server import SidecarProcess
from tests.waiting import eventually

Q, V = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"
SPEC = model_spec(tiny_llama())
PATIENCE_SECONDS = 30
X = torch.linspace(-1, 1, 4 * 64).reshape(4, 64)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "chat")):
        make_adapter(root / name, tiny_llama(), seed=seed, r=4 * (seed + 1), target_modules=["q_proj", "v_proj"])
    return root


@pytest.fixture
def sidecar(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[SidecarProcess]:
    with SidecarProcess(tmp_path_factory.mktemp("s"), root) as sidecar:
        load(sidecar, root)
        yield sidecar


@pytest.fixture
def client(sidecar: SidecarProcess) -> Iterator[Client]:
    with slotcar_client.connect(sidecar.target, timeout_seconds=PATIENCE_SECONDS) as client:
        yield client


def load(sidecar: SidecarProcess, root: Path) -> None:
    with slotcar_client.connect(sidecar.target, timeout_seconds=PATIENCE_SECONDS) as client:
        client.session("shape", model_spec=SPEC).close()
        for name in ("sql", "chat"):
            client.load(name, root / name)


def opened(client: Client, **settings: object) -> Session:
    session = client.session("ring", model_spec=SPEC, transport="ring", **settings)  # type: ignore[arg-type]
    session.set_mapping([("sql", 2), (BASE, 1), ("chat", 1)], load=True)
    return session


def test_every_way_to_ask_gives_the_same(client: Client, root: Path) -> None:
    with opened(client) as session, client.session(transport="stream") as stream:
        stream.set_mapping([("sql", 2), (BASE, 1), ("chat", 1)])
        y = torch.randn(4, 64)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = X.to(dtype)
            wanted = stream.forward({Q: x, V: x})
            found = session.forward({Q: x, V: x}), session.forward_async({Q: x, V: x}).result()
            for outputs in found:
                assert all(torch.equal(outputs[site], wanted[site]) for site in (Q, V))
            added = session.forward({Q: x}, base={Q: y.to(dtype)})[Q]
            assert torch.equal(added, stream.forward({Q: x}, base={Q: y.to(dtype)})[Q])
            assert torch.equal(added[2], y.to(dtype)[2])
        assert session.forward({Q: X[:0]}, [0, 0, 0])[Q].shape == (0, wanted[Q].shape[1])
        x, delta = peft_deltas(root / "sql", tiny_llama())[Q]
        torch.testing.assert_close(session.forward({Q: x}, [3, 0, 0])[Q], delta, rtol=1e-5, atol=1e-5)


def test_many_calls_under_way_are_right_and_in_order(client: Client) -> None:
    with opened(client) as session:
        wanted = [session.forward({Q: X * scale})[Q] for scale in range(100)]
        pending = [session.forward_async({Q: X * scale}) for scale in range(100)]
        assert all(torch.equal(one.result()[Q], each) for one, each in zip(pending, wanted, strict=True))


@pytest.mark.parametrize(
    ("counts", "inputs", "error"),
    [
        ([2, 1], {Q: X[:3]}, slotcar_client.ShapeMismatch),
        ([2, 1, 1, 0], {Q: X}, slotcar_client.ShapeMismatch),
        ([2, 1, 1], {Q: X[:, :63]}, slotcar_client.ShapeMismatch),
        ([2, 1, 1], {"nowhere": X}, slotcar_client.SiteUnknown),
    ],
)
def test_refusals_are_those_of_the_stream(
    client: Client, counts: list[int], inputs: dict[str, torch.Tensor], error: type[slotcar_client.SlotcarError]
) -> None:
    with opened(client) as session, client.session(transport="stream") as stream:
        stream.set_mapping(["sql", BASE, "chat"])
        for one in (session, stream):
            with pytest.raises(error):
                one.forward(inputs, counts)
            assert one.forward({Q: X}, [2, 1, 1])


def test_a_forced_unload_is_noticed_and_recovered_from_by_digest(client: Client, root: Path) -> None:
    with opened(client) as session:
        before = session.forward({Q: X})[Q]
        client.unload("sql", force=True)
        pending = session.forward_async({Q: X})
        with pytest.raises(slotcar_client.AdapterNotFound, match="sql@sha256:"):
            pending.result()
        client.load("sql", root / "sql")
        assert torch.equal(session.forward({Q: X})[Q], before)
        assert session.recoveries["LAYOUT_STALE"] >= 1


def test_a_session_that_an_operator_ended_is_opened_anew(client: Client) -> None:
    with opened(client) as session:
        before = session.forward({Q: X})[Q]
        pending = session.forward_async({Q: X})
        assert client.end_session(session.session_id[:8])
        assert torch.equal(pending.result()[Q], before)
        assert torch.equal(session.forward({Q: X})[Q], before)
        assert session.transport == "ring"


def test_a_sidecar_that_is_killed_is_away_at_once_and_then_back(
    client: Client, sidecar: SidecarProcess, root: Path
) -> None:
    hasty, patient = opened(client), opened(client, away="wait")
    before = hasty.forward({Q: X})[Q]
    pending = [hasty.forward_async({Q: X}) for _ in range(3)]
    waiting = patient.forward_async({Q: X})
    sidecar.kill()
    answers = []
    for one in pending:
        try:
            answers.append(one.result()[Q])
        except slotcar_client.Unavailable:
            continue
    assert all(torch.equal(answer, before) for answer in answers)
    with pytest.raises(slotcar_client.Unavailable):
        hasty.forward({Q: X})
    again = threading.Thread(target=lambda: (sidecar.start(), load(sidecar, root)))
    again.start()
    again.join()
    assert torch.equal(waiting.result()[Q], before)
    assert torch.equal(patient.forward({Q: X})[Q], before)
    assert patient.transport == "ring"


def test_a_sidecar_that_is_stopped_is_waited_for(sidecar: SidecarProcess) -> None:
    with slotcar_client.connect(sidecar.target, timeout_seconds=2.0) as client, opened(client) as session:
        before = session.forward({Q: X})[Q]
        failures: list[str] = []

        def answers() -> bool:
            try:
                return torch.equal(session.forward({Q: X})[Q], before)
            except slotcar_client.TransportError as error:
                failures.append(error.reason)
                return False

        sidecar.pause()
        try:
            eventually(lambda: not answers())
        finally:
            assert sidecar.process is not None
            sidecar.process.send_signal(signal.SIGCONT)
        assert failures == ["DEADLINE_EXCEEDED"]
        eventually(answers)


def test_ranks_have_connections_of_their_own(client: Client) -> None:
    digests = {adapter.name: adapter.digest for adapter in client.list()}
    entries = [(f"sql@{digests['sql']}", 4)]
    with (
        client.session("tp", ranks=2, transport="ring") as owner,
        client.join(owner.session_id, 1, transport="ring") as rank,
    ):
        for member in (owner, rank):
            member.set_mapping(entries)
        assert torch.equal(owner.forward({Q: X})[Q], rank.forward({Q: X})[Q])
        (info,) = [info for info in client.sessions() if info.client_name == "tp"]
        assert info.joined == (1,)
