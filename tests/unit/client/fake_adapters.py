"""An AdapterService in this process: a list of sessions, and a folder for what is uploaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf import duration_pb2, timestamp_pb2
from slotcar.v1 import adapter_pb2, adapter_service_pb2_grpc, layout_pb2
from slotcar.v1 import adapter_service_pb2 as pb

from tests.unit.client.fake_engine import A

VERSION = layout_pb2.LayoutVersion(epoch="e1", generation=5)
CAPACITY = {
    "slots": 8,
    "slots_free": 1,
    "slots_filling": 1,
    "slots_occupied": 4,
    "slots_draining": 2,
    "slots_pinned": 3,
    "slots_available": 2,
    "slots_reserved": 1,
    "keeps": 1,
    "slot_bytes": 1000,
    "host_bytes_used": 10,
    "host_bytes_capacity": 100,
    "host_bytes_held": 5,
    "adapters": 7,
    "adapters_capacity": 70,
    "sessions": 3,
    "sessions_capacity": 30,
    "waiting": 1,
    "disk_bytes_used": 20,
    "disk_bytes_capacity": 200,
    "disk_bytes_held": 6,
    "restoring": 4,
}


def sessions() -> list[pb.SessionStatus]:
    """One that is attached with a mapping and holds, and two in their grace."""
    seconds = duration_pb2.Duration(seconds=1, nanos=500_000_000)
    mapping = pb.MappingStatus(
        mapping_id=1, generation=4, refs=[f"sql@{A}"], slots=[2], pinned=True, current=True, idle=seconds
    )
    holds = [
        pb.HoldStatus(hold_id=7, ref=f"sql@{A}", tier=adapter_pb2.TIER_DEVICE, left=seconds),
        pb.HoldStatus(hold_id=8, ref=f"sql@{A}", tier=adapter_pb2.TIER_HOST),
    ]
    engine = pb.SessionStatus(
        session="aaaaaaaa",
        client_name="engine",
        attached=True,
        ranks=2,
        joined=[0, 1],
        reserved_slots=1,
        mappings=[mapping],
        holds=holds,
        forwards_in_flight=3,
    )
    return [engine, *(pb.SessionStatus(session=name * 8, grace_left=seconds) for name in "bc")]


class FakeAdapters(adapter_service_pb2_grpc.AdapterServiceServicer):
    """Notes what it is asked. After each part of an upload it waits for `on_part`."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.parts: list[pb.LoadAdapterStreamRequest] = []
        self.on_part = threading.Event()
        self.on_part.set()
        self.first_part = threading.Event()

    def ListSessions(self, request: pb.ListSessionsRequest, context: Any) -> pb.ListSessionsResponse:
        self.calls.append(request)
        found, start = sessions(), int(request.page_token or 0)
        end = start + request.page_size
        token = str(end) if end < len(found) else ""
        return pb.ListSessionsResponse(sessions=found[start:end], next_page_token=token)

    def EndSession(self, request: pb.EndSessionRequest, context: Any) -> pb.EndSessionResponse:
        return pb.EndSessionResponse(ended=request.session in {session.session for session in sessions()})

    def GetCapacity(self, request: pb.GetCapacityRequest, context: Any) -> pb.GetCapacityResponse:
        return pb.GetCapacityResponse(
            layout=VERSION,
            **CAPACITY,
            restore_failures=[pb.RestoreFailure(ref=f"old@{A}", why_not="SOURCE_UNAVAILABLE: gone")],
        )

    def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Any) -> pb.LoadAdapterResponse:
        self.calls.append(request)
        name = request.ref.partition("@")[0]
        adapter = adapter_pb2.Adapter(name=name, digest=A)
        return pb.LoadAdapterResponse(adapter=adapter, layout=VERSION, hold_tier=request.hold.tier)

    def LoadAdapterStream(
        self, request_iterator: Iterator[pb.LoadAdapterStreamRequest], context: Any
    ) -> pb.LoadAdapterStreamResponse:
        for part in request_iterator:
            self.parts.append(part)
            self.first_part.set()
            self.on_part.wait(20)
        header = self.parts[0].header
        came = [sum(len(getattr(part, kind)) for part in self.parts) for kind in ("config", "weights")]
        if came != [header.config_bytes, header.weights_bytes]:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an upload that is not whole")
        adapter = adapter_pb2.Adapter(name=header.ref.partition("@")[0], digest=A)
        report = adapter_pb2.LoadReport(rank=4, bytes=came[1], warnings=["w"])
        return pb.LoadAdapterStreamResponse(adapter=adapter, report=report, layout=VERSION)

    def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> Iterator[pb.WatchEventsResponse]:
        end = threading.Event()
        context.add_callback(end.set)
        yield pb.WatchEventsResponse(layout=VERSION)
        for kind in (pb.EVENT_KIND_HELD, pb.EVENT_KIND_HOLD_RELEASED, pb.EVENT_KIND_EXPIRED):
            event = pb.Event(kind=kind, time=timestamp_pb2.Timestamp(seconds=9), generation=5)
            yield pb.WatchEventsResponse(event=event, layout=VERSION, missed=1)
        end.wait(20)
