"""One sound call of every RPC, so that what holds for all of them is tested for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from google.protobuf import duration_pb2
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from slotcar.v1 import adapter_service_pb2 as adapters
from slotcar.v1 import engine_service_pb2 as engine
from slotcar.v1 import operator_service_pb2 as operators

from tests.adapters import CONFIG_FILE, WEIGHTS_FILE
from tests.conformance.items import forward, item
from tests.conformance.refusals import Refusal, has_field, refused
from tests.conformance.target import PATIENCE_SECONDS, Session, Target

SERVICES = (
    adapters.DESCRIPTOR.services_by_name["AdapterService"],
    engine.DESCRIPTOR.services_by_name["EngineService"],
    operators.DESCRIPTOR.services_by_name["OperatorService"],
)
# Shutdown, after which there is no server, has tests and servers of its own.
LAST = "Shutdown"
METHODS: Mapping[str, MethodDescriptor] = {
    method.name: method for service in SERVICES for method in service.methods if method.name != LAST
}


class Given(NamedTuple):
    """Adapters "sql" and "spare", and a session whose mapping 1 and hold 1 have "sql"."""

    target: Target
    session: Session
    generation: int


@contextmanager
def given(target: Target) -> Iterator[Given]:
    for name in ("sql", "spare"):
        target.load(name)
    with target.session() as session:
        session.hold("sql")
        yield Given(target, session, session.set_mapping("sql").generation)


def parts(folder: Path, ref: str, chunk_bytes: int = 1000, /, **header: Any) -> list[adapters.LoadAdapterStreamRequest]:
    """An upload of what is in the folder; `header` replaces fields of its header."""
    config, weights = ((folder / file).read_bytes() for file in (CONFIG_FILE, WEIGHTS_FILE))
    sound = {"ref": ref, "config_bytes": len(config), "weights_bytes": len(weights)}
    return [
        adapters.LoadAdapterStreamRequest(header=adapters.UploadHeader(**sound | header)),
        *(adapters.LoadAdapterStreamRequest(config=chunk) for chunk in _chunks(config, chunk_bytes)),
        *(adapters.LoadAdapterStreamRequest(weights=chunk) for chunk in _chunks(weights, chunk_bytes)),
    ]


def _chunks(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


CALLS: Mapping[str, Callable[[Given], list[Any]]] = {
    "LoadAdapter": lambda g: [adapters.LoadAdapterRequest(ref="sql", source=str(g.target.folder("sql")))],
    "LoadAdapterStream": lambda g: list(parts(g.target.folder("sql"), "sql")),
    "UnloadAdapter": lambda g: [adapters.UnloadAdapterRequest(ref="spare")],
    "KeepAdapter": lambda g: [adapters.KeepAdapterRequest(ref="sql")],
    "ReleaseKeep": lambda g: [adapters.ReleaseKeepRequest(ref="sql")],
    "GetAdapter": lambda g: [adapters.GetAdapterRequest(ref="sql")],
    "ListAdapters": lambda g: [adapters.ListAdaptersRequest()],
    "ListDesired": lambda g: [adapters.ListDesiredRequest()],
    "EstimateAdapter": lambda g: [adapters.EstimateAdapterRequest(source=str(g.target.folder("sql")))],
    "PrefetchAdapters": lambda g: [adapters.PrefetchAdaptersRequest(refs=["spare", "sql"])],
    "GetCapacity": lambda g: [adapters.GetCapacityRequest()],
    "ListSessions": lambda g: [adapters.ListSessionsRequest()],
    "EndSession": lambda g: [adapters.EndSessionRequest(session=g.session.short)],
    "WatchEvents": lambda g: [adapters.WatchEventsRequest()],
    "SetLogLevel": lambda g: [operators.SetLogLevelRequest(level=operators.LOG_LEVEL_INFO)],
    "GetSettings": lambda g: [operators.GetSettingsRequest()],
    "OpenSession": lambda g: [engine.OpenSessionRequest(grace=duration_pb2.Duration())],
    "JoinSession": lambda g: [engine.JoinSessionRequest(session=g.session.id)],
    "CloseSession": lambda g: [engine.CloseSessionRequest(session=g.session.id)],
    "HoldAdapter": lambda g: [engine.HoldAdapterRequest(session=g.session.id, hold_id=2, ref="spare")],
    "ReleaseHold": lambda g: [engine.ReleaseHoldRequest(session=g.session.id, hold_id=1)],
    "SetMapping": lambda g: [g.session.mapping("sql", None, mapping_id=2)],
    "ReleaseMapping": lambda g: [engine.ReleaseMappingRequest(session=g.session.id, mapping_id=1)],
    "Fence": lambda g: [engine.FenceRequest(session=g.session.id)],
    "Forward": lambda g: [forward(g.session, g.generation, [1], item(g.target, 1))],
    "ForwardStream": lambda g: [
        engine.ForwardStreamRequest(forward=forward(g.session, g.generation, [1], item(g.target, 1)))
    ],
}


def ask(target: Target, name: str, requests: list[Any], timeout: float = PATIENCE_SECONDS) -> Any:
    """The answer; of a stream of answers the first, and then the stream is cancelled."""
    method = METHODS[name]
    stub = (target.adapters, target.engine, target.operators)[SERVICES.index(method.containing_service)]
    return _first(getattr(stub, name), method, requests, timeout)


def ask_bytes(target: Target, name: str, data: bytes) -> Any:
    """The same for one message that is given as bytes."""
    method = METHODS[name]
    sends, answers = ("stream" if many else "unary" for many in (method.client_streaming, method.server_streaming))
    path = f"/{method.containing_service.full_name}/{name}"
    return _first(getattr(target.channel, f"{sends}_{answers}")(path), method, [data], PATIENCE_SECONDS)


def _first(rpc: Any, method: MethodDescriptor, requests: list[Any], timeout: float) -> Any:
    request = iter(requests) if method.client_streaming else requests[0]
    if not method.server_streaming:
        return rpc(request, timeout=timeout)
    call: Any = rpc(request, timeout=timeout)
    try:
        return next(call)
    finally:
        call.cancel()


def refusal_of(target: Target, *requests: Message) -> Refusal:
    """The refusal of the call that takes such requests: of fields that they have, and nothing changes."""
    name = type(requests[0]).__name__.removesuffix("Request")
    with target.unchanged():
        refusal = refused(ask, target, name, list(requests))
    assert all(has_field(requests[0].DESCRIPTOR, path) for path in refusal.fields), refusal
    return refusal


def code_of(call: Any) -> grpc.StatusCode:
    """How a stream ends, whatever comes before."""
    for _ in call:
        pass
    code = call.code()
    assert isinstance(code, grpc.StatusCode)
    return code
