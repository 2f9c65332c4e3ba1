"""Says which data planes the settings and the machine allow, and serves those in shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import platform
import signal
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.config import PLANES, Config, UnixAddress
from slotcar_sidecar.device.cpu import CpuDevice
from slotcar_sidecar.device.threads import compute_alone
from slotcar_sidecar.ops.metrics import Metrics
from slotcar_sidecar.process import devices
from slotcar_sidecar.process.sockets import Doors, handshake_path, listen_for_handshakes
from slotcar_sidecar.ring.handshake import Handshakes
from slotcar_sidecar.ring.rings import RingLimits, Rings, Surroundings
from slotcar_sidecar.ring.thread import RingThread
from slotcar_sidecar.rpc.access import Access

__all__ = ["Shared", "offered_planes", "serve_rings"]

# How long a thread of rings that wakes up waits for one that computes in Python; 5 ms, the default, are 300 Forwards.
_SWITCH_SECONDS = 0.0005
_ORDERED_MACHINES = ("x86_64", "AMD64")


def offered_planes(config: Config) -> tuple[str, ...]:
    """What the settings and this machine allow: shared memory needs a unix socket, and ordered reads and writes.

    Whether slots on a GPU can be had by engines is known once they are there: then a hand-shake says so.
    """
    is_ordered = platform.machine() in _ORDERED_MACHINES or CpuDevice.kernel != "torch"
    shares = is_ordered and any(isinstance(address, UnixAddress) for address in config.addresses)
    possible = {"stream": True, "ring": shares, "direct": shares}
    return tuple(plane for plane in PLANES if plane in config.planes and possible[plane])


@dataclass(frozen=True, slots=True)
class Shared:
    """What rings share with the rest of the process; `access` is None where there is no policy."""

    cache: AdapterCache
    metrics: Metrics
    access: Access | None


def serve_rings(config: Config, planes: tuple[str, ...], parts: Shared, resources: contextlib.ExitStack) -> Rings:
    """Starts the threads of rings, none without a plane in shared memory, and listens for hand-shakes."""
    cache, metrics, access = parts.cache, parts.metrics, parts.access
    sys.setswitchinterval(_SWITCH_SECONDS)
    # It has no effect but that a system call of the thread that gets it returns.
    signal.signal(signal.SIGURG, lambda *_: None)
    threads: dict[RingThread, threading.Thread] = {}

    def call_back(ring: RingThread) -> None:
        ident = threads[ring].ident
        assert ident is not None
        signal.pthread_kill(ident, signal.SIGURG)

    tell = asyncio.get_running_loop().call_soon_threadsafe
    around = Surroundings(
        tell, call_back, functools.partial(devices.slots_descriptor, cache.device), metrics.rpc, access
    )
    shared = tuple(plane for plane in planes if plane != "stream")
    limits = RingLimits(shared, config.ring_bytes, config.max_rings)
    rings = Rings(cache, limits, config.compute_threads if shared else 0, around)
    for number, ring in enumerate(rings.threads):
        threads[ring] = threading.Thread(target=_run_ring, args=(ring,), name=f"ring-{number}")
        threads[ring].start()
    resources.callback(_end_rings, rings, threads.values())
    handshakes = Handshakes(rings, version("slotcar"), metrics.rpc, access)
    resources.callback(handshakes.close)
    for address in config.addresses if config.shakes_hands else ():
        if isinstance(address, UnixAddress):
            path = handshake_path(address)
            handshakes.listen(listen_for_handshakes(path, Doors.of(config)), path)
    return rings


def _run_ring(ring: RingThread) -> None:
    compute_alone()
    ring.run()


def _end_rings(rings: Rings, threads: Iterable[threading.Thread]) -> None:
    rings.close()
    for thread in threads:
        thread.join()
    rings.finish()
