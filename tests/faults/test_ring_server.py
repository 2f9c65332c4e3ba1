"""A real server's rings: clients that are killed, paused or hostile, its own death, and nothing that is left of any."""

from __future__ import annotations

import signal
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import slotcar_client
import torch
from slotcar.shm import region
from slotcar.shm.handshake import SUFFIX
from slotcar.v1 import engine_service_pb2 as pb
from slotcar.v1 import plane_pb2

from tests.faults.gauges import Gauges, descriptors
from tests.faults.oracle import Library, spec_file
from tests.faults.raw import RawEngine
from tests.faults.ring_child import ROWS, RingChild, RingEngine, ring_engine
from tests.server import SidecarProcess
from tests.unit.ring.raw import RawClient, Refused, hello
from tests.waiting import PATIENCE_SECONDS, StandsStill, eventually

SITE, FEATURES = "site", 64
SITES = {SITE: (FEATURES, FEATURES)}
A = "a"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    library = Library(tmp_path_factory.mktemp("adapters"), SITES)
    library.write(A, seed=1, sites=[SITE])
    return library


def serve(folder: Path, library: Library, *extra: str) -> SidecarProcess:
    flags = ("--model-spec", str(spec_file(folder, SITES)), "--metrics", "127.0.0.1:0", *extra)
    sidecar = SidecarProcess(folder, library.root, extra=flags).start()
    load(sidecar, library)
    return sidecar


def load(sidecar: SidecarProcess, library: Library) -> None:
    with slotcar_client.connect(sidecar.target) as client:
        client.load(A, library.root / A)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, library: Library) -> Iterator[SidecarProcess]:
    with serve(tmp_path_factory.mktemp("s"), library) as sidecar:
        yield sidecar
        assert sidecar.stop() == 0
        assert "fault" not in sidecar.log
        assert not Path(sidecar.target.removeprefix("unix://") + SUFFIX).exists()


@pytest.fixture
def quiet(served: SidecarProcess) -> Iterator[SidecarProcess]:
    """Whatever a test does, the server has no more descriptors and sessions after it than before."""
    gauges, before = Gauges(served), settled(served)
    yield served
    eventually(lambda: gauges.read("slotcar_sessions") == 0, "the end of all sessions")
    eventually(lambda: descriptors(served) <= before, "the end of their descriptors")


def settled(sidecar: SidecarProcess) -> Counter[str]:
    """What is open when nothing changes."""
    eventually(StandsStill(lambda: descriptors(sidecar).total()))
    return descriptors(sidecar)


def assert_served(engine: RingEngine, library: Library) -> None:
    """A Forward has the rows of the adapter."""
    found = engine.forward(FEATURES)
    wrong = library.wrong_rows([engine.digest], [ROWS], SITE, torch.tensor(engine.x), torch.tensor(found))
    assert not wrong


def end_session(sidecar: SidecarProcess, session: str) -> None:
    """As its operator: a client that was killed has its grace."""
    with slotcar_client.connect(sidecar.target) as client:
        client.end_session(session[:8])


# What is offered


def planes_of(target: str) -> list[int]:
    with RawEngine(target) as engine:
        stream = engine.engine.OpenSession(pb.OpenSessionRequest())
        offered = list(next(stream).opened.server.planes)
        stream.cancel()
        return offered


def test_every_plane_is_offered(served: SidecarProcess) -> None:
    assert planes_of(served.target) == [plane_pb2.PLANE_STREAM, plane_pb2.PLANE_RING, plane_pb2.PLANE_DIRECT]


def test_the_stream_alone_has_no_second_socket(tmp_path: Path, library: Library) -> None:
    with serve(tmp_path, library, "--planes", "stream") as sidecar:
        assert planes_of(sidecar.target) == [plane_pb2.PLANE_STREAM]
        assert not Path(sidecar.target.removeprefix("unix://") + SUFFIX).exists()


def test_planes_may_be_said_in_one_word_or_more(tmp_path: Path, library: Library) -> None:
    with serve(tmp_path, library, "--planes", "stream,direct", "--planes", "stream") as sidecar:
        assert planes_of(sidecar.target) == [plane_pb2.PLANE_STREAM, plane_pb2.PLANE_DIRECT]


def test_a_second_socket_is_as_the_first(served: SidecarProcess) -> None:
    path = Path(served.target.removeprefix("unix://") + SUFFIX)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660


def test_a_server_that_was_killed_leaves_what_the_next_takes_over(tmp_path: Path, library: Library) -> None:
    """And its clients see at once that it is gone."""
    with serve(tmp_path, library) as sidecar:
        with ring_engine(sidecar.target, A, FEATURES) as engine:
            assert_served(engine, library)
            sidecar.kill()
            assert engine.client.is_gone
            assert not engine.client.is_closed, "it had no time to say so"
        sidecar.start()
        load(sidecar, library)
        with ring_engine(sidecar.target, A, FEATURES) as again:
            assert_served(again, library)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_ends_says_so_first(tmp_path: Path, library: Library, number: int) -> None:
    with serve(tmp_path, library) as sidecar, ring_engine(sidecar.target, A, FEATURES) as engine:
        assert_served(engine, library)
        assert sidecar.process is not None
        sidecar.process.send_signal(number)
        assert sidecar.process.wait(PATIENCE_SECONDS) == 0
        assert engine.client.is_closed
        assert engine.client.is_gone
        assert [path.name for path in tmp_path.iterdir() if path.is_socket()] == []


