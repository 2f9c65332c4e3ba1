"""How many calls several engines make at a time: `python -m tests.bench.clients [--quick|--smoke]`.

1, 2 and 8 client processes send 16 KiB of BASE rows to one sidecar and get them back, as fast as they can, for a while
on each plane in turn; the peer is a bare gRPC server that does the same with unary calls. Times are of single calls, so
p99 is what one call in a hundred takes; `calls_per_s` and `peer_calls_per_s` in the case are of all clients together.
CPU times are those of all processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import slotcar_client
import torch
from slotcar_client import BASE

from tests.bench.grpc_echo import echo_call, echo_server
from tests.bench.harness import Peer, Record, Took
from tests.bench.sides import cpu_nanoseconds, took
from tests.bench.sizes import Size, size_wanted
from tests.bench.stage import Site, serving

SITE = Site("echo", 16, 4096)
BYTES = 16 << 10
COUNTS = (1, 2, 8)
PLANES = ("stream", "ring")
PEER: Peer = "grpc-unary"


# In a client's process


def client(orders: Connection, target: str, echo: str) -> None:
    """Says on which planes it can call; then, for each (plane, seconds), calls that long and sends all times."""
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        calls = dict(_calls(stack, target, echo))
        orders.send(tuple(calls))
        while (order := orders.recv()) is not None:
            plane, seconds = order
            orders.send(_call_for(seconds, calls[plane]))


def _calls(stack: contextlib.ExitStack, target: str, echo: str) -> Iterator[tuple[str, Callable[[], object]]]:
    x, base = torch.randn(1, SITE.in_features), torch.randn(1, SITE.out_features)
    inputs, bases = {SITE.name: x}, {SITE.name: base}
    sidecar = stack.enter_context(slotcar_client.connect(target))
    for plane in PLANES:
        with contextlib.suppress(slotcar_client.SlotcarError):
            session = stack.enter_context(sidecar.session("bench", transport=plane))
            session.set_mapping([(BASE, 1)])
            yield plane, lambda session=session: session.forward(inputs, base=bases)  # type: ignore[misc]
    send, payload = stack.enter_context(echo_call(echo)), base.numpy().tobytes()
    yield PEER, lambda: send(payload)


def _call_for(seconds: float, call: Callable[[], object]) -> array[int]:
    walls, clock = array("Q"), time.perf_counter_ns
    end = now = clock()
    end += int(seconds * 1e9)
    while now < end:
        call()
        start, now = now, clock()
        walls.append(now - start)
    return walls


# In the benchmark's


@dataclass
class Clients:
    """Client processes; what each turn of a plane had, in order."""

    pids: list[int]
    orders: list[Connection]
    planes: tuple[str, ...] = ()
    times: dict[str, list[Took]] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)

    def turn(self, plane: str, seconds: float, servers: Sequence[int]) -> None:
        cpu = cpu_nanoseconds(*self.pids, *servers)
        for order in self.orders:
            order.send((plane, seconds))
        walls = [wall for order in self.orders for wall in order.recv()]
        cpu = cpu_nanoseconds(*self.pids, *servers) - cpu
        self.times.setdefault(plane, []).extend(took(walls, cpu))
        self.rates.setdefault(plane, []).append(len(walls) / seconds)


@contextlib.contextmanager
def clients(count: int, target: str, echo: str) -> Iterator[Clients]:
    """So many processes, which know their planes."""
    # The server of forks imports what takes seconds, once, and has neither threads nor channels.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.bench.stage"])
    pairs = [context.Pipe() for _ in range(count)]
    processes = [context.Process(target=client, args=(theirs, target, echo)) for _, theirs in pairs]
    for process in processes:
        process.start()
    orders = [mine for mine, _ in pairs]
    try:
        planes = {order.recv() for order in orders}
        pids = [process.pid for process in processes if process.pid is not None]
        yield Clients(pids, orders, planes.pop())
    finally:
        for order in orders:
            with contextlib.suppress(OSError):
                order.send(None)
        for process in processes:
            process.join()


def run(size: Size) -> None:
    """Prints a record for each number of clients and plane."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slotcar-bench-")))
        stage = stack.enter_context(serving([SITE], slots=1, rank=16))
        with stage.sessions("clients", PLANES):
            pass  # says which planes there are not
        echo = stack.enter_context(echo_server(folder))
        for count in size.pick(COUNTS[:1], COUNTS, COUNTS):
            with clients(count, stage.sidecar.target, echo.address) as all_clients:
                _measure(all_clients, size, [stage.pid, echo.pid])
                _print(all_clients, count)


def _measure(all_clients: Clients, size: Size, servers: Sequence[int]) -> None:
    """One round warms up; every plane has its turn in each, in alternating order."""
    for number in range(-1, size.pick(1, 15, 40)):
        planes = all_clients.planes if number % 2 else all_clients.planes[::-1]
        for plane in planes:
            all_clients.turn(plane, size.pick(0.02, 0.15, 0.3), servers)
        if number < 0:
            all_clients.times.clear()
            all_clients.rates.clear()


def _print(all_clients: Clients, count: int) -> None:
    times, rates = all_clients.times, all_clients.rates
    for plane in all_clients.planes:
        if plane != PEER:
            ours, theirs = (round(statistics.median(rates[side])) for side in (plane, PEER))
            case = {"clients": count, "bytes": BYTES, "plane": plane, "calls_per_s": ours, "peer_calls_per_s": theirs}
            Record.of("clients", case, ("slotcar", times[plane]), (PEER, times[PEER])).printed()


def main() -> None:
    run(size_wanted(__doc__))


if __name__ == "__main__":
    main()
