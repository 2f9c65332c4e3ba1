"""A bare gRPC server that answers with the bytes that it got: the least that a unary call costs.

`python -m tests.bench.grpc_echo ADDRESS` serves until its standard input ends.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import grpc

__all__ = ["Echo", "echo_call", "echo_server"]

_METHOD = "/bench.Echo/Echo"
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_START_SECONDS = 60.0


class Echo(NamedTuple):
    """A server that runs."""

    address: str
    pid: int


@contextlib.contextmanager
def echo_server(folder: Path) -> Iterator[Echo]:
    """Serves on a unix socket in `folder`, in a process of its own."""
    address = f"unix:{folder / 'echo.sock'}"
    command = [sys.executable, "-m", "tests.bench.grpc_echo", address]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(_START_SECONDS)
        yield Echo(address, process.pid)


@contextlib.contextmanager
def echo_call(address: str) -> Iterator[Callable[[bytes], bytes]]:
    """A call that returns what it is given, by way of the server."""
    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        call: Any = channel.unary_unary(_METHOD)
        yield call


class _Echo(grpc.GenericRpcHandler):
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.unary_unary_rpc_method_handler(lambda request, _: request)


def main() -> None:
    server = grpc.server(ThreadPoolExecutor(1), handlers=[_Echo()], options=_OPTIONS)
    server.add_insecure_port(sys.argv[1])
    server.start()
    sys.stdin.read()
    server.stop(None).wait()


if __name__ == "__main__":
    main()