def test_a_server_serves_rings_until_they_are_quiet(tmp_path: Path, library: Library) -> None:
    """To see it fail: leave threads out of AdapterCache.last_forward_at."""
    with serve(tmp_path, library, "--shutdown-seconds", "60") as sidecar:
        with RingChild("flooding", sidecar.target, A, FEATURES) as child:
            child.read()
            assert sidecar.process is not None
            sidecar.process.terminate()
            eventually(lambda: "shutting down" in sidecar.log)
            eventually(StandsStill(lambda: sidecar.process.poll() is None, looks=200))  # type: ignore[union-attr]
            assert sidecar.process.poll() is None, sidecar.log
        assert sidecar.process.wait(PATIENCE_SECONDS) == 0


# Clients that end in any way


def test_clients_that_are_killed_leave_nothing(quiet: SidecarProcess, library: Library) -> None:
    """With their calls under way, again and again."""
    with ring_engine(quiet.target, A, FEATURES) as engine:
        for _ in range(3):
            children = [RingChild("flooding", quiet.target, A, FEATURES) for _ in range(2)]
            for child in children:
                with child:
                    session = child.read()["session"]
                    assert_served(engine, library)
                    child.kill()
                    end_session(quiet, session)
                    assert_served(engine, library)


def test_a_client_that_is_stopped_keeps_nobody_waiting(quiet: SidecarProcess, library: Library) -> None:
    """Its answers are there when it goes on."""
    with (
        RingChild("pipelined", quiet.target, A, FEATURES) as child,
        ring_engine(quiet.target, A, FEATURES) as engine,
    ):
        session = child.read()["session"]
        assert child.process.stdin is not None
        for count in (1, region.CELLS):
            child.pause()
            print(count, file=child.process.stdin, flush=True)
            for _ in range(20):
                assert_served(engine, library)
            child.resume()
            child.read()
        end_session(quiet, session)


def test_a_client_whose_doorbell_blocks_keeps_nobody_for_long(quiet: SidecarProcess, library: Library) -> None:
    """Both clients are served by the one thread that there is.

    To see it fail: do not call the thread back in Rings.look.
    """
    with ring_engine(quiet.target, A, FEATURES) as engine, RingChild("blocking", quiet.target, A, FEATURES) as child:
        session = child.read()["session"]
        for _ in range(20):
            assert_served(engine, library)
        eventually(lambda: "its doorbell kept the thread waiting" in quiet.log)
        end_session(quiet, session)


def test_a_session_shows_its_planes(quiet: SidecarProcess, library: Library) -> None:
    with ring_engine(quiet.target, A, FEATURES) as engine, slotcar_client.connect(quiet.target) as client:
        assert_served(engine, library)
        (found,) = client.sessions()
        assert (found.session, found.planes) == (engine.engine.session[:8], ("ring",))
        engine.client.close()
        eventually(lambda: client.sessions()[0].planes == ())


def test_forwards_and_calls_are_counted(quiet: SidecarProcess, library: Library) -> None:
    gauges = Gauges(quiet)
    with ring_engine(quiet.target, A, FEATURES) as engine:
        assert_served(engine, library)
        forwards, rows = (
            lambda: gauges.read(r'slotcar_forwards_total\{plane="ring",reason="OK"\}'),
            lambda: gauges.read(r'slotcar_forward_rows_total\{plane="ring"\}'),
        )
        before = forwards(), rows()
        for _ in range(3):
            assert_served(engine, library)
        assert (forwards(), rows()) == (before[0] + 3, before[1] + 3 * ROWS)
        assert gauges.read(r'slotcar_rpcs_total\{method="PlaneHello",reason="OK"\}') > 0


def test_large_arenas_are_bounded_by_the_setting(tmp_path: Path, library: Library) -> None:
    with serve(tmp_path, library, "--ring-bytes", "1MiB") as sidecar, RawEngine(sidecar.target) as engine:
        path, session = Path(sidecar.target.removeprefix("unix://") + SUFFIX), engine.open()
        with RawClient(path, hello(session, arena_bytes=1 << 20)) as client:
            client.welcome()
        with (
            RawClient(path, hello(session, arena_bytes=(1 << 20) + 1)) as client,
            pytest.raises(Refused, match="1048576"),
        ):
            client.welcome()


def test_a_server_without_shared_memory_refuses_rings_and_serves_on(tmp_path: Path, library: Library) -> None:
    """Its files may not be as large as a region, but its slots are."""

    class Limited(SidecarProcess):
        def command(self) -> list[str]:
            limit = "ulimit -f 2000"  # of 1024 bytes each
            return ["bash", "-c", f'{limit} && exec "$@"', "bash", *super().command()]

    extra = ("--model-spec", str(spec_file(tmp_path, SITES)))
    with Limited(tmp_path, library.root, extra=extra) as sidecar, RawEngine(sidecar.target) as engine:
        load(sidecar, library)
        session = engine.open()
        path = Path(sidecar.target.removeprefix("unix://") + SUFFIX)
        with RawClient(path, hello(session)) as client:
            with pytest.raises(Refused) as refused:
                client.welcome()
            assert refused.value.reason == "CAPACITY_EXCEEDED"
        request = engine.request(engine.map(A).generation, [1], {SITE: np.ones((1, FEATURES), dtype=np.float32)})
        assert engine.forward(request).digests
