"""Clients that die, stop or give up in the middle of anything: what they owned comes back, and nobody else notices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import slotcar_client
import torch
from google.protobuf import duration_pb2
from grpc import aio
from grpc._cython import cygrpc
from slotcar.v1 import adapter_service_pb2
from slotcar.v1 import engine_service_pb2 as pb
from slotcar_client import Client
from slotcar_client.rpc import OPTIONS as client_options
from slotcar_sidecar.rpc.server import Serving, make_server

from tests.fakes.parts import make_bench
from tests.faults.child import Child
from tests.faults.gauges import Gauges, descriptors, rss_bytes
from tests.faults.oracle import Library, spec_file
from tests.faults.raw import RawEngine, array, refusal
from tests.faults.relay import Relay
from tests.faults.watching import watching
from tests.server import SidecarProcess
from tests.waiting import StandsStill, eventually

SMALL, FEATURES = "small", 64
WIDE = tuple(f"wide.{index}" for index in range(24))
SITES = {SMALL: (FEATURES, FEATURES)} | dict.fromkeys(WIDE, (2048, 2048))
RANK = 64
GRACE_SECONDS = 0.3
A, B, C, LARGE = "a", "b", "c", "large"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Small adapters, and one of 25 MB, which takes a while to read, verify and write."""
    library = Library(tmp_path_factory.mktemp("adapters"), SITES)
    for seed, name in enumerate((A, B, C)):
        library.write(name, seed=seed, sites=[SMALL], rank=4 * (seed + 1))
    library.write(LARGE, seed=9, sites=[SMALL, *WIDE], rank=RANK)
    return library


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory, library: Library) -> Iterator[SidecarProcess]:
    folder = tmp_path_factory.mktemp("s")
    extra = ("--model-spec", str(spec_file(folder, SITES)), "--metrics", "127.0.0.1:0")
    with SidecarProcess(folder, library.root, max_rank=RANK, extra=extra) as sidecar:
        yield sidecar


@pytest.fixture
def client(sidecar: SidecarProcess, library: Library) -> Iterator[Client]:
    """A client of the sidecar, whose two slots have A and B. In the end all that the test's clients owned is gone."""
    with slotcar_client.connect(sidecar.target) as client:
        for adapter in client.list():
            client.unload(adapter.name, force=True)
        for name in (A, B):
            client.load(name, library.root / name)
        yield client
        gauges = Gauges(sidecar)
        eventually(
            lambda: gauges.read("slotcar_sessions") == gauges.read("slotcar_mappings") == 0, "the end of sessions"
        )
        for name in (A, B, C):
            client.load(name, library.root / name)
    # What gRPC itself says of a client that is gone is no fault of the sidecar's.
    assert "fault in " not in sidecar.log
    assert "never retrieved" not in sidecar.log


def computes(client: Client, library: Library, name: str) -> None:
    """An engine maps `name` and gets its rows."""
    x = torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(3))
    with client.session("check") as session:
        mapping = session.set_mapping([(name, 3)])
        found = session.forward({SMALL: x})[SMALL]
        assert library.wrong_rows(mapping.entry_digests, [3], SMALL, x, found) == []


def test_a_load_outlives_its_client(client: Client, sidecar: SidecarProcess, library: Library) -> None:
    """To see it fail: await the work in AdapterCache._outliving without shield."""
    with watching(client) as events, Child("load", sidecar.target, LARGE, str(library.root / LARGE)) as child:
        assert child.read() == {"done": False}
        child.kill()
        killed_at = time.time()
        loaded = events.wait("loaded", name=LARGE)
        assert loaded.time_seconds > killed_at, "the load was over before its client was: make the adapter larger"
        assert loaded.digest == client.get(LARGE).digest
        assert client.load(LARGE, library.root / LARGE).already_resident
        computes(client, library, LARGE)


def test_the_pins_of_a_killed_client_go_after_its_grace(
    client: Client, sidecar: SidecarProcess, library: Library
) -> None:
    with watching(client) as events, Child("pin", sidecar.target, str(GRACE_SECONDS), A, B) as child:
        session = child.read()["session"]
        assert [adapter.pins for adapter in client.list()] == [1, 1]
        with pytest.raises(slotcar_client.SlotsExhausted) as caught:
            client.load(C, library.root / C)
        assert caught.value.retry_after_seconds
        killed_at = time.time()
        child.kill()
        ended = events.wait("session_ended", session=session[:8])
        assert ended.reason == "grace passed"
        assert ended.time_seconds - killed_at >= GRACE_SECONDS
        assert [adapter.pins for adapter in client.list()] == [0, 0]
        client.load(C, library.root / C)
        computes(client, library, C)


