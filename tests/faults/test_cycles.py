"""Adapters come and go without end: memory, descriptors, the disk and the metrics' series stay as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import slotcar_client
import torch
from slotcar_client import Client

from tests.faults.gauges import Gauges, descriptors, rss_bytes
from tests.faults.oracle import Library, spec_file
from tests.server import SidecarProcess
from tests.waiting import StandsStill, eventually

SITE, FEATURES = "small", 256
SITES = {SITE: (FEATURES, FEATURES)}
NAMES = "abcd"
DISK_BYTES = 1 << 20
# Allocators and caches settle in the first cycles; what grows with each would be far above this in the rest.
RSS_SLACK_BYTES = 24 << 20


class Footprint(NamedTuple):
    """What of a server must not grow."""

    descriptors: Counter[str]
    disk_files: int
    series: int
    names: float
    pins: float


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    library = Library(tmp_path_factory.mktemp("adapters"), SITES)
    for seed, name in enumerate(NAMES):
        library.write(name, seed=seed, sites=[SITE], rank=8)
    return library


@pytest.fixture
def sidecar(tmp_path_factory: pytest.TempPathFactory, library: Library) -> Iterator[SidecarProcess]:
    folder = tmp_path_factory.mktemp("s")
    extra = (
        *("--model-spec", str(spec_file(folder, SITES)), "--metrics", "127.0.0.1:0"),
        *("--disk", str(folder / "disk"), "--disk-bytes", str(DISK_BYTES), "--journal", str(folder / "journal")),
    )
    with SidecarProcess(folder, library.root, slots=3, extra=extra) as sidecar:
        yield sidecar


def leaves_nothing(sidecar: SidecarProcess, before: Footprint) -> None:
    """Returns when the footprint is what it was before; fails at the deadline, and shows both."""
    with suppress(AssertionError):
        eventually(lambda: footprint(sidecar) == before)
    assert footprint(sidecar) == before


def footprint(sidecar: SidecarProcess) -> Footprint:
    gauges, disk = Gauges(sidecar), sidecar.folder / "disk"
    # The connection of a scrape ends after its answer.
    eventually(StandsStill(lambda: descriptors(sidecar).total(), looks=20), "the end of connections")
    opened = descriptors(sidecar)
    text = gauges.text()
    return Footprint(
        opened,
        sum(1 for path in disk.rglob("*") if path.is_file()),
        sum(not line.startswith("#") for line in text.splitlines()),
        gauges.read("slotcar_adapters"),
        gauges.read('slotcar_pins{owner="mapping"}'),
    )


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def cycle(client: Client, library: Library, number: int) -> None:
    """Two names are loaded, one of them is replaced, and both go."""
    one, other, third = (NAMES[(number + offset) % len(NAMES)] for offset in range(3))
    client.load("first", library.root / one)
    client.load("second", library.root / other)
    client.load("first", library.root / third, replace=True)
    client.unload("second")
    client.unload("first")


def churn(sidecar: SidecarProcess, library: Library, cycles: int) -> None:
    with slotcar_client.connect(sidecar.target) as client:
        for number in range(max(10, cycles // 5)):
            cycle(client, library, number)
        eventually(lambda: client.capacity().disk_bytes_used == 0, "the removal of every entry")
        before, rss = footprint(sidecar), rss_bytes(sidecar)
        for number in range(cycles):
            cycle(client, library, number)
        eventually(lambda: client.capacity().disk_bytes_used == 0, "the removal of every entry")
        leaves_nothing(sidecar, before)
        assert rss_bytes(sidecar) < rss + RSS_SLACK_BYTES
        assert disk_bytes(sidecar.folder / "disk") <= DISK_BYTES


def train(sidecar: SidecarProcess, library: Library, steps: int, scratch: Path) -> None:
    """Each step streams a new version of one name, while a request of the step before finishes on its own version."""
    x = torch.randn(2, FEATURES, generator=torch.Generator().manual_seed(3))
    versions = Library(scratch, SITES)
    before: Footprint | None = None
    rss = 0
    with (
        slotcar_client.connect(sidecar.target) as client,
        client.session("even") as even,
        client.session("odd") as odd,
    ):
        for step in range(steps):
            digest = versions.write("version", seed=1000 + step, sites=[SITE], rank=8)
            assert client.upload("policy", scratch / "version", replace=step > 0).adapter.digest == digest
            session = (even, odd)[step % 2]
            mapping = session.set_mapping([("policy", 2)], load=True)
            assert mapping.entry_digests == (digest,)
            for each in (even, odd)[: step + 1]:
                delta = each.forward({SITE: x})[SITE]
                assert versions.wrong_rows(each.mapping.entry_digests, [2], SITE, x, delta) == []
            assert len(versions.parts) == step + 1
            if step == steps // 3:
                before, rss = footprint(sidecar), rss_bytes(sidecar)
        assert before is not None
        leaves_nothing(sidecar, before)
        assert rss_bytes(sidecar) < rss + RSS_SLACK_BYTES
        assert disk_bytes(sidecar.folder / "disk") <= DISK_BYTES
        assert len(client.get("policy").history) == min(16, steps - 1)


def test_fifty_cycles_leave_nothing(sidecar: SidecarProcess, library: Library) -> None:
    churn(sidecar, library, 50)


def test_a_trainer_of_sixty_steps_leaves_nothing(sidecar: SidecarProcess, library: Library, tmp_path: Path) -> None:
    train(sidecar, library, 60, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_thousand_cycles_leave_nothing(sidecar: SidecarProcess, library: Library) -> None:
    churn(sidecar, library, 1000)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_trainer_of_an_hour_leaves_nothing(sidecar: SidecarProcess, library: Library, tmp_path: Path) -> None:
    """A step a second."""
    train(sidecar, library, 3600, tmp_path)
