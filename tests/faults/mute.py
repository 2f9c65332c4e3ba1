"""A client in bare HTTP/2 that asks for much and reads nothing of the answers, as one does that is stopped."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager

from grpc_reflection.v1alpha import reflection_pb2

_WINDOW = 2**31 - 1
_DEFAULT_WINDOW = 65_535
_DATA, _HEADERS, _SETTINGS, _WINDOW_UPDATE = 0, 1, 4, 8
_END_HEADERS = 4
_INITIAL_WINDOW_SIZE = 4
_METHOD_POST, _SCHEME_HTTP = b"\x83", b"\x86"
_QUESTIONS = 800


@contextmanager
def mute_client(path: str) -> Iterator[socket.socket]:
    """On the unix socket `path`; some megabytes are on their way to it."""
    question = reflection_pb2.ServerReflectionRequest(file_containing_symbol="slotcar.v1.EngineService")
    message = question.SerializeToString()
    message = b"\0" + struct.pack(">I", len(message)) + message
    headers = {
        b":path": b"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        b":authority": b"localhost",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
    }
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        peer.sendall(_frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, _WINDOW)))
        peer.sendall(_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW - _DEFAULT_WINDOW)))
        block = b"".join(bytes([0, len(name)]) + name + bytes([len(value)]) + value for name, value in headers.items())
        peer.sendall(_frame(_HEADERS, _END_HEADERS, 1, _METHOD_POST + _SCHEME_HTTP + block))
        for _ in range(_QUESTIONS):
            peer.sendall(_frame(_DATA, 0, 1, message))
        yield peer


def is_full(peer: socket.socket) -> bool:
    """What waits to be read is about what a socket takes."""
    waiting = array.array("i", [0])
    fcntl.ioctl(peer, termios.FIONREAD, waiting)
    return waiting[0] > 100_000


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload
