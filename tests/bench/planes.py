"""What one Forward costs on each plane: `python -m tests.bench.planes [--quick|--smoke]`.

`echo` is a mapping of BASE entries in ADD mode, so that the bytes of `base` come back and nothing is computed: 16 or
128 KiB each way. `rank-16` is the delta of one adapter of hidden size 4096, one row for each 16 KiB. Ours is the whole
call of the public client, from tensor to tensor; where `call` is `kernel`, it is a prepared call with the checks of the
direct plane, and the peer is the same without them.

Peers: two C processes with shared memory and two eventfds (as many copies as ours), a bare gRPC unary call that sends
the same bytes to and fro, and the same kernel, prepared once, in this process. Each is measured with all processes on
one core, where a wake-up is cheapest, and on all cores as the system places them. CPU times are those of all processes.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from slotcar_client import BASE, Session
from slotcar_kernels import cpu, native
from slotcar_kernels.plan import Plan, plan_rows

from tests.bench import eventfd
from tests.bench.cores import placed
from tests.bench.grpc_echo import Echo, echo_call, echo_server
from tests.bench.guarded import prepared_calls
from tests.bench.harness import Call, Peer, Record, Took
from tests.bench.sides import Turn, in_turns, repeated
from tests.bench.sizes import Size, size_wanted
from tests.bench.slots import PrivateSlots
from tests.bench.stage import PLANES, Site, Stage, adapter_weights, serving, skipped, write_adapter

HIDDEN = 4096
RANK = 16
ECHO_IN = 16
PEERS: tuple[Peer, ...] = ("eventfd", "grpc-unary", "in-process")
PAYLOADS = (16 << 10, 128 << 10)
ITEM_BYTES = 4
PROJECTION = Site("model.layers.0.self_attn.q_proj", HIDDEN, HIDDEN)
_SLOW_SHARE = 4
"""Calls that take most of a millisecond get a part of the calls of a turn."""


@dataclass(frozen=True)
class Work:
    """What one call computes: `size_bytes` come back."""

    name: str
    site: Site
    rows: int
    size_bytes: int

    @property
    def is_echo(self) -> bool:
        return self.name == "echo"

    @property
    def plan(self) -> Plan:
        return plan_rows([(None if self.is_echo else 0, self.rows)])

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = torch.randn(self.rows, self.site.in_features)
        return x, torch.randn(self.rows, self.site.out_features) if self.is_echo else None


def works() -> list[Work]:
    echoes = [
        Work("echo", Site(f"echo_{size >> 10}", ECHO_IN, size // ITEM_BYTES), rows=1, size_bytes=size)
        for size in PAYLOADS
    ]
    row_bytes = HIDDEN * ITEM_BYTES
    return [*echoes, *(Work("rank-16", PROJECTION, size // row_bytes, size) for size in PAYLOADS)]


@dataclass(frozen=True)
class Bench:
    """Everything that runs, and how much of it is measured."""

    stage: Stage
    sessions: dict[str, Session]
    slots: PrivateSlots
    echo: Echo
    ping_pong: Path | None
    size: Size

    def measure(self, work: Work, cores: int) -> None:
        """Prints a record for each plane and peer of a work."""
        with contextlib.ExitStack() as stack:
            turns = {**self._ours(work), **self._peers(work, stack), **self._prepared(work)}
            times = in_turns(turns, self.size.pick(1, 15, 40))
        case = {"work": work.name, "bytes": work.size_bytes, "cores": cores}
        near, echo = cores == 1, work.is_echo and work.size_bytes == PAYLOADS[0]
        for plane in self.sessions:
            for peer in PEERS:
                if peer in times:
                    target = near and echo and plane == "ring" and peer != "in-process"
                    _print({**case, "plane": plane, "call": "client"}, target, (times[plane], peer, times[peer]))
        if "guarded" in times:
            sides = (times["guarded"], PEERS[2], times["unguarded"])
            _print({**case, "plane": "direct", "call": "kernel"}, near, sides)

    def _ours(self, work: Work) -> dict[str, Turn]:
        x, base = work.tensors()
        calls = self.size.pick(2, 40, 100)
        turns = {}
        for plane, session in self.sessions.items():
            call = _forward(session, work, x, base)
            share = calls if plane in ("ring", "direct") else max(calls // _SLOW_SHARE, 1)
            turns[plane] = Turn(repeated(call, [self.stage.pid]), share)
        return turns

    def _peers(self, work: Work, stack: contextlib.ExitStack) -> dict[str, Turn]:
        calls = self.size.pick(2, 40, 100)
        payload = os.urandom(work.size_bytes)
        send = stack.enter_context(echo_call(self.echo.address))
        turns = {
            "grpc-unary": Turn(repeated(lambda: send(payload), [self.echo.pid]), max(calls // _SLOW_SHARE, 1)),
            "in-process": Turn(repeated(self._local(work)), calls),
        }
        if work.is_echo and self.ping_pong is not None:
            turns["eventfd"] = Turn(stack.enter_context(eventfd.ping_pong(self.ping_pong, work.size_bytes)), calls)
        return turns

    def _local(self, work: Work) -> Call:
        x, base = work.tensors()
        out = torch.empty(work.rows, work.site.out_features)
        return cpu.prepare(work.plan, x, [self.slots.sites[work.site.name]], [out], [base])

    def _prepared(self, work: Work) -> dict[str, Turn]:
        if native.library() is None:
            return {}
        x, base = work.tensors()
        calls = prepared_calls(work.plan, x, self.slots.sites[work.site.name], base)
        count = self.size.pick(2, 40, 100)
        return {name: Turn(repeated(call), count) for name, call in zip(("guarded", "unguarded"), calls, strict=True)}


def _forward(session: Session, work: Work, x: torch.Tensor, base: torch.Tensor | None) -> Call:
    """A call whose result was looked at once."""
    session.set_mapping([(BASE if work.is_echo else "sql", work.rows)])
    inputs = {work.site.name: x}
    bases = None if base is None else {work.site.name: base}

    def call() -> dict[str, torch.Tensor]:
        return session.forward(inputs, base=bases)

    found = call()[work.site.name]
    assert base is None or torch.equal(found, base)
    assert found.abs().sum() > 0
    return call


def _print(case: dict[str, Any], target: bool, sides: tuple[Sequence[Took], Peer, Sequence[Took]]) -> None:
    ours, peer, theirs = sides
    marked = {**case, "target": True} if target else case
    Record.of("planes", marked, ("slotcar", ours), (peer, theirs)).printed()


@contextlib.contextmanager
def built(size: Size) -> Iterator[Bench]:
    """Starts everything."""
    sites = list({work.site: None for work in works()})
    weights = adapter_weights([PROJECTION], rank=RANK, dtype=torch.float32, seed=0)
    slots = PrivateSlots(sites, 1, RANK, torch.float32, "anonymous")
    slots.fill(0, weights)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slotcar-bench-")))
        try:
            program = eventfd.compiled(folder)
        except eventfd.Unavailable as error:
            skipped("planes", {"peer": "eventfd"}, str(error))
            program = None
        stage = stack.enter_context(serving(sites, slots=1, rank=RANK))
        sessions = stack.enter_context(stage.sessions("planes", PLANES))
        stage.client.load("sql", write_adapter(stage.root / "sql", weights))
        echo = stack.enter_context(echo_server(folder))
        yield Bench(stage, sessions, slots, echo, program, size)


def main() -> None:
    size = size_wanted(__doc__)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    with built(size) as bench:
        for chosen in (cores[:1], cores)[: len(cores)]:
            with placed(chosen, bench.stage.pid, bench.echo.pid):
                for work in works():
                    bench.measure(work, len(chosen))


if __name__ == "__main__":
    main()