def test_a_client_killed_in_a_stream_of_forwards(client: Client, sidecar: SidecarProcess, library: Library) -> None:
    """Another engine computes all the while."""
    arguments = (sidecar.target, str(GRACE_SECONDS), A, SMALL, str(FEATURES))
    with watching(client) as events, Child("flood", *arguments) as child, client.session("beside") as session:
        mapping = session.set_mapping([(B, 2)])
        flooding = child.read()["session"]
        x = torch.randn(2, FEATURES, generator=torch.Generator().manual_seed(4))

        def compute() -> None:
            found = session.forward({SMALL: x})[SMALL]
            assert library.wrong_rows(mapping.entry_digests, [2], SMALL, x, found) == []

        compute()
        child.kill()
        compute()
        events.wait("session_ended", session=flooding[:8])
        compute()
        assert {adapter.name: adapter.pins for adapter in client.list()} == {A: 0, B: 1}


def test_a_stream_that_is_never_read_holds_up_nobody(client: Client, sidecar: SidecarProcess, library: Library) -> None:
    """The server computes no further ahead than the transport carries, so that it does not fill its memory."""
    rows = 4096
    sent = 0
    more = threading.Event()

    def requests(first: pb.ForwardRequest) -> Iterator[pb.ForwardStreamRequest]:
        nonlocal sent
        while not more.is_set():
            sent += 1
            yield pb.ForwardStreamRequest(forward=first)

    before = rss_bytes(sidecar)
    with RawEngine(sidecar.target) as engine:
        engine.open(GRACE_SECONDS)
        x = torch.ones(rows, FEATURES)
        request = engine.request(engine.map(A).generation, [rows], {SMALL: x.numpy()})
        engine.engine.ForwardStream(requests(request))
        stalled = StandsStill(lambda: sent)
        eventually(stalled, "the end of what is sent ahead")
        for _ in range(20):
            computes(client, library, B)
        assert stalled(), "requests were taken though no answer was read"
        assert rss_bytes(sidecar) - before < 64 << 20
        more.set()


@pytest.fixture
def relay(tmp_path: Path, sidecar: SidecarProcess) -> Iterator[Relay]:
    relay = Relay(tmp_path, sidecar.target)
    yield relay
    relay.close()


def test_a_client_that_slept_past_its_grace(
    client: Client, sidecar: SidecarProcess, library: Library, relay: Relay
) -> None:
    """SIGSTOP, its connections break, its grace passes, its slot gets other bytes and its name moves; SIGCONT.

    It believes that nothing happened. It is refused until its bytes are back, and then computes with those.
    """
    digest = client.get(A).digest
    with Child("session", relay.target, str(GRACE_SECONDS), A, SMALL, str(FEATURES)) as child:
        opened = child.read()
        assert opened["digests"] == [digest]
        before = child.ask("compute")
        ones = torch.ones(2, FEATURES)
        assert library.wrong_rows([digest], [2], SMALL, ones, torch.tensor(before["delta"])) == []
        with watching(client) as events:
            child.pause()
            relay.cut()
            assert events.wait("session_ended", session=opened["session"][:8]).reason == "grace passed"
            client.load(A, library.root / C, replace=True)
            child.resume()
            # The broken connection is an error of its own, once.
            answers = [child.ask("compute") for _ in range(3)]
            assert answers[-1] == {"error": "ADAPTER_NOT_FOUND"}
            assert {answer.get("error") for answer in answers} <= {"UNAVAILABLE", "ADAPTER_NOT_FOUND"}
            client.load(A, library.root / A, replace=True)
            after = child.ask("compute")
            assert after["delta"] == before["delta"]
            assert after["recoveries"]["SESSION_NOT_FOUND"] == 1
            assert client.get(A).pins == 1


def test_grpc_knows_every_option_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes an unknown one in silence, and the keepalive that a session's life hangs on is not what it seems."""
    set_by_server: list[tuple[str, int]] = []

    def server(*, options: list[tuple[str, int]], **_: object) -> aio.Server:
        set_by_server.extend(options)
        raise InterruptedError

    monkeypatch.setattr("slotcar_sidecar.rpc.server.aio.server", server)
    with pytest.raises(InterruptedError):
        make_server(make_bench(1).cache, Serving(1 << 20, 1.0, lambda method, reason: None))
    assert cygrpc.__file__ is not None
    library = Path(cygrpc.__file__).read_bytes()
    for options in (dict(set_by_server), dict(client_options)):
        assert len(options) > 6
        assert {name for name in options if name.encode() + b"\0" not in library} == set()
        # While another ping is unanswered there is no keepalive: it may not be waited for longer.
        assert options["grpc.http2.ping_timeout_ms"] <= options["grpc.keepalive_timeout_ms"]


@pytest.mark.full
def test_a_watch_that_sees_nothing_is_not_taken_for_abuse(client: Client) -> None:
    """Its pings, one in 10 s, are within what the server allows: the third would end the connection otherwise."""
    with client.events() as events:
        timer = threading.Timer(65, events.close)
        timer.start()
        assert list(events) == []


