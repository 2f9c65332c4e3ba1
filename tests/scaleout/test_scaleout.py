"""A pool behind Envoy: affinity is worth something, no row is wrong, and a member that was killed comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator

import grpc
import pytest
import torch
from slotcar.v1 import operator_service_pb2, operator_service_pb2_grpc
from slotcar_client import SlotcarError, connect

from tests.scaleout.__main__ import is_good, measure, page
from tests.scaleout.configuration import LOOPBACK
from tests.scaleout.engines import ROWS
from tests.scaleout.pool import SITES, Pool, pool
from tests.scaleout.run import IN_TURN, RING, hits, outage

ADAPTERS, SLOTS = 12, 3


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with pool(tmp_path_factory.mktemp("pool"), ADAPTERS, SLOTS) as running:
        yield running


def test_affinity_hits_more_than_turns(running: Pool) -> None:
    found = hits(running, engines=3, requests=40, blocks=1)
    assert found[RING].ratio > found[IN_TURN].ratio
    for each in found.values():
        assert each.tally.rows
        assert each.tally.wrong_rows == 0
        assert not each.tally.errors


def test_a_member_that_was_killed_serves_again_and_no_row_is_wrong(running: Pool) -> None:
    found = outage(running, requests=15)
    assert found.tally.rows
    assert found.tally.wrong_rows == 0
    assert all(found.served)
    for kind, tally in found.by_kind.items():
        # Who waits sees nothing of it. Who does not sees that a member was away, and nothing else.
        assert set(tally.errors) <= (set() if "waits" in kind else {"UNAVAILABLE"}), kind


def test_an_engine_that_waits_goes_on_when_envoy_comes_back(running: Pool) -> None:
    target, x = f"{LOOPBACK}:{running.ports.engines}", torch.ones(ROWS, SITES["layer.q"][0])
    with (
        connect(target, timeout_seconds=30, credentials=running.credentials, affinity="a00") as client,
        client.session("engine", transport="stream", away="wait") as session,
    ):
        session.set_mapping([("a00", ROWS)], load=True, wait_seconds=20)
        expected = session.forward({"layer.q": x})
        running.proxy.kill()
        running.proxy.start()
        # In the same session, or in one anew where Envoy had not found its member healthy yet.
        found = session.forward({"layer.q": x})
    assert found["layer.q"].equal(expected["layer.q"])


def test_without_the_key_a_call_is_refused_in_words(running: Pool) -> None:
    with (
        connect(f"{LOOPBACK}:{running.ports.engines}", timeout_seconds=20, credentials=running.credentials) as client,
        pytest.raises(SlotcarError, match="slotcar-affinity"),
    ):
        client.session()


def test_no_call_of_an_operator_s_comes_through(running: Pool) -> None:
    tls = running.folder / "engine"
    files = [(tls / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt")]
    with grpc.secure_channel(f"{LOOPBACK}:{running.ports.engines}", grpc.ssl_channel_credentials(*files)) as channel:
        shut_down = operator_service_pb2_grpc.OperatorServiceStub(channel).Shutdown
        with pytest.raises(grpc.RpcError) as refused:
            shut_down(operator_service_pb2.ShutdownRequest(), metadata=[("slotcar-affinity", "a00")], timeout=20)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert all(each.sidecar.process is not None and each.sidecar.process.poll() is None for each in running.members)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_run_that_prints_figures() -> None:
    found = measure(requests=60)
    assert is_good(found), json.dumps(found, indent=2)
    assert "wrong: **0**" in page(found)
