"""Clients in processes of their own, to be killed and paused: `Child` runs `main` of this module.

What a client reached, it says as a JSON line on its standard output. Only `session` imports torch.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from slotcar.v1 import adapter_service_pb2
from slotcar.v1 import engine_service_pb2 as pb

from tests.faults.raw import CALL_SECONDS, RawEngine

REPOSITORY = Path(__file__).resolve().parents[2]
END_SECONDS = 30.0


class Child:
    """A client process; ends with its context."""

    def __init__(self, role: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.child", role, *arguments],
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self) -> Any:
        """What the client says next."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the client ended with {self.process.wait(END_SECONDS)}"
        return json.loads(line)

    def ask(self, command: str) -> Any:
        """Sends a line; returns what the client says next."""
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)
        return self.read()

    def kill(self) -> None:
        """kill -9, and wait for the process to be gone."""
        self.process.kill()
        self.process.wait(END_SECONDS)

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


def load(target: str, name: str, source: str) -> None:
    """Says when the server has begun a load, and then its digest."""
    with RawEngine(target) as engine:
        request = adapter_service_pb2.LoadAdapterRequest(ref=name, source=source)
        answer = engine.adapters.LoadAdapter.future(request, timeout=CALL_SECONDS)
        # One connection delivers its calls in order: when this one is answered, the one before has begun.
        health_pb2_grpc.HealthStub(engine.channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS)
        say({"done": answer.done()})
        try:
            say({"digest": answer.result().adapter.digest})
        except grpc.RpcError as error:
            say({"error": error.code().name})


def pin(target: str, grace: str, *refs: str) -> None:
    """Says its session once it has mapped `refs`, and stays."""
    with RawEngine(target) as engine:
        engine.open(float(grace))
        engine.map(*refs)
        say({"session": engine.session})
        sys.stdin.read()


def flood(target: str, grace: str, ref: str, site: str, features: str) -> None:
    """Sends Forwards ahead without end, a few at a time; says its session at the first answer."""
    with RawEngine(target) as engine:
        engine.open(float(grace))
        generation = engine.map(ref).generation
        x = np.ones((256, int(features)), dtype=np.float32)
        request = pb.ForwardStreamRequest(forward=engine.request(generation, [256], {site: x}))
        answers = engine.engine.ForwardStream(itertools.repeat(request))
        for index, answer in enumerate(answers):
            assert answer.WhichOneof("result") == "forward", answer
            if index == 0:
                say({"session": engine.session})


def crowd(target: str, grace: str, count: str, ref: str, site: str, features: str) -> None:
    """`count` engines with a connection, a session, a mapping and an open stream of Forwards each."""
    engines = []
    x = np.ones((4, int(features)), dtype=np.float32)
    for _ in range(int(count)):
        engine = RawEngine(target)
        engine.open(float(grace))
        request = engine.request(engine.map(ref).generation, [4], {site: x})
        engine.forward(request)
        answers = engine.engine.ForwardStream(_once_then_never(pb.ForwardStreamRequest(forward=request)))
        next(answers)
        engines.append((engine, answers))
    say({"sessions": [engine.session for engine, _ in engines]})
    sys.stdin.read()


def _once_then_never(request: pb.ForwardStreamRequest) -> Iterator[pb.ForwardStreamRequest]:
    yield request
    threading.Event().wait()


def session(target: str, grace: str, ref: str, site: str, features: str) -> None:
    """The real client: for each line on standard input it computes two rows of ones, and says them or the error."""
    import slotcar_client
    import torch

    with (
        slotcar_client.connect(target, timeout_seconds=CALL_SECONDS) as client,
        client.session("paused", grace_seconds=float(grace)) as engine,
    ):
        mapping = engine.set_mapping([(ref, 2)])
        say({"session": engine.session_id, "digests": mapping.entry_digests})
        for _ in sys.stdin:
            try:
                delta = engine.forward({site: torch.ones(2, int(features))})[site]
            except slotcar_client.SlotcarError as error:
                say({"error": error.reason})
            else:
                say({"delta": delta.tolist(), "recoveries": engine.recoveries})


ROLES = {role.__name__: role for role in (load, pin, flood, crowd, session)}


def main() -> None:
    role, *arguments = sys.argv[1:]
    ROLES[role](*arguments)


if __name__ == "__main__":
    main()