@pytest.mark.full
def test_a_stopped_client_is_given_up_though_its_connection_stands(
    client: Client, sidecar: SidecarProcess, library: Library
) -> None:
    """Only the server's keepalive, 10 s and 10 s more, can tell a stopped process from a silent one."""
    with (
        Child("session", sidecar.target, str(GRACE_SECONDS), A, SMALL, str(FEATURES)) as child,
        watching(client) as events,
    ):
        opened = child.read()
        before = child.ask("compute")
        child.pause()
        events.wait("session_ended", session=opened["session"][:8])
        client.unload(A)
        client.load(C, library.root / C)
        client.unload(C)
        client.load(A, library.root / A)
        child.resume()
        answers = [child.ask("compute") for _ in range(2)]
        assert answers[-1]["delta"] == before["delta"]


def test_calls_that_give_up_at_once_leave_nothing(client: Client, sidecar: SidecarProcess, library: Library) -> None:
    """Deadlines of about nothing on every call, over and over: they are refused, or done, and never half done."""
    x = torch.randn(2, FEATURES, generator=torch.Generator().manual_seed(5))
    ends: dict[str, set[str]] = {}
    with RawEngine(sidecar.target) as engine:
        engine.open(GRACE_SECONDS)
        forward = engine.request(engine.map(A, B).generation, [1, 1], {SMALL: x.numpy()})
        entries = [pb.MappingEntry(ref=A), pb.MappingEntry(ref=B)]
        grace = duration_pb2.Duration(nanos=int(GRACE_SECONDS * 1e9))
        load = adapter_service_pb2.LoadAdapterRequest(ref=C, source=str(library.root / C))
        calls: dict[str, Callable[[float], object]] = {
            "open": lambda t: list(engine.engine.OpenSession(pb.OpenSessionRequest(grace=grace), timeout=t)),
            "map": lambda t: engine.engine.SetMapping(
                pb.SetMappingRequest(session=engine.session, mapping_id=2, entries=entries), timeout=t
            ),
            "forward": lambda t: engine.engine.Forward(forward, timeout=t),
            "stream": lambda t: list(
                engine.engine.ForwardStream(iter([pb.ForwardStreamRequest(forward=forward)] * 3), timeout=t)
            ),
            "load": lambda t: engine.adapters.LoadAdapter(load, timeout=t),
            "list": lambda t: engine.adapters.ListAdapters(adapter_service_pb2.ListAdaptersRequest(), timeout=t),
            "watch": lambda t: list(
                engine.adapters.WatchEvents(adapter_service_pb2.WatchEventsRequest(replay=10), timeout=t)
            ),
            "estimate": lambda t: engine.adapters.EstimateAdapter(
                adapter_service_pb2.EstimateAdapterRequest(source=str(library.root / LARGE)), timeout=t
            ),
        }
        for seconds in (0.0005, 0.001, 0.002, 0.004, 0.008) * 4:
            for name, call in calls.items():
                ends.setdefault(name, set()).add(outcome(call, seconds))
        assert ends["open"] == ends["watch"] == {"DEADLINE_EXCEEDED"}
        assert set().union(*ends.values()) <= {"", "DEADLINE_EXCEEDED", "SLOTS_EXHAUSTED"}, ends
        assert max(adapter.pins for adapter in client.list()) <= 2
        answer = engine.forward(forward)
        found = torch.from_numpy(array(answer.outputs[0]))
        assert library.wrong_rows(answer.digests, [1, 1], SMALL, x, found) == []
        engine.engine.CloseSession(pb.CloseSessionRequest(session=engine.session))
        assert {adapter.pins for adapter in client.list()} == {0}


def outcome(call: Callable[[float], object], seconds: float) -> str:
    """How a call with that deadline ends; "" when it was answered."""
    try:
        call(seconds)
    except grpc.RpcError as error:
        found = refusal(error)
        return found.reason or found.code.name
    return ""


def test_fifty_vanished_clients_leave_no_descriptor_and_no_memory(
    client: Client, sidecar: SidecarProcess, library: Library
) -> None:
    """Each has a connection, a session, a mapping and a stream of Forwards in flight when its process is killed."""
    gauges = Gauges(sidecar)

    def vanish(count: int) -> None:
        with Child("crowd", sidecar.target, "0.05", str(count), A, SMALL, str(FEATURES)) as child:
            assert len(child.read()["sessions"]) == count
            assert client.get(A).pins == count
            child.kill()
        eventually(lambda: gauges.read("slotcar_sessions") == 0, "the end of the crowd")

    def settled() -> int:
        eventually(lambda: descriptors(sidecar).total() <= most, f"{most} descriptors")
        return descriptors(sidecar).total()

    most = 1 << 20
    vanish(10)
    most = settled()
    rss = rss_bytes(sidecar)
    for _ in range(5):
        vanish(10)
    assert settled() <= most
    assert rss_bytes(sidecar) - rss < 8 << 20
    computes(client, library, A)
