"""A server under test, known by its address alone: raw stubs, what it says of itself, and adapters for its model."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file
from slotcar.v1 import (
    adapter_pb2,
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    engine_service_pb2,
    layout_pb2,
    model_pb2,
    operator_service_pb2_grpc,
)

from tests.adapters import CONFIG_FILE, MINIMAL_CONFIG, WEIGHTS_FILE, raw_tensors, write_raw_adapter
from tests.planes.stub import PlaneStub, engine_stub
from tests.server import SidecarProcess

PATIENCE_SECONDS = 30.0
ABSENT_DIGEST = "sha256:" + "0" * 64
LINEAR = model_pb2.SITE_KIND_LINEAR
# In order of their names, as a server lists them.
MODEL = model_pb2.ModelSpec(
    sites=[
        model_pb2.Site(name="layers.0.down_proj", in_features=128, out_features=64, kind=LINEAR),
        model_pb2.Site(name="layers.0.k_proj", in_features=64, out_features=32, kind=LINEAR),
        model_pb2.Site(name="layers.0.q_proj", in_features=64, out_features=64, kind=LINEAR),
    ]
)


@dataclass(frozen=True)
class State:
    """What a refused call must leave as it was; the gauges are there when the server's metrics are known.

    Without what time alone changes, and without the bytes in the host tier, of which a refused load may leave some.
    """

    layout: layout_pb2.Layout
    adapters: tuple[adapter_pb2.Adapter, ...]
    sessions: tuple[adapter_service_pb2.SessionStatus, ...]
    capacity: adapter_service_pb2.GetCapacityResponse
    gauges: Mapping[str, float]


GAUGES = (
    "slotcar_sessions",
    "slotcar_pins",
    "slotcar_holds",
    "slotcar_adapters_kept",
    "slotcar_slots_reserved",
    "slotcar_mappings_waiting",
)


@dataclass
class Target:
    """Stubs for `address`; `root` is a folder under a root of that server, for this suite to write into."""

    address: str
    root: Path
    metrics_url: str | None = None
    model: model_pb2.ModelSpec = field(default_factory=model_pb2.ModelSpec)
    server: engine_service_pb2.ServerInfo = field(default_factory=engine_service_pb2.ServerInfo)
    process: SidecarProcess | None = None
    plane: str = "unary"

    def __post_init__(self) -> None:
        self.channel = open_channel(self.address)
        self.adapters = adapter_service_pb2_grpc.AdapterServiceStub(self.channel)
        self.operators = operator_service_pb2_grpc.OperatorServiceStub(self.channel)
        self.engine = engine_stub(self.channel, self.address, self.plane)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        self.root = self.root / f"conformance-{uuid.uuid4().hex[:8]}"
        self.root.mkdir()

    def learn(self, model: model_pb2.ModelSpec = MODEL) -> Self:
        """Finds out what the server is, and gives it `model` if it knows none."""
        with self.session() as session:
            self.model, self.server = session.opened.model_spec, session.opened.server
        if not self.model.sites:
            with self.session(model_spec=model) as session:
                self.model = session.opened.model_spec
        return self

    def close(self) -> None:
        if isinstance(self.engine, PlaneStub):
            self.engine.close()
        self.channel.close()

    # Adapters

    @property
    def site(self) -> model_pb2.Site:
        return self.model.sites[0]

    def folder(self, name: str, **settings: Any) -> Path:
        """A sound adapter for the first site, made once under the root; `seed` and `rank` make others of it."""
        folder = self.root / name
        if not folder.exists():
            self.write(folder, **settings)
        return folder

    def write(self, folder: Path, *, seed: int | None = None, rank: int = 4, sites: int = 1) -> Path:
        """Writes a sound adapter; by default each folder's name gives other weights."""
        tensors = {}
        for index, site in enumerate(self.model.sites[:sites]):
            number = seed if seed is not None else zlib.crc32(folder.name.encode())
            features = (site.in_features, site.out_features)
            tensors |= raw_tensors(site.name, rank=rank, features=features, seed=number + index)
        return write_raw_adapter(folder, dict(MINIMAL_CONFIG) | {"r": rank}, tensors)

    def load(self, name: str, **request: Any) -> adapter_service_pb2.LoadAdapterResponse:
        """Loads the sound adapter `name` under its own name."""
        fields = {"ref": name, "source": str(self.folder(name))} | request
        return self.adapters.LoadAdapter(adapter_service_pb2.LoadAdapterRequest(**fields), timeout=PATIENCE_SECONDS)

    def fill_slots(self, prefix: str = "full") -> list[str]:
        """Loads as many adapters as there are slots and returns their names."""
        names = [f"{prefix}-{index}" for index in range(self.server.slots)]
        for name in names:
            self.load(name)
        return names

    def unload_all(self) -> None:
        for adapter in self.state().adapters:
            request = adapter_service_pb2.UnloadAdapterRequest(ref=adapter.name, force=True)
            self.adapters.UnloadAdapter(request, timeout=PATIENCE_SECONDS)

    # What is

    def state(self) -> State:
        """Layout and adapters of one snapshot, sessions, capacity, and the gauges."""
        request = adapter_service_pb2.ListAdaptersRequest(page_size=1000)
        page = self.adapters.ListAdapters(request, timeout=PATIENCE_SECONDS)
        assert not page.next_page_token
        sessions, capacity = self.sessions(), self.capacity()
        for status in sessions:
            status.ClearField("grace_left")
            status.ClearField("forwards_in_flight")
            status.ClearField("planes")  # a refused call may be the first that travels over a ring
            for mapping in status.mappings:
                mapping.ClearField("idle")
            for hold in status.holds:
                hold.ClearField("left")
        capacity.ClearField("host_bytes_used")
        gauges = {}
        if self.metrics_url is not None:
            metrics = self.metrics()
            gauges = {name: sum(value for (shown, _), value in metrics.items() if shown == name) for name in GAUGES}
        return State(page.layout, tuple(page.adapters), sessions, capacity, gauges)

    def sessions(self) -> tuple[adapter_service_pb2.SessionStatus, ...]:
        """All sessions."""
        request = adapter_service_pb2.ListSessionsRequest(page_size=1000)
        page = self.adapters.ListSessions(request, timeout=PATIENCE_SECONDS)
        assert not page.next_page_token
        return tuple(page.sessions)

    def capacity(self) -> adapter_service_pb2.GetCapacityResponse:
        """How full the server is; invariant I7 holds."""
        request = adapter_service_pb2.GetCapacityRequest()
        capacity = self.adapters.GetCapacity(request, timeout=PATIENCE_SECONDS)
        states = (capacity.slots_free, capacity.slots_filling, capacity.slots_occupied, capacity.slots_draining)
        assert sum(states) == capacity.slots, capacity
        return capacity

    def is_waiting(self, count: int) -> Callable[[], bool]:
        """A condition: so many SetMapping calls wait."""
        return lambda: self.capacity().waiting == count

    def has_nothing_of_sessions(self) -> bool:
        """Whether there is no session, and nothing that only sessions own."""
        capacity = self.capacity()
        adapters = self.adapters.ListAdapters(adapter_service_pb2.ListAdaptersRequest(), timeout=PATIENCE_SECONDS)
        owned = (capacity.sessions, capacity.slots_pinned, capacity.slots_reserved, capacity.slots_draining)
        return not any((*owned, capacity.waiting, *(adapter.pins for adapter in adapters.adapters)))

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Checks that layout, adapters, sessions, pins, holds and capacity are the same after as before."""
        before = self.state()
        yield
        assert self.state() == before

    def metrics_text(self) -> str:
        assert self.metrics_url is not None
        with urllib.request.urlopen(self.metrics_url, timeout=PATIENCE_SECONDS) as response:
            return response.read().decode()

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Every sample by name and sorted labels."""
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(self.metrics_text())
            for sample in family.samples
        }

    # Sessions

    @contextmanager
    def session(self, **request: Any) -> Iterator[Session]:
        """A session that is closed at the end."""
        session = Session(self, engine_service_pb2.OpenSessionRequest(**{"client_name": "conformance"} | request))
        try:
            yield session
        finally:
            with suppress(grpc.RpcError):  # the server may be gone
                self.close_session(session.id)
            session.call.cancel()

    def close_session(self, session: str) -> engine_service_pb2.CloseSessionResponse:
        request = engine_service_pb2.CloseSessionRequest(session=session)
        return self.engine.CloseSession(request, timeout=PATIENCE_SECONDS)


