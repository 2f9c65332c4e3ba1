"""A relay between clients and a unix socket, whose connections can be cut."""

from __future__ import annotations

import socket
import threading
from pathlib import Path


class Relay:
    """Carries the connections of clients to a unix socket, and can cut them all, which a stopped client cannot see."""

    def __init__(self, folder: Path, target: str) -> None:
        self.target = f"unix://{folder / 'relay.sock'}"
        self._to = target.removeprefix("unix://")
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.target.removeprefix("unix://"))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._to)
            self._connections += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def cut(self) -> None:
        """Ends every connection; new ones are carried again."""
        for connection in self._connections:
            connection.close() if connection.fileno() < 0 else connection.shutdown(socket.SHUT_RDWR)
        self._connections.clear()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
