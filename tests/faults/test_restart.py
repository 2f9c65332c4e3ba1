"""A server with a disk tier and a journal is killed, and what it had comes back by itself, in a new epoch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest
import slotcar_client
import torch
from slotcar_client import Client

from tests.faults.gauges import Gauges
from tests.faults.oracle import Library, spec_file
from tests.server import SidecarProcess
from tests.waiting import eventually

SITE, FEATURES = "small", 64
SITES = {SITE: (FEATURES, FEATURES)}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    library = Library(tmp_path_factory.mktemp("adapters"), SITES)
    for seed, name in enumerate("abcdef"):
        library.write(name, seed=seed, sites=[SITE], rank=4)
    return library


@pytest.fixture
def make(tmp_path_factory: pytest.TempPathFactory, library: Library) -> Callable[..., SidecarProcess]:
    """Servers with one disk tier, and a journal each."""
    shared = tmp_path_factory.mktemp("shared")
    spec = str(spec_file(shared, SITES))

    def make(*extra: str, root: Path | None = None) -> SidecarProcess:
        folder = tmp_path_factory.mktemp("s")
        flags = (
            *("--model-spec", spec, "--metrics", "127.0.0.1:0"),
            *("--disk", str(shared / "disk"), "--journal", str(folder / "journal")),
        )
        return SidecarProcess(folder, root or library.root, slots=3, extra=(*flags, *extra))

    return make


@contextmanager
def connected(sidecar: SidecarProcess) -> Iterator[Client]:
    with sidecar, slotcar_client.connect(sidecar.target) as client:
        yield client


def names(client: Client) -> dict[str, tuple[str, str, bool]]:
    return {each.name: (each.digest, each.tier, each.keep) for each in client.list()}


def computes(client: Client, library: Library, name: str) -> None:
    """An engine maps `name`, from whatever tier it comes, and gets its rows."""
    x = torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(3))
    with client.session("check") as session:
        mapping = session.set_mapping([(name, 3)], load=True)
        delta = session.forward({SITE: x})[SITE]
    assert library.wrong_rows(mapping.entry_digests, [3], SITE, x, delta) == []


def journaled_in_slots(sidecar: SidecarProcess) -> set[str]:
    """The names that the journal has in slots."""
    journal = sidecar.folder / "journal"
    lines = journal.read_text(encoding="utf-8").splitlines()[1:] if journal.exists() else []
    return {entry["name"] for entry in map(json.loads, lines) if entry["in_slot"]}


def is_journaled(sidecar: SidecarProcess, *texts: str) -> bool:
    journal = sidecar.folder / "journal"
    return journal.exists() and all(text in journal.read_text(encoding="utf-8") for text in texts)


def test_names_keeps_and_residents_come_back_after_kill_9(
    make: Callable[..., SidecarProcess], library: Library
) -> None:
    """The latest used first, where there is less room than before; what was uploaded too, from the disk tier."""
    sidecar = make()
    with connected(sidecar) as client:
        client.upload("sent", library.root / "a")
        for name in "bcd":
            client.load(name, library.root / name, keep=name == "c")
        client.load("b", library.root / "e", replace=True)
        client.load("waits", library.root / "f", tier="host")
        computes(client, library, "d")
        before, epoch = names(client), client.snapshot().layout.version.epoch
        eventually(lambda: journaled_in_slots(sidecar) == set("bcd"), "the journal")
        sidecar.kill()
    with connected(sidecar.again()) as client:
        eventually(lambda: client.capacity().restoring == 0, "the names")
        eventually(lambda: sum(each.tier == "device" for each in client.list()) == 3, "the residents")
        after = names(client)
        assert {name: each[0] for name, each in after.items()} == {name: each[0] for name, each in before.items()}
        assert {name for name, each in after.items() if each[2]} == {"c"}
        assert {name: each[1] for name, each in after.items()} | {"sent": "", "waits": ""} == {
            **dict.fromkeys("bcd", "device"), "sent": "", "waits": "",
        }  # fmt: skip
        assert client.get("b").history == (library.write("b", seed=1, sites=[SITE]),)
        assert client.snapshot().layout.version.epoch != epoch
        assert client.capacity().restore_failures == ()
        for name in ("sent", "waits", "b", "c", "d"):
            computes(client, library, name)


def test_what_is_on_disk_comes_back_without_its_source(
    make: Callable[..., SidecarProcess], library: Library, tmp_path: Path
) -> None:
    sidecar = make(root=tmp_path)
    folder = library.root / "a"
    (tmp_path / "a").mkdir()
    for file in folder.iterdir():
        (tmp_path / "a" / file.name).write_bytes(file.read_bytes())
    with connected(sidecar) as client:
        client.load("a", tmp_path / "a")
        eventually(lambda: client.capacity().disk_bytes_used, "the entry")
    for file in (tmp_path / "a").iterdir():
        file.unlink()
    with connected(sidecar.again()) as client:
        computes(client, library, "a")
        assert client.capacity().restore_failures == ()


def test_what_cannot_come_back_is_told_of_and_holds_up_nobody(
    make: Callable[..., SidecarProcess], library: Library
) -> None:
    sidecar = make("--disk-bytes", "1")
    with connected(sidecar) as client:
        client.load("good", library.root / "a")
        client.upload("lost", library.root / "b")
        assert client.capacity().disk_bytes_used == 0
        assert Gauges(sidecar).read('slotcar_disk_operations_total{operation="write",result="full"}') >= 1
    with connected(sidecar.again()) as client:
        eventually(lambda: client.capacity().restoring == 0, "the names")
        computes(client, library, "good")
        (failure,) = client.capacity().restore_failures
        assert failure.ref.startswith("lost@sha256:")
        assert "upload it again" in failure.why_not
        assert Gauges(sidecar).read('slotcar_journal_names{state="failed"}') == 1
        with client.events(replay=1000) as events:
            assert any(event.kind == "refused" and event.name == "lost" for event in islice(events, events.replayed))
    with connected(sidecar.again()) as client:
        eventually(lambda: client.capacity().restore_failures, "it is still in the journal")
        client.upload("lost", library.root / "b")
        assert client.capacity().restore_failures == ()


def test_a_damaged_journal_is_set_aside(make: Callable[..., SidecarProcess], library: Library) -> None:
    sidecar = make()
    with connected(sidecar) as client:
        client.load("a", library.root / "a")
    journal = sidecar.folder / "journal"
    data = journal.read_bytes()
    journal.write_bytes(data[:-3])
    with connected(sidecar.again()) as client:
        assert names(client) == {}
        assert journal.with_name("journal.corrupt").read_bytes() == data[:-3]
        assert "the journal is damaged" in sidecar.log
        client.load("a", library.root / "a")


def test_a_journal_that_is_a_folder_is_refused_in_a_sentence(make: Callable[..., SidecarProcess]) -> None:
    sidecar = make()
    folder = sidecar.folder / "journal"
    folder.mkdir()
    with pytest.raises(AssertionError, match=f"--journal {folder} cannot be used: it is a folder, wanted a file"):
        sidecar.start()
    assert folder.is_dir()


def test_two_servers_never_have_one_journal(make: Callable[..., SidecarProcess]) -> None:
    one, other = make(), make()
    with one:
        other.extra = (*other.extra, "--journal", str(one.folder / "journal"))
        with pytest.raises(AssertionError, match="another slotcar has the journal"):
            other.start()


def test_two_servers_share_what_is_on_disk(make: Callable[..., SidecarProcess], library: Library) -> None:
    """An unload in one of them takes nothing from the other, also when that one has it from nowhere else."""
    one, other = make(), make()
    with connected(one) as first, connected(other) as second:
        first.upload("mine", library.root / "a")
        second.upload("yours", library.root / "a")
        first.unload("mine")
        eventually(lambda: is_journaled(other, '"yours"'), "the journal")
        other.kill()
    with connected(other.again()) as second:
        computes(second, library, "yours")


def test_a_disk_that_cannot_be_used_is_refused_or_left_out(
    make: Callable[..., SidecarProcess], library: Library, tmp_path: Path
) -> None:
    writable = tmp_path / "writable"
    writable.mkdir()
    writable.chmod(0o777)
    sidecar = make("--disk", str(writable))
    with pytest.raises(AssertionError, match="others may write there"):
        sidecar.start()
    small = make("--disk", str(tmp_path / "disk"))
    with connected(small) as client:
        # What the disk tier stands on goes away beneath it.
        for name in ("lock", "sha256", "writing", "sidecars"):
            (tmp_path / "disk" / name).rename(tmp_path / name)
        (tmp_path / "disk").rmdir()
        client.load("a", library.root / "a")
        computes(client, library, "a")