class Session:
    """One OpenSession stream whose first message has come; reading on waits for the next."""

    def __init__(self, target: Target, request: engine_service_pb2.OpenSessionRequest) -> None:
        self._target = target
        self.call = target.engine.OpenSession(request, timeout=2 * PATIENCE_SECONDS)
        self.first = next(self.call)
        assert self.first.WhichOneof("message") == "opened"
        self.opened = self.first.opened
        self.id = self.opened.session

    @property
    def short(self) -> str:
        """What others may see of the id."""
        return self.id[:8]

    @property
    def status(self) -> adapter_service_pb2.SessionStatus:
        """What others see of the session."""
        (status,) = [status for status in self._target.sessions() if status.session == self.short]
        return status

    def mapping(self, *entries: str | None, **fields: Any) -> engine_service_pb2.SetMappingRequest:
        """A request for mapping 1; None is the base model, and `fields` replace those of the request."""
        sound = {"session": self.id, "mapping_id": 1, "entries": [entry(ref) for ref in entries]}
        return engine_service_pb2.SetMappingRequest(**sound | fields)

    def set_mapping(self, *entries: str | None, **fields: Any) -> engine_service_pb2.SetMappingResponse:
        """Sets mapping 1; see `mapping`."""
        return self._target.engine.SetMapping(self.mapping(*entries, **fields), timeout=PATIENCE_SECONDS)

    def set_later(self, *entries: str | None, **fields: Any) -> Any:
        """A call that waits for slots and loads what is in none."""
        request = self.mapping(*entries, **{"load": True, "wait": seconds(PATIENCE_SECONDS)} | fields)
        return self._target.engine.SetMapping.future(request, timeout=2 * PATIENCE_SECONDS)

    def hold(self, ref: str, hold_id: int = 1, **fields: Any) -> engine_service_pb2.HoldAdapterResponse:
        """Holds an adapter; `fields` replace those of the request."""
        sound = {"session": self.id, "hold_id": hold_id, "ref": ref}
        request = engine_service_pb2.HoldAdapterRequest(**sound | fields)
        return self._target.engine.HoldAdapter(request, timeout=PATIENCE_SECONDS)

    def release_hold(self, hold_id: int = 1) -> engine_service_pb2.ReleaseHoldResponse:
        request = engine_service_pb2.ReleaseHoldRequest(session=self.id, hold_id=hold_id)
        return self._target.engine.ReleaseHold(request, timeout=PATIENCE_SECONDS)

    def join(self, rank: int, **fields: Any) -> Any:
        """The stream of a rank, before its first message."""
        request = engine_service_pb2.JoinSessionRequest(**{"session": self.id, "rank": rank} | fields)
        return self._target.engine.JoinSession(request, timeout=2 * PATIENCE_SECONDS)

    def release_mapping(self, mapping_id: int = 1) -> engine_service_pb2.ReleaseMappingResponse:
        request = engine_service_pb2.ReleaseMappingRequest(session=self.id, mapping_id=mapping_id)
        return self._target.engine.ReleaseMapping(request, timeout=PATIENCE_SECONDS)

    def next(self, kind: str) -> engine_service_pb2.OpenSessionResponse:
        """The next message of that kind; others before it are passed over."""
        for message in self.call:
            if message.WhichOneof("message") == kind:
                return message
        raise AssertionError(f"the stream ended before {kind} came")


