"""A GPU that is lost, or warmed up, as the server sees it. Needs gRPC, which a machine with a GPU may not have."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("grpc_health")

from grpc_health.v1 import health_pb2
from slotcar_sidecar.core.errors import DeviceLost
from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.model import ModelSpec, Site
from slotcar_sidecar.device.cuda.device import CudaDevice
from slotcar_sidecar.device.found import why_no_gpu
from slotcar_sidecar.process import devices
from slotcar_sidecar.rpc.health import Health

from tests.fakes.machine import HostMachine
from tests.fakes.weights import fake_weights

pytestmark = pytest.mark.gpu

MODEL = ModelSpec.of([Site("k", 32, 24)])
WEIGHTS = fake_weights(MODEL, {"k": 3})
SERVING, NOT_SERVING = (getattr(health_pb2.HealthCheckResponse, name) for name in ("SERVING", "NOT_SERVING"))
SERVICES = ("liveness", "readiness", "")


class Breaking(HostMachine):
    """Lost at the next wait for its work."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses.append(self._break)

    def _break(self, _stream: int) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")


def statuses(health: Health) -> list[object]:
    return [health.status(service) for service in SERVICES]


async def lose() -> None:
    machine, health = Breaking(), Health()
    device = CudaDevice(machine, 2, 16)
    device.shape(MODEL)
    health.start()
    watching = asyncio.create_task(devices.watch(device, health))
    device.fill(SlotId(0), WEIGHTS)
    await asyncio.sleep(0)
    assert statuses(health) == [SERVING] * 3
    machine.lost = True
    with pytest.raises(DeviceLost):
        await asyncio.to_thread(device.fill, SlotId(1), WEIGHTS)
    await asyncio.wait_for(watching, 10)
    health.end()
    assert statuses(health) == [NOT_SERVING] * 3
    assert not device.when_lost


def test_health_says_that_the_device_is_lost() -> None:
    asyncio.run(lose())


async def stop_while_warming() -> int:
    device, stop = CudaDevice(HostMachine(), 2, 16), asyncio.Event()
    await devices.warm_up(device, 1, stop, ThreadPoolExecutor(1))  # without a model there is nothing to do
    device.shape(MODEL)
    stop.set()
    with ThreadPoolExecutor(1) as pool:
        await devices.warm_up(device, 1, stop, pool)
    return sum(len(lane._launches) for lane in device._lanes)


def test_a_start_that_is_stopped_warms_nothing_more() -> None:
    assert asyncio.run(stop_while_warming()) == 0


def test_ranks_that_kernels_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_no_gpu(256) == ""
    assert why_no_gpu(257) == "its kernels take ranks up to 256, not 257"
