"""The client against a real sidecar: every verb, and recovery from what a real sidecar goes through."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import slotcar_client
import torch
from slotcar_client import BASE, Client
from slotcar_client.engines.transformers import model_spec

from tests.adapters import make_adapter, peft_deltas, tiny_llama
from tests.server import SidecarProcess
from tests.waiting import eventually

Q = "model.layers.0.self_attn.q_proj"
SPEC = model_spec(tiny_llama())
PATIENCE_SECONDS = 30


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "chat", "french")):
        make_adapter(root / name, tiny_llama(), seed=seed, r=4 * (seed + 1), target_modules=["q_proj", "v_proj"])
    return root


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[SidecarProcess]:
    """Its model comes from the first session."""
    with SidecarProcess(tmp_path_factory.mktemp("s"), root) as sidecar:
        yield sidecar


@pytest.fixture
def client(sidecar: SidecarProcess, root: Path) -> Iterator[Client]:
    """A client of a sidecar that has sql and chat in its two slots."""
    if sidecar.process is None or sidecar.process.poll() is not None:
        sidecar.start()
    with slotcar_client.connect(sidecar.target, timeout_seconds=PATIENCE_SECONDS) as client:
        with client.session("shape", model_spec=SPEC):
            for adapter in client.list():
                client.unload(adapter.name, force=True)
        for name in ("sql", "chat"):
            client.load(name, root / name)
        yield client


def test_a_load_is_reported_whole(client: Client, root: Path) -> None:
    client.unload("sql")
    report = client.load("sql", root / "sql")
    assert (report.name, report.rank, report.already_resident) == ("sql", 4, False)
    assert Q in report.sites_matched
    assert {site.scale for site in report.sites} == {2.0}
    assert "model.layers.0.mlp.up_proj" in report.sites_zero
    assert (report.file_dtype, report.slot_dtype, report.warnings) == ("F32", "float32", ())
    assert report.bytes > 0
    again = client.load("sql", str(root / "sql"), digest=report.digest)
    assert again.already_resident
    assert again.digest == report.digest
    assert again.generation >= report.generation
    with pytest.raises(slotcar_client.DigestMismatch):
        client.load("sql", root / "sql", digest="sha256:" + "0" * 64)


def test_a_conflict_is_refused_unless_replaced(client: Client, root: Path) -> None:
    client.unload("chat")
    with pytest.raises(slotcar_client.AdapterConflict):
        client.load("sql", root / "french")
    report = client.load("sql", root / "french", replace=True)
    assert client.get("sql").digest == report.digest
    assert client.get("sql").sites == report.sites_matched


def test_operators_verbs(client: Client, root: Path) -> None:
    assert [adapter.name for adapter in client.list()] == ["chat", "sql"]
    assert client.keep("sql").keep
    assert client.get("sql").keep
    with pytest.raises(slotcar_client.SlotsExhausted):
        client.keep("chat")
    assert not client.release_keep("sql").keep
    estimate = client.estimate(root / "french")
    assert (estimate.fits, estimate.rank, estimate.why_not) == (True, 12, "")
    snapshot = client.snapshot()
    assert {slot.state for slot in snapshot.layout.slots} == {"occupied"}
    assert {adapter.tier for adapter in snapshot.adapters} == {"device"}
    assert {adapter.slot for adapter in snapshot.adapters} == {0, 1}
    report = client.unload("sql")
    assert (report.slot_state, report.pins_ended) == ("free", 0)
    with pytest.raises(slotcar_client.AdapterNotFound):
        client.get("sql")
    with pytest.raises(slotcar_client.SourceDenied):
        client.load("etc", "/etc")


def test_lists_are_paged_through(client: Client, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotcar_client.verbs.PAGE_SIZE", 1)
    names = [f"copy-{index}" for index in range(5)]
    for name in names:
        client.load(name, root / "sql")
    assert [adapter.name for adapter in client.list()] == sorted([*names, "chat", "sql"])


def test_events_can_be_closed_from_outside(client: Client, root: Path) -> None:
    with client.events() as events:
        client.load("french", root / "french")
        kinds = [next(events).kind for _ in range(2)]
        assert kinds == ["evicted", "loaded"]
        threading.Timer(0.2, events.close).start()
        assert list(events) == []
    with client.events(replay=1) as events:
        assert next(events).kind == "loaded"


@pytest.mark.parametrize("transport", ["auto", "direct", "ring", "stream", "unary"])
def test_forward_is_pefts_delta(client: Client, root: Path, transport: str) -> None:
    x, wanted = peft_deltas(root / "sql", tiny_llama())[Q]
    with client.session("engine", model_spec=SPEC, transport=transport) as session:
        assert session.transport == ("direct" if transport == "auto" else transport)
        assert session.server.slots == 2
        assert session.model_spec is not None
        mapping = session.set_mapping([("sql", 3), (BASE, 1)])
        assert client.get("sql").pins == 1
        rows = torch.cat([x, x[:1]])
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
            delta = session.forward({Q: rows.to(dtype)})[Q]
            assert delta.dtype == dtype
            torch.testing.assert_close(delta[:3].float(), wanted, rtol=tolerance, atol=tolerance)
            assert torch.equal(delta[3:], torch.zeros(1, delta.shape[1], dtype=dtype))
        y = torch.randn(4, wanted.shape[1])
        added = session.forward({Q: rows}, base={Q: y})[Q]
        torch.testing.assert_close(added[:3], y[:3] + wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(added[3], y[3])
        assert mapping.digests["sql"] == client.get("sql").digest


def test_a_forced_unload_is_the_callers_error_until_the_digest_is_back(client: Client, root: Path) -> None:
    with client.session("engine") as session:
        session.set_mapping([("sql", 2)])
        before = session.forward({Q: torch.ones(2, 64)})[Q]
        client.unload("sql", force=True)
        with pytest.raises(slotcar_client.AdapterNotFound, match="sql@sha256:"):
            session.forward({Q: torch.ones(2, 64)})
        client.load("sql", root / "sql")
        assert torch.equal(session.forward({Q: torch.ones(2, 64)})[Q], before)
        assert session.recoveries["LAYOUT_STALE"] >= 1


def test_a_replaced_name_keeps_its_old_bytes_for_the_mapping(client: Client, root: Path) -> None:
    client.unload("chat")
    with client.session("engine") as session:
        session.set_mapping([("sql", 2)])
        before = session.forward({Q: torch.ones(2, 64)})[Q]
        client.load("sql", root / "french", replace=True)
        assert torch.equal(session.forward({Q: torch.ones(2, 64)})[Q], before)
        with session.rows([("sql", 2)]) as mapping:
            assert not torch.equal(session.forward({Q: torch.ones(2, 64)}, mapping=mapping)[Q], before)
        assert session.recoveries == {}


def test_a_restart_is_survived_by_digest(client: Client, root: Path, sidecar: SidecarProcess) -> None:
    with client.session("engine", model_spec=SPEC) as session:
        session.set_mapping([("sql", 2), (BASE, 1)])
        before = session.forward({Q: torch.ones(3, 64)})[Q]
        epoch = session.layout.version.epoch
        sidecar.kill()
        with pytest.raises(slotcar_client.Unavailable):
            session.forward({Q: torch.ones(3, 64)})
        with pytest.raises(slotcar_client.Unavailable):
            session.forward({Q: torch.ones(3, 64)})
        sidecar.start()

        def answers() -> bool:
            try:
                session.forward({Q: torch.ones(3, 64)})
            except slotcar_client.Unavailable:
                return False
            except slotcar_client.AdapterNotFound:
                return True
            raise AssertionError("a Forward was answered without the adapter")

        eventually(answers)
        client.load("sql", root / "sql")
        assert torch.equal(session.forward({Q: torch.ones(3, 64)})[Q], before)
        assert session.recoveries["SESSION_NOT_FOUND"]  # one for each try, as gRPC may be away for longer than a ring
        assert session.layout.version.epoch != epoch
        client.load("chat", root / "chat")
        session.set_mapping([("chat", 3)])


def test_a_restart_with_other_bytes_under_the_name_is_refused(
    client: Client, root: Path, sidecar: SidecarProcess
) -> None:
    with client.session("engine", model_spec=SPEC) as session:
        session.set_mapping([("sql", 2)])
        sidecar.kill()
        sidecar.start()
        with slotcar_client.connect(sidecar.target) as other, other.session("o", model_spec=SPEC):
            other.load("sql", root / "french")

        def refused() -> bool:
            try:
                session.forward({Q: torch.ones(2, 64)})
            except slotcar_client.Unavailable:
                return False
            except slotcar_client.AdapterNotFound:
                return True
            raise AssertionError("a Forward was answered with other bytes")

        eventually(refused)
        session.set_mapping([("sql", 2)])
        session.forward({Q: torch.ones(2, 64)})


def test_a_broken_stream_is_resumed_and_keeps_its_pins(client: Client) -> None:
    with client.session("engine") as session:
        session.set_mapping([("sql", 2)])
        session._stream.cancel()
        eventually(lambda: session.recoveries.get("STREAM_ENDED"))
        session.forward({Q: torch.ones(2, 64)})
        assert client.get("sql").pins == 1
        assert session.recoveries == {"STREAM_ENDED": 1}


def test_a_session_without_grace_is_opened_again_by_the_next_call(client: Client) -> None:
    with client.session("engine", grace_seconds=0) as session:
        session.set_mapping([("sql", 2)])
        session._stream.cancel()
        eventually(lambda: client.get("sql").pins == 0)
        session.forward({Q: torch.ones(2, 64)})
        assert client.get("sql").pins == 1
        assert session.recoveries == {"SESSION_NOT_FOUND": 1}


def test_a_closed_session_leaves_no_pin(client: Client) -> None:
    session = client.session("engine")
    session.set_mapping([("sql", 1), ("chat", 1)])
    assert [adapter.pins for adapter in client.list()] == [1, 1]
    session.close()
    assert [adapter.pins for adapter in client.list()] == [0, 0]


def test_another_model_is_refused(client: Client) -> None:
    other = type(SPEC)()
    other.CopyFrom(SPEC)
    other.sites[0].in_features += 1
    with pytest.raises(slotcar_client.ModelMismatch) as caught:
        client.session("engine", model_spec=other)
    assert caught.value.metadata["difference"]