class Streamed:
    """A ForwardStream on which one request at a time is sent and answered."""

    def __init__(self, target: Target) -> None:
        self._requests: list[engine_service_pb2.ForwardStreamRequest | None] = []
        self._more = threading.Semaphore(0)
        self.call = target.engine.ForwardStream(self._feed(), timeout=2 * PATIENCE_SECONDS)

    def send(self, request: engine_service_pb2.ForwardStreamRequest | None) -> None:
        """Sends a request, or with None ends the sending side."""
        self._requests.append(request)
        self._more.release()

    def ask(self, request: engine_service_pb2.ForwardStreamRequest) -> engine_service_pb2.ForwardStreamResponse:
        self.send(request)
        return next(self.call)

    def close(self) -> None:
        self.call.cancel()
        self.send(None)

    def _feed(self) -> Iterator[engine_service_pb2.ForwardStreamRequest]:
        while self._more.acquire():
            request = self._requests.pop(0)
            if request is None:
                return
            yield request


def start(
    stack: ExitStack, folder: Path, root: Path, extra: tuple[str, ...] = (), plane: str = "unary", **settings: Any
) -> Target:
    """A new server without a model, which ends with `stack`."""
    extra = ("--metrics", "127.0.0.1:0", *extra)
    sidecar = stack.enter_context(SidecarProcess(folder, root, extra=extra, **settings))
    match = re.search(r"at=(http://\S+/metrics)", sidecar.log)
    assert match is not None, sidecar.log
    target = Target(sidecar.target, root, match[1], process=sidecar, plane=plane)
    stack.callback(target.close)
    return target


def open_channel(address: str, *more_options: tuple[str, int]) -> grpc.Channel:
    """A connection of its own, with gRPC's own limits except on the size of answers."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1), *more_options]
    return grpc.insecure_channel(address.replace("unix://", "unix:").removeprefix("tcp://"), options=options)


def seconds(count: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(int(count * 1e9))
    return duration


def entry(ref: str | None) -> engine_service_pb2.MappingEntry:
    return engine_service_pb2.MappingEntry(base=True) if ref is None else engine_service_pb2.MappingEntry(ref=ref)


def alpha_of(folder: Path) -> float:
    return json.loads((folder / CONFIG_FILE).read_bytes())["lora_alpha"]


def tensors_of(folder: Path) -> dict[str, Any]:
    return load_file(folder / WEIGHTS_FILE)
