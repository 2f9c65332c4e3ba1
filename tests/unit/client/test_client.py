"""The adapter service's calls as values, and an upload's two files as one call."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import slotcar_client
from slotcar.v1 import adapter_pb2, adapter_service_pb2
from slotcar_client import Client, HoldInfo, MappingInfo, RequestInvalid, SourceUnavailable
from slotcar_client.upload import CHUNK_BYTES, CONFIG_FILE, WEIGHTS_FILE, Upload

from tests.unit.client.fake_adapters import CAPACITY, FakeAdapters
from tests.unit.client.fake_engine import A, FakeEngine, FakeServer

CONFIG = b'{"r": 4}'
WEIGHTS = bytes(range(256)) * 8192 + b"end"


@pytest.fixture
def adapters() -> FakeAdapters:
    return FakeAdapters()


@pytest.fixture
def client(tmp_path: Path, adapters: FakeAdapters) -> Iterator[Client]:
    engine = FakeEngine(sql=A)
    with (
        FakeServer(tmp_path, engine, adapters) as server,
        slotcar_client.connect(server.target, timeout_seconds=20) as client,
    ):
        yield client


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "sql"
    folder.mkdir()
    (folder / CONFIG_FILE).write_bytes(CONFIG)
    (folder / WEIGHTS_FILE).write_bytes(WEIGHTS)
    return folder


def test_sessions_are_paged_through(client: Client, adapters: FakeAdapters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotcar_client.verbs.PAGE_SIZE", 1)
    engine, *others = client.sessions()
    assert len(adapters.calls) == 3
    assert (engine.session, engine.client_name, engine.attached) == ("aaaaaaaa", "engine", True)
    assert (engine.ranks, engine.joined, engine.reserved_slots, engine.forwards_in_flight) == (2, (0, 1), 1, 3)
    assert engine.grace_left_seconds is None
    assert engine.mappings == (MappingInfo(1, 4, (f"sql@{A}",), (2,), True, True, 1.5),)
    assert engine.holds == (HoldInfo(7, f"sql@{A}", "device", 1.5), HoldInfo(8, f"sql@{A}", "host", None))
    assert [(other.session, other.grace_left_seconds) for other in others] == [("bbbbbbbb", 1.5), ("cccccccc", 1.5)]
    assert client.end_session("aaaaaaaa")
    assert not client.end_session("zzzzzzzz")


def test_capacity_has_every_number(client: Client) -> None:
    capacity = client.capacity()
    assert {name: getattr(capacity, name) for name in CAPACITY} == CAPACITY
    assert set(CAPACITY) == {field.name for field in adapter_service_pb2.GetCapacityResponse.DESCRIPTOR.fields} - {
        "layout",
        "restore_failures",
    }
    (failure,) = capacity.restore_failures
    assert (failure.ref, failure.why_not) == (f"old@{A}", "SOURCE_UNAVAILABLE: gone")
    assert capacity.version.generation == 5


def test_a_load_says_where_the_adapter_is_wanted(client: Client, adapters: FakeAdapters) -> None:
    client.load("sql", "/a")
    client.load("sql", "/a", tier="host", digest=A, replace=True)
    client.load("sql", "/a", tier="disk")
    first, second, third = adapters.calls
    assert third.target_tier == adapter_pb2.TIER_DISK
    assert (first.target_tier, first.ref, first.HasField("hold")) == (adapter_pb2.TIER_DEVICE, "sql", False)
    assert (second.target_tier, second.ref) == (adapter_pb2.TIER_HOST, f"sql@{A}")
    with pytest.raises(RequestInvalid):
        client.load("sql", "/a", tier="tape")


def test_a_load_and_its_hold_are_one_step(client: Client, adapters: FakeAdapters) -> None:
    with client.session() as session, session.load_held("sql", "/a", seconds=9.0) as hold:
        (request,) = adapters.calls
        assert (request.hold.session, request.hold.hold_id) == (session.session_id, hold.hold_id)
        assert (request.hold.duration.seconds, request.hold.tier) == (9, adapter_pb2.TIER_HOST)
        assert (hold.ref, hold.digest, hold.tier) == (f"sql@{A}", A, "host")


def test_events_of_holds_and_expiry_have_names(client: Client) -> None:
    with client.events() as events:
        assert [next(events).kind for _ in range(3)] == ["held", "hold_released", "expired"]


def test_an_upload_sends_its_header_and_both_files_whole(client: Client, adapters: FakeAdapters, folder: Path) -> None:
    report = client.upload("sql", folder, replace=True, keep=True, digest=A, tier="host")
    assert (report.name, report.digest, report.rank, report.bytes) == ("sql", A, 4, len(WEIGHTS))
    assert report.warnings == ("w",)
    header, *parts = adapters.parts
    assert header.header == adapter_service_pb2.UploadHeader(
        ref=f"sql@{A}",
        on_conflict=adapter_service_pb2.ON_CONFLICT_REPLACE,
        keep=True,
        target_tier=adapter_pb2.TIER_HOST,
        config_bytes=len(CONFIG),
        weights_bytes=len(WEIGHTS),
    )
    assert b"".join(part.config for part in parts) == CONFIG
    assert b"".join(part.weights for part in parts) == WEIGHTS
    assert [len(part.weights) for part in parts[1:]] == [CHUNK_BYTES, CHUNK_BYTES, 3]


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
@pytest.mark.parametrize("kind", ["absent", "link", "folder", "pipe"])
def test_only_regular_files_are_uploaded(
    client: Client, adapters: FakeAdapters, folder: Path, name: str, kind: str
) -> None:
    path = folder / name
    path.rename(folder / "elsewhere")
    if kind == "link":
        path.symlink_to(folder / "elsewhere")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(RequestInvalid, match=name) as caught:
        client.upload("sql", folder)
    assert caught.value.metadata["file"] == str(path)
    assert adapters.parts == []


def change(path: Path, how: str) -> None:
    if how == "grown":
        with path.open("ab") as file:
            file.write(b"more")
    elif how == "cut":
        os.truncate(path, CHUNK_BYTES + 1)
    else:
        path.write_bytes(bytes(len(WEIGHTS)))
        os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("how", ["grown", "cut", "rewritten"])
def test_a_file_that_changes_is_not_sent_to_its_end(folder: Path, how: str) -> None:
    with Upload(folder, adapter_service_pb2.UploadHeader()) as upload:
        requests = upload.requests()
        parts = [next(requests) for _ in range(3)]
        assert parts[0].header.weights_bytes == len(WEIGHTS)
        change(folder / WEIGHTS_FILE, how)
        rest = list(requests)
        sent = sum(len(part.weights) for part in (*parts, *rest))
        assert sent < len(WEIGHTS)
        assert isinstance(upload.failure, SourceUnavailable)
        assert upload.failure.metadata["file"] == str(folder / WEIGHTS_FILE)


def test_a_file_that_changes_is_the_callers_error_and_has_no_effect(
    client: Client, adapters: FakeAdapters, folder: Path
) -> None:
    """Enough chunks that the last of them cannot have left before the server took the first."""
    path = folder / WEIGHTS_FILE
    with path.open("ab") as file:
        file.truncate(64 << 20)
    adapters.on_part.clear()

    def cut() -> None:
        adapters.first_part.wait(20)
        os.truncate(path, 1)
        adapters.on_part.set()

    thread = threading.Thread(target=cut)
    thread.start()
    with pytest.raises(SourceUnavailable, match="changes while it is sent"):
        client.upload("sql", folder)
    thread.join()


def test_a_closed_client_uploads_nothing(client: Client, folder: Path) -> None:
    client.close()
    with pytest.raises(slotcar_client.ClientClosed):
        client.upload("sql", folder)


def test_every_public_name_is_there_once_and_sorted() -> None:
    names = slotcar_client.__all__
    assert len(set(names)) == len(names)
    assert all(hasattr(slotcar_client, name) for name in names)
    errors = {
        name
        for name, value in vars(slotcar_client.errors).items()
        if isinstance(value, type) and issubclass(value, slotcar_client.SlotcarError)
    }
    assert errors <= set(names)
