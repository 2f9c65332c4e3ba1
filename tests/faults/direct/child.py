"""Clients of the direct plane in processes of their own, which stop in the middle of a unit: `DirectChild` runs them.

What a client reached, it says as a JSON line on its standard output.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import slotcar_client
import torch
from slotcar_client.session import Session
from slotcar_client.transports.direct import DirectTransport
from slotcar_kernels import cpu, eager, native

from tests.faults.child import REPOSITORY, Child, say

ROWS = 2
LARGE_ROWS = 1 << 15


class DirectChild(Child):
    """Ends with its context. Each line on its standard input is a command, which its role explains."""

    def __init__(self, role: str, target: str, ref: str, site: str, features: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.direct.child", role, target, ref, site, str(features)],
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, command: str) -> None:
        """Sends a line and returns when the client has stopped itself."""
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)
        found = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert found is not None
        assert found.si_code == os.CLD_STOPPED, "the client ended"


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def compute_with_torch_and_stop(when: str) -> None:
    """From now on the next unit stops this process: before its first read, in the middle, or after its last."""
    compute = eager.lora_forward

    def compute_in_parts(plan: Any, x: Any, sites: Any, outs: Any, bases: Any) -> None:
        eager.lora_forward = compute
        for index, (site, out, base) in enumerate(zip(sites, outs, bases, strict=True)):
            if (when, index) in (("first", 0), ("middle", 1)):
                stop()
            compute(plan, x, [site], [out], [base])
        if when == "last":
            stop()

    eager.lora_forward = compute_in_parts


def compute_and_stop() -> None:
    """The units of the next batch stop this process while the compiled kernel runs."""
    guarded = native.PreparedCall.guarded

    def guarded_and_stopped(self: native.PreparedCall, guard: int) -> Callable[[], int]:
        native.PreparedCall.guarded = guarded  # type: ignore[method-assign]
        run = guarded(self, guard)

        def run_and_stop() -> int:
            # It gets the interpreter's lock when the library runs, at the earliest.
            threading.Thread(target=stop).start()
            return run()

        return run_and_stop

    native.PreparedCall.guarded = guarded_and_stopped  # type: ignore[method-assign]


def computing(session: Session, sites: list[str], features: int) -> None:
    """Commands: "compute"; or "kernel", to stop in the middle of a unit. Says the rows of each site, or the error."""
    for line in sys.stdin:
        stops = line.strip() == "kernel"
        if stops:
            compute_and_stop()
        say(computed(session, sites, torch.ones(LARGE_ROWS if stops else ROWS, features)))


def computing_with_torch(session: Session, sites: list[str], features: int) -> None:
    """Commands: "compute"; or "first", "middle" or "last", to stop there in a unit. Says the same."""
    cpu.isa_for = lambda kernel, sites: None
    for line in sys.stdin:
        if line.strip() != "compute":
            compute_with_torch_and_stop(line.strip())
        say(computed(session, sites, torch.ones(ROWS, features)))


def computed(session: Session, sites: list[str], x: torch.Tensor) -> dict[str, Any]:
    try:
        deltas = session.forward(dict.fromkeys(sites, x), row_counts=(len(x),))
    except slotcar_client.SlotcarError as error:
        return {"error": error.reason}
    assert all((delta == delta[0]).all() for delta in deltas.values()), "all rows of x are the same"
    return {"rows": {site: delta[:ROWS].tolist() for site, delta in deltas.items()}, "recoveries": session.recoveries}


def writing(session: Session, sites: list[str], features: int) -> None:
    """Writes a word of the slots that it has mapped; says whether it is still there."""
    transport = session._choice.transport
    assert isinstance(transport, DirectTransport)
    assert transport._forwards is not None
    watch = transport._forwards.slots.watch
    say({"writing": True})
    for _ in sys.stdin:
        ctypes.memset(watch.words.mod_generations.ctypes.data, 0, 8)
        say({"writing": "has written"})


Role = Callable[[Session, list[str], int], None]
ROLES: dict[str, Role] = {role.__name__: role for role in (computing, computing_with_torch, writing)}


def main() -> None:
    role, target, ref, site, features = sys.argv[1:]
    with (
        slotcar_client.connect(target, timeout_seconds=30) as client,
        client.session("child", grace_seconds=30, transport="direct") as session,
    ):
        mapping = session.set_mapping([ref], load=True)
        say({"session": session.session_id, "digests": mapping.entry_digests})
        ROLES[role](session, site.split(","), int(features))


if __name__ == "__main__":
    main()
