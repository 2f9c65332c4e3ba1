"""An engine without a client library: it audits nothing, recovers from nothing and sends what it is told to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import grpc
import numpy as np
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2
from slotcar.v1 import adapter_service_pb2_grpc, error_pb2, tensor_pb2
from slotcar.v1 import engine_service_pb2 as pb

from tests.planes.errors import PlaneError
from tests.planes.stub import PlaneStub, engine_stub

CALL_SECONDS = 30.0


class Refusal(NamedTuple):
    """How a call failed; `reason` is empty when it has no row of the error table."""

    code: grpc.StatusCode
    reason: str
    facts: Mapping[str, str]


def refusal(error: grpc.RpcError) -> Refusal:
    if isinstance(error, PlaneError):
        reason = error_pb2.ErrorReason.Name(error.value.reason).removeprefix("ERROR_REASON_")
        return Refusal(error.code(), reason, dict(error.value.metadata))
    assert isinstance(error, grpc.Call)
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for packed in status_pb2.Status.FromString(value).details:
                if packed.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                    info = error_details_pb2.ErrorInfo.FromString(packed.value)
                    return Refusal(error.code(), info.reason, dict(info.metadata))
    return Refusal(error.code(), "", {})


def duration(seconds: float) -> duration_pb2.Duration:
    value = duration_pb2.Duration()
    value.FromNanoseconds(int(seconds * 1e9))
    return value


def entries(refs: Iterable[str]) -> list[pb.MappingEntry]:
    """An empty ref is the base model."""
    return [pb.MappingEntry(ref=ref) if ref else pb.MappingEntry(base=True) for ref in refs]


def tensor(values: np.ndarray) -> tensor_pb2.TensorRef:
    """A float32 [rows, columns] array as it travels."""
    data = np.ascontiguousarray(values, dtype=np.float32)
    rows, columns = data.shape
    return tensor_pb2.TensorRef(dtype=tensor_pb2.DTYPE_FLOAT32, rows=rows, columns=columns, inline=data.tobytes())


def array(ref: tensor_pb2.TensorRef) -> np.ndarray:
    return np.frombuffer(ref.inline, dtype=np.float32).reshape(ref.rows, ref.columns).copy()


class RawEngine:
    """A channel of its own and, after `open`, one session, whose Forwards travel over `plane`."""

    def __init__(self, target: str, plane: str = "unary") -> None:
        # Channels of one process to one target share a connection by default.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        # A server that is back is found at once.
        options += [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]
        address = target.replace("unix://", "unix:").removeprefix("tcp://")
        self.channel = grpc.insecure_channel(address, options=options)
        self.engine = engine_stub(self.channel, target, plane)
        self.adapters = adapter_service_pb2_grpc.AdapterServiceStub(self.channel)
        self.session = ""
        self.epoch = ""
        self.stream: Any = None

    def open(self, grace_seconds: float = 30.0, resume: str = "", *, ranks: int = 1, reserved_slots: int = 0) -> str:
        """Opens a session and returns its id."""
        request = pb.OpenSessionRequest(client_name="raw", resume_session=resume, grace=duration(grace_seconds))
        request.ranks, request.reserved_slots = ranks, reserved_slots
        self.stream = self.engine.OpenSession(request)
        first = next(self.stream)
        self.session, self.epoch = first.opened.session, first.version.epoch
        return self.session

    def map(
        self, *refs: str, mapping_id: int = 1, load: bool = False, wait_seconds: float = 0.0
    ) -> pb.SetMappingResponse:
        """Sets a mapping; an empty ref is the base model."""
        request = pb.SetMappingRequest(session=self.session, mapping_id=mapping_id, entries=entries(refs), load=load)
        request.wait.CopyFrom(duration(wait_seconds))
        return self.engine.SetMapping(request, timeout=CALL_SECONDS)

    def hold(self, ref: str, hold_id: int = 1, seconds: float | None = None) -> pb.HoldAdapterResponse:
        """Holds an adapter's bytes, None until they are released."""
        request = pb.HoldAdapterRequest(session=self.session, hold_id=hold_id, ref=ref)
        if seconds is not None:
            request.duration.CopyFrom(duration(seconds))
        return self.engine.HoldAdapter(request, timeout=CALL_SECONDS)

    def request(
        self, generation: int, row_counts: Sequence[int], inputs: Mapping[str, np.ndarray], mapping_id: int = 1
    ) -> pb.ForwardRequest:
        items = []
        before: np.ndarray | None = None
        for site, x in inputs.items():
            items.append(pb.ForwardItem(site=site, x=None if x is before else tensor(x)))
            before = x
        return pb.ForwardRequest(
            session=self.session, mapping_id=mapping_id, generation=generation, row_counts=row_counts, items=items
        )

    def forward(self, request: pb.ForwardRequest) -> pb.ForwardResponse:
        return self.engine.Forward(request, timeout=CALL_SECONDS)

    def streamed(self, *requests: pb.ForwardRequest) -> list[pb.ForwardStreamResponse]:
        """The answers to requests that are sent all at once."""
        sent = iter([pb.ForwardStreamRequest(forward=request) for request in requests])
        return list(self.engine.ForwardStream(sent, timeout=CALL_SECONDS))

    def close_session(self) -> None:
        self.engine.CloseSession(pb.CloseSessionRequest(session=self.session), timeout=CALL_SECONDS)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.cancel()
        if isinstance(self.engine, PlaneStub):
            self.engine.close()
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
