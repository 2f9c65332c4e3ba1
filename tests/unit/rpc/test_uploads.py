"""Uploads that do not come to their end: each is given up, and has no effect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from slotcar.v1 import adapter_service_pb2 as pb
from slotcar_sidecar.core.errors import RequestInvalid
from slotcar_sidecar.core.reconcile import DesiredStatus
from slotcar_sidecar.rpc import adapter_service
from slotcar_sidecar.rpc.adapter_service import AdapterService

from tests.fakes.parts import Bench, make_bench

HEADER = pb.LoadAdapterStreamRequest(header=pb.UploadHeader(ref="a", config_bytes=1 << 10, weights_bytes=1 << 10))
CONTEXT = cast(Any, None)


@pytest.fixture
async def bench() -> Bench:
    return make_bench(1)


async def silent() -> AsyncIterator[pb.LoadAdapterStreamRequest]:
    yield HEADER
    await asyncio.Event().wait()


async def trickling() -> AsyncIterator[pb.LoadAdapterStreamRequest]:
    yield HEADER
    while True:
        await asyncio.sleep(0.001)
        yield pb.LoadAdapterStreamRequest(config=b"")


@pytest.mark.parametrize(
    ("parts", "rate", "found"), [(silent, 1, "nothing for 0.05 s"), (trickling, 1 << 30, "too little within 0 s")]
)
async def test_an_upload_that_does_not_come_on_is_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, parts: Any, rate: int, found: str
) -> None:
    monkeypatch.setattr(adapter_service, "_MAX_SILENCE_SECONDS", 0.05)
    monkeypatch.setattr(adapter_service, "_LEAST_BYTES_PER_SECOND", rate)
    service = AdapterService(bench.cache, 1.0, DesiredStatus)
    with pytest.raises(RequestInvalid) as refusal:
        await service.LoadAdapterStream(parts(), CONTEXT)
    assert refusal.value.field == "part"
    assert refusal.value.facts["found"] == found
    assert not len(bench.cache.residency.names)
    with bench.cache.upload(1, 1):
        pass
