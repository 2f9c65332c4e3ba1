"""An EngineService in this process that answers as it is told, for faults that a real server does not have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import grpc
from slotcar.v1 import adapter_pb2, adapter_service_pb2_grpc, engine_service_pb2_grpc, layout_pb2
from slotcar.v1 import engine_service_pb2 as pb
from slotcar_client.config import client_version
from slotcar_sidecar.core.errors import SlotcarError
from slotcar_sidecar.rpc import status

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


class FakeEngine(engine_service_pb2_grpc.EngineServiceServicer):
    """Knows adapters by name. `script` holds, call by call, an error to answer a Forward with, or None to compute.

    The "computation" is a copy of x. Each RPC is noted in `calls` as (method, request).
    """

    def __init__(self, **adapters: str) -> None:
        self.adapters = adapters
        self.script: list[Exception | None] = []
        self.calls: list[tuple[str, Any]] = []
        self.spoil: Callable[[pb.ForwardResponse], None] = lambda response: None
        self.generation = 0
        self.sessions: dict[str, dict[int, tuple[int, list[str]]]] = {}
        self.answer = threading.Event()
        self.answer.set()
        self.streams: list[threading.Event] = []
        self.epoch = "e1"
        self.max_message_bytes = 1 << 20
        self.version = client_version()
        self.holds: dict[str, dict[int, str]] = {}
        self.slots = threading.Event()
        self.slots.set()
        self.queued = threading.Event()

    def named(self, method: str) -> list[Any]:
        return [request for name, request in self.calls if name == method]

    def _version(self) -> layout_pb2.LayoutVersion:
        return layout_pb2.LayoutVersion(epoch=self.epoch, generation=self.generation)

    def OpenSession(self, request: pb.OpenSessionRequest, context: Any) -> Iterator[pb.OpenSessionResponse]:
        self.calls.append(("OpenSession", request))
        if request.resume_session and request.resume_session not in self.sessions:
            self._abort(context, "SessionNotFound")
        session = request.resume_session or f"s{len(self.streams)}"
        self.sessions.setdefault(session, {})
        end = threading.Event()
        self.streams.append(end)
        context.add_callback(end.set)
        yield pb.OpenSessionResponse(opened=self._opened(session, request.ranks, request.reserved_slots))
        while not end.wait(0.02):
            layout = layout_pb2.Layout(version=self._version())
            yield pb.OpenSessionResponse(version=layout.version, layout=layout)

    def JoinSession(self, request: pb.JoinSessionRequest, context: Any) -> Iterator[pb.JoinSessionResponse]:
        self.calls.append(("JoinSession", request))
        if request.session not in self.sessions:
            self._abort(context, "SessionNotFound")
        end = threading.Event()
        self.streams.append(end)
        context.add_callback(end.set)
        yield pb.JoinSessionResponse(opened=self._opened(request.session, 2, 0))
        end.wait()

    def _opened(self, session: str, ranks: int, reserved_slots: int) -> pb.SessionOpened:
        server = pb.ServerInfo(version=self.version, max_message_bytes=self.max_message_bytes, max_response_bytes=9)
        layout = layout_pb2.Layout(version=self._version())
        return pb.SessionOpened(
            session=session, server=server, layout=layout, ranks=ranks, reserved_slots=reserved_slots
        )

    def CloseSession(self, request: pb.CloseSessionRequest, context: Any) -> pb.CloseSessionResponse:
        self.calls.append(("CloseSession", request))
        self.sessions.pop(request.session, None)
        return pb.CloseSessionResponse()

    def SetMapping(self, request: pb.SetMappingRequest, context: Any) -> pb.SetMappingResponse:
        self.calls.append(("SetMapping", request))
        if request.session not in self.sessions:
            self._abort(context, "SessionNotFound")
        if request.HasField("wait"):
            self.queued.set()
            self.slots.wait(20)
        digests = []
        for entry in request.targets:
            name, _, digest = entry.ref.partition("@")
            if not entry.base and (name not in self.adapters or digest not in ("", self.adapters[name])):
                self._abort(context, "AdapterNotFound", entry.ref)
            digests.append("" if entry.base else self.adapters[name])
        self.generation += 1
        self.sessions[request.session][request.mapping_id] = (self.generation, [digests[i] for i in request.indices])
        entries = [pb.ResolvedEntry(digest=digest) for digest in digests]
        return pb.SetMappingResponse(generation=self.generation, entries=entries, layout=self._version())

    def ReleaseMapping(self, request: pb.ReleaseMappingRequest, context: Any) -> pb.ReleaseMappingResponse:
        self.calls.append(("ReleaseMapping", request))
        self.sessions.get(request.session, {}).pop(request.mapping_id, None)
        return pb.ReleaseMappingResponse()

    def HoldAdapter(self, request: pb.HoldAdapterRequest, context: Any) -> pb.HoldAdapterResponse:
        self.calls.append(("HoldAdapter", request))
        if request.session not in self.sessions:
            self._abort(context, "SessionNotFound")
        name, _, digest = request.ref.partition("@")
        if name not in self.adapters or digest not in ("", self.adapters[name]):
            self._abort(context, "AdapterNotFound", request.ref)
        self.holds.setdefault(request.session, {})[request.hold_id] = self.adapters[name]
        return pb.HoldAdapterResponse(
            digest=self.adapters[name], tier=request.tier or adapter_pb2.TIER_HOST, layout=self._version()
        )

    def ReleaseHold(self, request: pb.ReleaseHoldRequest, context: Any) -> pb.ReleaseHoldResponse:
        self.calls.append(("ReleaseHold", request))
        if request.session not in self.sessions:
            self._abort(context, "SessionNotFound")
        self.holds.get(request.session, {}).pop(request.hold_id, None)
        return pb.ReleaseHoldResponse()

    def Fence(self, request: pb.FenceRequest, context: Any) -> pb.FenceResponse:
        self.calls.append(("Fence", request))
        if request.session not in self.sessions:
            self._abort(context, "SessionNotFound")
        return pb.FenceResponse()

    def Forward(self, request: pb.ForwardRequest, context: Any) -> pb.ForwardResponse:
        try:
            return self._forward(request)
        except SlotcarError as error:
            self._send(context, error)
            raise AssertionError from error

    def ForwardStream(
        self, request_iterator: Iterator[pb.ForwardStreamRequest], context: Any
    ) -> Iterator[pb.ForwardStreamResponse]:
        self.calls.append(("ForwardStream", None))
        for request in request_iterator:
            try:
                yield pb.ForwardStreamResponse(forward=self._forward(request.forward))
            except SlotcarError as error:
                yield pb.ForwardStreamResponse(error=status.to_message(error))
            except EndStreamError:
                return

    def _forward(self, request: pb.ForwardRequest) -> pb.ForwardResponse:
        from slotcar_sidecar.core import errors

        # As it was on arrival: the client reuses its message.
        seen = pb.ForwardRequest()
        seen.CopyFrom(request)
        self.calls.append(("Forward", seen))
        self.answer.wait(20)
        error = self.script.pop(0) if self.script else None
        if error is not None:
            raise error
        if request.session not in self.sessions:
            raise errors.SessionNotFound
        if request.mapping_id not in self.sessions[request.session]:
            raise errors.MappingNotFound(request.mapping_id)
        generation, digests = self.sessions[request.session][request.mapping_id]
        if generation != request.generation:
            raise errors.LayoutStale("moved on", entries=("all",))
        outputs, x = [], None
        for item in request.items:
            x = item.x if item.HasField("x") else x
            outputs.append(item.base if item.HasField("base") else x)
        response = pb.ForwardResponse(layout=self._version(), digests=digests, outputs=outputs)
        self.spoil(response)
        return response

    def _abort(self, context: Any, kind: str, *facts: object) -> None:
        from slotcar_sidecar.core import errors

        self._send(context, getattr(errors, kind)(*facts))

    @staticmethod
    def _send(context: Any, error: SlotcarError) -> None:
        details = status.to_status(error).SerializeToString()
        context.set_trailing_metadata(((status.DETAILS_KEY, details),))
        context.abort(status.CODES[error.reason], error.message)


class EndStreamError(Exception):
    """In a script: ends the stream of Forwards without an answer."""


class FakeServer:
    """Serves a FakeEngine on a unix socket in `folder`; `start` serves it again after `stop`."""

    def __init__(
        self, folder: Path, engine: FakeEngine, adapters: adapter_service_pb2_grpc.AdapterServiceServicer | None = None
    ) -> None:
        self.target = f"unix://{folder}/f.sock"
        self._engine = engine
        self._adapters = adapters
        self.start()

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(16))
        engine_service_pb2_grpc.add_EngineServiceServicer_to_server(self._engine, self._server)
        if self._adapters is not None:
            adapter_service_pb2_grpc.add_AdapterServiceServicer_to_server(self._adapters, self._server)
        self._server.add_insecure_port(self.target)
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
