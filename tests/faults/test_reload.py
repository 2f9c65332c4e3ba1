"""SIGHUP, and files that change, on a real server that works: nothing is lost, whatever the files say."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self

import pytest
import slotcar_client
import torch
from slotcar_client import Client, SlotcarError

from tests.faults.gauges import Gauges
from tests.faults.oracle import Library, spec_file
from tests.server import START_SECONDS, SidecarProcess
from tests.waiting import PATIENCE_SECONDS, eventually

SITE, FEATURES = "small", 64
SITES = {SITE: (FEATURES, FEATURES)}
SIGNALS = 100
A = "a"
SET = "apiVersion: slotcar.dev/v1\nadapters:\n- {{name: a, source: {source}, state: keep}}\n"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    library = Library(tmp_path_factory.mktemp("adapters"), SITES)
    library.write(A, seed=1, sites=[SITE])
    return library


@pytest.fixture
def level(tmp_path: Path) -> Path:
    """The file of the log's level, in a folder of its own."""
    (tmp_path / "level").mkdir()
    file = tmp_path / "level" / "level"
    file.write_text("info\n")
    return file


@pytest.fixture
def declared(tmp_path: Path, library: Library) -> Path:
    """A declared set that keeps A, in a folder of its own."""
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "elsewhere" / "adapters.yaml"
    file.write_text(SET.format(source=library.root / A))
    return file


@pytest.fixture
def sidecar(
    start_sidecar: Callable[..., SidecarProcess], library: Library, level: Path, declared: Path, tmp_path: Path
) -> SidecarProcess:
    link = tmp_path / "adapters.yaml"
    link.symlink_to(declared)
    extra = (
        *("--model-spec", str(spec_file(tmp_path, SITES)), "--metrics", "127.0.0.1:0"),
        *("--adapters", str(link), "--adapters-poll-seconds", "3600", "--log-level-file", str(level)),
    )
    sidecar = start_sidecar(library.root, extra=extra)
    with slotcar_client.connect(sidecar.target) as client:
        eventually(lambda: client.desired().adapters and client.desired().adapters[0].state == "ready", "the set")
    return sidecar


def send(sidecar: SidecarProcess, number: int = signal.SIGHUP) -> None:
    assert sidecar.process is not None
    sidecar.process.send_signal(number)


class Work:
    """Threads that compute and operate without end; `wrong` has rows and calls that went wrong."""

    def __init__(self, sidecar: SidecarProcess, library: Library, transport: str) -> None:
        self._target = sidecar.target
        self._library = library
        self._transport = transport
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._guard, args=(w,)) for w in (self._compute, self._operate)]
        self.counts = [0, 0]
        self.wrong: list[object] = []

    def has_gone_on(self, since: Sequence[int]) -> bool:
        """Both kinds of calls were answered since then, or one went wrong."""
        return bool(self.wrong) or all(now > then for now, then in zip(self.counts, since, strict=True))

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)

    def _guard(self, work: Callable[[Client], None]) -> None:
        try:
            with slotcar_client.connect(self._target) as client:
                work(client)
        except SlotcarError as error:
            self.wrong.append(error)

    def _compute(self, client: Client) -> None:
        x = torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(1))
        with client.session("busy", transport=self._transport) as session:
            mapping = session.set_mapping([(A, 3)])
            while not self._done.is_set():
                found = session.forward({SITE: x})[SITE]
                self.wrong += self._library.wrong_rows(mapping.entry_digests, [3], SITE, x, found)
                self.counts[0] += 1

    def _operate(self, client: Client) -> None:
        while not self._done.is_set():
            client.capacity()
            self.counts[1] += 1


@pytest.mark.parametrize("transport", ["ring", "stream"])
def test_a_hundred_signals_under_load_lose_no_call(sidecar: SidecarProcess, library: Library, transport: str) -> None:
    """Each row is right, and each call of an operator is answered."""
    with Work(sidecar, library, transport) as work:
        for _ in range(SIGNALS):
            before = tuple(work.counts)
            send(sidecar)
            eventually(partial(work.has_gone_on, before), "an answer")
    assert work.wrong == []
    gauges = Gauges(sidecar)
    for what in ("log level", "declared set"):
        assert gauges.read(f'slotcar_reloads_total{{result="applied",what="{what}"}}') >= 1
        assert gauges.read(f'slotcar_reloads_total{{result="failed",what="{what}"}}') == 0


def test_a_level_that_is_none_leaves_the_one_before(sidecar: SidecarProcess, level: Path) -> None:
    """The gauge shows it until the file is mended; no signal is needed for either."""
    gauges = Gauges(sidecar)
    failing = 'slotcar_reload_failing{what="log level"}'
    with slotcar_client.connect(sidecar.target) as client:
        assert (client.settings().log_level, gauges.read(failing)) == ("info", 0)
        save(level, "loud")
        eventually(lambda: gauges.read(failing) == 1, "the failure")
        assert client.settings().log_level == "info"
        save(level, "debug")
        eventually(lambda: gauges.read(failing) == 0, "the mend")
        assert client.settings().log_level == "debug"
    lines = [line for line in sidecar.log.splitlines() if "cannot reload" in line]
    assert len(lines) == 1
    assert "loud" in lines[0]


def test_a_signal_makes_the_server_look_at_the_declared_set(sidecar: SidecarProcess, declared: Path) -> None:
    """The file is a link to another folder, of which no notice comes."""
    with slotcar_client.connect(sidecar.target) as client:
        assert [adapter.name for adapter in client.list()] == [A]
        save(declared, "apiVersion: slotcar.dev/v1\nadapters:\n- {name: a, state: absent}\n")
        send(sidecar)
        eventually(lambda: client.list() == (), "the absence")


def test_a_signal_while_the_server_shuts_down_is_nothing(sidecar: SidecarProcess) -> None:
    assert sidecar.process is not None
    with slotcar_client.connect(sidecar.target) as client, client.session("idle"):
        send(sidecar, signal.SIGTERM)
        while sidecar.process.poll() is None:
            with suppress(ProcessLookupError):
                send(sidecar)
            with suppress(subprocess.TimeoutExpired):
                sidecar.process.wait(0.02)
    assert sidecar.process.wait(PATIENCE_SECONDS) == 0, sidecar.log
    assert "Traceback" not in sidecar.log


def test_a_signal_during_the_start_is_nothing(tmp_path: Path) -> None:
    """From the moment on in which the command has its flags."""
    sidecar = SidecarProcess(tmp_path, tmp_path)
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(sidecar.command(), stdout=log, stderr=log) as process:
        status = Path(f"/proc/{process.pid}/status")
        try:
            eventually(lambda: _is_harmless(status), "SIGHUP is not the end", START_SECONDS)
            while " serving " not in sidecar.log:
                assert process.poll() is None, sidecar.log
                process.send_signal(signal.SIGHUP)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.02)
            process.terminate()
            assert process.wait(PATIENCE_SECONDS) == 0, sidecar.log
        finally:
            process.kill()
    assert "Traceback" not in sidecar.log


def _is_harmless(status: Path) -> bool:
    """Whether SIGHUP is ignored or caught."""
    lines = dict(line.split(":", 1) for line in status.read_text(encoding="ascii").splitlines())
    return any(int(lines[name], 16) >> (signal.SIGHUP - 1) & 1 for name in ("SigIgn", "SigCgt"))


def save(file: Path, content: str) -> None:
    """As a careful editor does."""
    beside = file.with_suffix(".new")
    beside.write_text(content)
    beside.replace(file)
