"""Holds, waiting, ranks, uploads and lists of sessions, with a real sidecar."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slotcar_client
import torch
from slotcar_client import BASE, Client, aio
from slotcar_client.config import client_version
from slotcar_client.effects import Effect, Wait
from slotcar_client.engines.transformers import model_spec

from tests.adapters import make_adapter, tiny_llama
from tests.server import SidecarProcess
from tests.waiting import eventually

Q = "model.layers.0.self_attn.q_proj"
SPEC = model_spec(tiny_llama())
X = {Q: torch.ones(2, 64)}
NAMES = ("sql", "chat", "french")
PATIENCE_SECONDS = 30


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        make_adapter(root / name, tiny_llama(), seed=seed, r=4, target_modules=["q_proj", "v_proj"])
    return root


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[SidecarProcess]:
    with SidecarProcess(tmp_path_factory.mktemp("s"), root) as sidecar:
        yield sidecar


@pytest.fixture
def client(sidecar: SidecarProcess, root: Path) -> Iterator[Client]:
    """A client of a sidecar that has sql and chat in its two slots, and french in memory."""
    with slotcar_client.connect(sidecar.target, timeout_seconds=PATIENCE_SECONDS) as client:
        for session in client.sessions():
            client.end_session(session.session)
        with client.session("shape", model_spec=SPEC):
            for adapter in client.list():
                client.unload(adapter.name, force=True)
        for name in NAMES:
            client.load(name, root / name, tier="host" if name == "french" else "device")
        yield client


def test_an_adapter_in_memory_is_mapped_with_load_only(client: Client) -> None:
    assert client.get("french").tier == "host"
    with client.session() as session:
        with pytest.raises(slotcar_client.AdapterNotResident):
            session.set_mapping([("french", 2)])
        mapping = session.set_mapping([("french", 2)], load=True)
        assert client.get("french").tier == "device"
        assert mapping.digests["french"] == client.get("french").digest
        session.forward(X)


def test_a_queued_set_mapping_gets_the_slots_that_another_session_leaves(client: Client) -> None:
    other = client.session("other")
    other.set_mapping([("sql", 1), ("chat", 1)])
    with client.session("queued") as session:
        with pytest.raises(slotcar_client.SlotsExhausted):
            session.set_mapping([("french", 2)], load=True)
        done: list[object] = []
        thread = threading.Thread(
            target=lambda: done.append(session.set_mapping([("french", 2)], load=True, wait_seconds=60.0))
        )
        thread.start()
        eventually(lambda: client.capacity().waiting == 1)
        assert done == []
        other.close()
        thread.join(PATIENCE_SECONDS)
        assert len(done) == 1
        session.forward(X)


def test_close_takes_a_queued_set_mapping_out_of_the_queue(client: Client) -> None:
    with client.session("other") as other:
        other.set_mapping([("sql", 1), ("chat", 1)])
        session, ends = client.session("queued"), list[object]()

        def queue() -> None:
            try:
                session.set_mapping([("french", 2)], load=True, wait_seconds=3600.0)
            except slotcar_client.SlotcarError as error:
                ends.append(error)

        thread = threading.Thread(target=queue)
        thread.start()
        eventually(lambda: client.capacity().waiting == 1)
        session.close()
        thread.join(PATIENCE_SECONDS)
        assert [type(end) for end in ends] == [slotcar_client.SessionClosed]
        eventually(lambda: client.capacity().waiting == 0)


@pytest.mark.parametrize("load", [True, False])
def test_a_stale_mapping_is_made_resident_again_only_if_it_was_set_with_load(
    client: Client, root: Path, load: bool
) -> None:
    with client.session() as session:
        session.set_mapping([("sql", 2)], load=load)
        before = session.forward(X)[Q]
        client.unload("sql", force=True)
        with pytest.raises(slotcar_client.AdapterNotFound):
            session.forward(X)
        client.load("sql", root / "sql", tier="host")
        if load:
            assert torch.equal(session.forward(X)[Q], before)
        else:
            with pytest.raises(slotcar_client.AdapterNotResident):
                session.forward(X)
            assert client.get("sql").tier == "host"


def test_a_hold_keeps_the_bytes_of_a_name_that_is_gone(client: Client) -> None:
    with client.session("engine", reserved_slots=1) as session:
        assert session.reserved_slots == 1
        with session.hold("sql", slot=True, seconds=60.0) as hold:
            assert hold.tier == "device"
            (info,) = next(s for s in client.sessions() if s.client_name == "engine").holds
            assert (info.hold_id, info.ref, info.tier) == (hold.hold_id, hold.ref, "device")
            assert info.left_seconds is not None
            client.unload("sql")
            session.set_mapping([(hold.ref, 2)], load=True)
            session.forward(X)
            session.release_mapping()
        with pytest.raises(slotcar_client.AdapterNotFound):
            session.set_mapping([(hold.ref, 2)], load=True)


def test_a_load_that_is_held(client: Client, root: Path) -> None:
    client.unload("french")
    with client.session("engine") as session, session.load_held("french", root / "french", tier="host") as hold:
        assert (hold.ref, hold.tier) == (f"french@{client.get('french').digest}", "host")
        assert client.capacity().host_bytes_held > 0
    assert client.capacity().host_bytes_held == 0


def test_the_list_of_sessions_says_who_pins_what(client: Client) -> None:
    with client.session("engine", grace_seconds=60.0) as session:
        mapping = session.set_mapping([("sql", 1), (BASE, 1)], mapping_id=9)
        session.forward(X)
        session.fence()
        info = next(s for s in client.sessions() if s.client_name == "engine")
        assert session.session_id.startswith(info.session)
        assert (info.attached, info.ranks, info.forwards_in_flight) == (True, 1, 0)
        (found,) = info.mappings
        assert (found.mapping_id, found.generation, found.refs) == (9, mapping.generation, mapping.entries[:1])
        assert (found.pinned, found.current, len(found.slots)) == (True, True, 1)
        assert client.end_session(info.session)
        assert not client.end_session(info.session)
        session.forward(X)
        assert session.recoveries["SESSION_NOT_FOUND"] == 1


def test_ranks_share_the_mapping_of_their_session(client: Client) -> None:
    with client.session("tp", ranks=2) as session, client.join(session.session_id, 1) as rank:
        with pytest.raises(slotcar_client.RequestInvalid):
            rank.set_mapping([("sql", 2)])
        ref = f"sql@{client.get('sql').digest}"
        first, second = session.set_mapping([(ref, 2)]), rank.set_mapping([(ref, 2)])
        assert first.version == second.version
        assert torch.equal(session.forward(X)[Q], rank.forward(X)[Q])
        info = next(s for s in client.sessions() if s.client_name == "tp")
        assert (info.ranks, info.joined) == (2, (1,))
        rank.close()
        session.forward(X)
        newer, older = client.join(session.session_id, 1), client.join(session.session_id, 1)
        newer.close()
        older.close()
    with pytest.raises(slotcar_client.SessionNotFound):
        client.join(session.session_id, 1)


def test_an_upload_is_the_load_of_the_same_folder(client: Client, root: Path) -> None:
    digest = client.get("french").digest
    client.unload("french")
    report = client.upload("french", root / "french", tier="host")
    assert (report.digest, report.rank, report.adapter.tier) == (digest, 4, "host")
    assert client.upload("french", root / "french").already_resident is False
    assert client.get("french").tier == "device"
    with pytest.raises(slotcar_client.DigestMismatch):
        client.upload("french", root / "sql", digest=digest)
    with pytest.raises(slotcar_client.AdapterConflict):
        client.upload("french", root / "sql")


def test_a_session_says_what_its_server_is(client: Client) -> None:
    with client.session() as session:
        assert session.server.planes == ("stream", "ring", "direct")
        assert session.server.version == client_version()
        assert session.server.max_response_bytes > 0


@pytest.mark.parametrize("other", ["set", "release"])
def test_a_call_that_waits_does_not_undo_what_is_done_to_its_mapping_meanwhile(client: Client, other: str) -> None:
    with client.session("holder") as holder, client.session("engine") as session:
        holder.set_mapping(["sql", "chat"])
        before = session.set_mapping(["sql"], mapping_id=5)
        ended: list[BaseException] = []

        def wait() -> None:
            try:
                session.set_mapping(["sql", "french"], mapping_id=5, load=True, wait_seconds=PATIENCE_SECONDS)
            except slotcar_client.SlotcarError as error:
                ended.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        eventually(lambda: client.capacity().waiting == 1)
        if other == "set":
            session.set_mapping(["chat"], mapping_id=5)
        else:
            session.release_mapping(before)
        thread.join(PATIENCE_SECONDS)
        assert [type(error) for error in ended] == [slotcar_client.MappingReplaced]
        (status,) = [each for each in client.sessions() if each.client_name == "engine"]
        refs = [ref.partition("@")[0] for mapping in status.mappings for ref in mapping.refs]
        assert refs == (["chat"] if other == "set" else [])


def test_a_call_waits_for_a_restart_and_goes_on_by_digest(client: Client, sidecar: SidecarProcess, root: Path) -> None:
    with client.session("engine", model_spec=SPEC, away="wait", away_seconds=120.0) as session:
        session.set_mapping([("sql", 2)])
        before = session.forward(X)[Q]
        hold = session.hold("sql", hold_id=4)
        perform = session._perform

        def start_on_wait(effect: Effect) -> Any:
            if isinstance(effect, Wait):
                session._perform = perform  # type: ignore[method-assign]
                sidecar.start()
                with slotcar_client.connect(sidecar.target) as other, other.session("o", model_spec=SPEC):
                    other.load("sql", root / "sql")
            return perform(effect)

        sidecar.kill()
        session._perform = start_on_wait  # type: ignore[method-assign]
        assert torch.equal(session.forward(X)[Q], before)
        info = next(s for s in client.sessions() if s.client_name == "engine")
        assert [(h.hold_id, h.ref) for h in info.holds] == [(4, hold.ref)]
        assert session.recoveries["HOLD"] == 1


async def test_the_asyncio_face_does_the_same(client: Client, sidecar: SidecarProcess, root: Path) -> None:
    with client.session() as session:
        session.set_mapping([("sql", 2)])
        wanted = session.forward(X)[Q]
    async with aio.connect(sidecar.target, timeout_seconds=PATIENCE_SECONDS) as other, other.session("aio") as engine:
        async with other.events() as events:
            async with await engine.hold("sql"):
                await engine.set_mapping([("sql", 2)])
                assert torch.equal((await engine.forward(X))[Q], wanted)
            assert (await anext(events)).kind == "held"
        assert "aio" in [info.client_name for info in await other.sessions()]
        client.unload("sql", force=True)
        with pytest.raises(slotcar_client.AdapterNotFound):
            await engine.forward(X)
        assert (await other.upload("sql", root / "sql")).digest == (await other.get("sql")).digest
        assert torch.equal((await engine.forward(X))[Q], wanted)
        assert (await other.capacity()).slots == 2
