"""A message of many small parts is refused by their number, before each becomes an object."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from slotcar.v1 import engine_service_pb2 as pb
from slotcar.v1 import engine_service_pb2_grpc, model_pb2

from tests.server import SidecarProcess

MANY = 3_000_000
# What gRPC and protobuf take for an empty message is about 210; a Python object for each comes on top of it.
BYTES_PER_PART = 300
ENTRY = b"\x1a\x00"  # one empty entry of SetMappingRequest
ITEM = b"\x2a\x00"  # one empty item of ForwardRequest
SITE = b"\x0a\x00"  # one empty site of ModelSpec


def test_many_small_parts_cost_little(
    start_sidecar: Callable[..., SidecarProcess], tmp_path_factory: pytest.TempPathFactory
) -> None:
    sidecar = start_sidecar(tmp_path_factory.mktemp("root"))
    assert sidecar.process is not None
    with grpc.insecure_channel(
        sidecar.target.replace("unix://", "unix:"), [("grpc.max_send_message_length", -1)]
    ) as channel:
        engine = engine_service_pb2_grpc.EngineServiceStub(channel)
        spec = model_pb2.ModelSpec.FromString(SITE * MANY)
        calls = [
            lambda: engine.SetMapping(pb.SetMappingRequest.FromString(ENTRY * MANY)),
            lambda: engine.Forward(pb.ForwardRequest.FromString(ITEM * MANY)),
            lambda: engine.Forward(pb.ForwardRequest(row_counts=range(MANY))),
            lambda: next(engine.OpenSession(pb.OpenSessionRequest(model_spec=spec))),
        ]
        before = peak_bytes(sidecar.process.pid)
        for call in calls:
            with pytest.raises(grpc.RpcError) as refusal:
                call()
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    grown = peak_bytes(sidecar.process.pid) - before
    assert grown < MANY * BYTES_PER_PART, f"{grown / MANY:.0f} bytes for each part"


def peak_bytes(pid: int) -> int:
    """The most memory that the process ever had."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]
