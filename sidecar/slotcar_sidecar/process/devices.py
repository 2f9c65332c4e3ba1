"""Makes the device that the settings name, warms it up, and tells health when it is lost."""

from __future__ import annotations

import asyncio
import functools
import logging
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from slotcar_sidecar.config import Config
from slotcar_sidecar.core.errors import RequestInvalid
from slotcar_sidecar.core.ports import Device
from slotcar_sidecar.device.cpu import CpuDevice
from slotcar_sidecar.device.found import why_no_gpu
from slotcar_sidecar.process.sockets import StartError
from slotcar_sidecar.ring.rings import SlotsDescriptor
from slotcar_sidecar.rpc.health import Health

if TYPE_CHECKING:
    from slotcar_sidecar.device.cuda.device import CudaDevice

__all__ = ["is_on_gpu", "make_device", "slots_descriptor", "warm_up", "watch"]

_log = logging.getLogger("slotcar")


def is_on_gpu(config: Config) -> bool:
    """Where the settings, and this machine, put the slots. Raises StartError for a GPU that cannot be used."""
    if config.device == "cpu":
        return False
    why_not = why_no_gpu(config.max_rank)
    if why_not and config.device == "cuda":
        raise StartError(f"--device cuda cannot be used: {why_not}")
    return not why_not


def make_device(config: Config, epoch: str) -> CpuDevice | CudaDevice:
    """Raises StartError."""
    if not is_on_gpu(config):
        return CpuDevice(config.slots, config.max_rank, config.dtype, epoch=epoch)
    from slotcar_sidecar.device.cuda.device import CudaDevice  # which needs Triton
    from slotcar_sidecar.device.cuda.machine import Gpu

    return CudaDevice(Gpu(), config.slots, config.max_rank, config.dtype, epoch=epoch)


def slots_descriptor(device: Device) -> SlotsDescriptor | None:
    """What clients of the direct plane map; None before the model is known.

    Raises RequestInvalid where the slots are on a GPU and no other process can have them.
    """
    if isinstance(device, CpuDevice):
        file, weights = device.file, None
    else:
        gpu = _gpu(device)
        file, memory = gpu.file, gpu.memory
        if memory is not None and file is None:
            raise RequestInvalid(
                "plane", found="direct", wanted=f"another: the slots cannot be shared: {memory.why_not}"
            )
        weights = None if memory is None else memory.descriptor
    return None if file is None else SlotsDescriptor(file.descriptor, file.geometry.total_bytes, weights)


async def warm_up(device: Device, lanes: int, stop: asyncio.Event, pool: Executor) -> None:
    """Compiles and captures what Forwards will need, or returns early on `stop`; at once without a GPU or a model."""
    if isinstance(device, CpuDevice) or not device.slot_bytes():
        return
    gpu, loop = _gpu(device), asyncio.get_running_loop()
    start = loop.time()
    await loop.run_in_executor(pool, gpu.warm_up, lanes, stop.is_set)
    _log.info("warm", extra={"fields": {"lanes": lanes, "seconds": round(loop.time() - start, 1)}})


async def watch(device: Device, health: Health) -> None:
    """Ends when the device is lost: a process has no other, so neither liveness nor readiness is true any more."""
    if isinstance(device, CpuDevice):
        return
    gpu, lost = _gpu(device), asyncio.Event()
    tell = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, lost.set)
    gpu.when_lost.append(tell)
    try:
        if not gpu.lost:
            await lost.wait()
    finally:
        gpu.when_lost.remove(tell)
    _log.error("the device is lost", extra={"fields": {"reason": gpu.lost}})
    health.lose()


def _gpu(device: Device) -> CudaDevice:
    from slotcar_sidecar.device.cuda.device import CudaDevice

    assert isinstance(device, CudaDevice)
    return device
