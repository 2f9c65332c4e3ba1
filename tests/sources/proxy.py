"""An HTTP proxy before a real endpoint, which spoils what tests tell it to spoil.

It is on this machine, on a free port; each request has a connection of its own.
"""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

__all__ = ["Answer", "Fault", "Proxy", "Request"]


class Request(NamedTuple):
    """What was asked for, and under which conditions."""

    method: str
    name: str
    range: str
    if_match: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What the endpoint said. Of `body` only `sent` bytes leave; then comes `end`: "", "reset" or "silence"."""

    status: int
    headers: dict[str, str]
    body: bytes
    sent: int | None = None
    end: str = ""

    def with_header(self, name: str, value: str) -> Answer:
        return replace(self, headers={key: it for key, it in self.headers.items() if key != name} | {name: value})


Fault = Callable[[Answer], Answer]


@dataclass
class Proxy:
    """Forwards to `endpoint`. `faults` are spent one by one, each by a request of its method and file."""

    endpoint: str
    faults: list[tuple[str, str, Fault]] = field(default_factory=list)
    resets: int = 0
    """How many connections to reset before their request is read."""
    requests: list[Request] = field(default_factory=list)
    silent: threading.Event = field(default_factory=threading.Event)
    """Set when an answer that ends in silence begins."""
    ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def spoil(self, name: str, *faults: Fault, method: str = "GET") -> None:
        self.faults += [(method, name, fault) for fault in faults]

    def answer(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        name = urlsplit(path).path.rpartition("/")[2]
        self.requests.append(Request(method, name, headers.get("Range", ""), headers.get("If-Match", "")))
        connection = http.client.HTTPConnection(urlsplit(self.endpoint).netloc)
        connection.request(method, path, headers=headers)
        found = connection.getresponse()
        answer = Answer(found.status, dict(found.getheaders()), found.read())
        connection.close()
        for index, (wanted_method, wanted_name, fault) in enumerate(self.faults):
            if (method, name) == (wanted_method, wanted_name):
                del self.faults[index]
                return fault(answer)
        return answer


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def setup(self) -> None:
        super().setup()
        if self.server.proxy.resets:
            self.server.proxy.resets -= 1
            self._reset()

    def handle(self) -> None:
        if self.connection.fileno() >= 0:
            super().handle()

    def do_GET(self) -> None:
        answer = self.server.proxy.answer(self.command, self.path, dict(self.headers.items()))
        self.send_response_only(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        self.end_headers()
        if answer.end == "silence":
            self.server.proxy.silent.set()
        self.wfile.write(answer.body[: answer.sent])
        if answer.end == "reset":
            self._reset()
        elif answer.end == "silence":
            self.server.proxy.ended.wait()

    do_HEAD = do_GET

    def finish(self) -> None:
        if self.connection.fileno() >= 0:
            super().finish()

    def _reset(self) -> None:
        """A close that lingers for no time sends RST."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()
        self.connection.close()

    def log_message(self, *_: Any) -> None:
        """Tests have nothing to read there."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", 0), _Handler)
