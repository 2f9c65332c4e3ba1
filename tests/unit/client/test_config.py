"""Where a sidecar is, as callers write it and as gRPC does."""

from __future__ import annotations

import pytest
import slotcar_client
from slotcar_client.config import DEFAULT_TARGET, default_target, grpc_target
from slotcar_sidecar.config import Config


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ("unix:///run/s.sock", "unix:/run/s.sock"),
        ("unix:///run/s#1?%41.sock", "unix:/run/s%231%3F%2541.sock"),
        ("unix:s.sock", "unix:s.sock"),
        ("tcp://127.0.0.1:50051", "dns:///127.0.0.1:50051"),
        ("localhost:50051", "dns:///localhost:50051"),
        ("tcp://[::1]:50051", "dns:///[::1]:50051"),
    ],
)
def test_targets(target: str, wanted: str) -> None:
    assert grpc_target(target) == wanted


@pytest.mark.parametrize("target", ["", "unix:", "localhost", "tcp://h", "tcp://:1", "http://h:1", "h:port", "/s.sock"])
def test_other_targets_are_refused_before_any_call(target: str) -> None:
    with pytest.raises(slotcar_client.RequestInvalid):
        slotcar_client.connect(target)


def test_the_environment_names_the_target_else_the_servers_own_default() -> None:
    assert default_target({"SLOTCAR_TARGET": "unix:///a"}) == "unix:///a"
    assert default_target({"SLOTCAR_TARGET": ""}) == default_target({}) == DEFAULT_TARGET
    assert Config().listen == (DEFAULT_TARGET,)


def test_a_deadline_must_be_in_the_future() -> None:
    with pytest.raises(slotcar_client.RequestInvalid):
        slotcar_client.connect("unix:///a", timeout_seconds=0)
