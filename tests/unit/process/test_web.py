"""Whatever clients of the HTTP address do, each costs one of few connections, and others get their answers."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

import pytest
from slotcar_sidecar.process.web import Answer, Request, WebServer, listen

PATIENCE_SECONDS = 30.0
# More than loopback keeps for a client that reads nothing.
LARGE = b"x" * (32 << 20)
MANY = 300


class Site:
    """A server whose answers are what was asked for; it waits with that of /held."""

    def __init__(self) -> None:
        listener = listen("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        self.server = WebServer(listener, self._respond)
        self.held = threading.Event()
        self.server.start()

    def _respond(self, request: Request) -> Answer:
        if request.path == "/broken":
            raise RuntimeError("planted")
        if request.path == "/held":
            self.held.wait(PATIENCE_SECONDS)
        return Answer(HTTPStatus.OK, LARGE if request.path == "/large" else f"{request.path}?{request.query}".encode())

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SECONDS)

    def say(self, said: bytes) -> bytes:
        """What comes back until the server closes."""
        with self.connect() as client:
            client.sendall(said)
            found = b""
            while chunk := client.recv(65536):
                found += chunk
            return found


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    try:
        yield site
    finally:
        site.held.set()
        site.server.close()


def test_get_and_head(site: Site) -> None:
    assert site.ask("GET", "/a?b=c") == (200, b"/a?b=c")
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=PATIENCE_SECONDS)
    with contextlib.closing(connection):
        for method, body in (("HEAD", b""), ("GET", b"/a?"), ("GET", b"/a?")):
            connection.request(method, "/a")
            response = connection.getresponse()
            assert (response.status, response.read()) == (200, body)
            assert response.headers["Content-Length"] == "3"
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "NONSENSE"])
def test_nothing_else(site: Site, method: str) -> None:
    assert site.ask(method, "/a")[0] == 405
    assert site.ask(method, "/a", b"x" * 100_000)[0] == 405


def test_a_get_has_no_body(site: Site) -> None:
    assert site.ask("GET", "/a", b"body")[0] == 413


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nbad header\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 100_000, b"431"),
        (b"G" * 100_000, b"431"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: nonsense\r\n\r\n", b"501"),
    ],
)
def test_what_is_no_request_gets_a_refusal_and_an_end(site: Site, said: bytes, status: bytes) -> None:
    assert site.say(said).split(b" ")[1] == status
    assert site.ask("GET", "/a")[0] == 200


def test_a_fault_of_ours_is_an_answer(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    assert site.ask("GET", "/broken")[0] == 500
    assert "planted" in caplog.text
    assert site.ask("GET", "/a")[0] == 200


def test_pipelined_requests_are_answered_in_their_order(site: Site) -> None:
    ask = b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n"
    last = b"GET /end HTTP/1.1\r\nConnection: close\r\nHost: a\r\n\r\n"
    found = site.say(b"".join(ask % number for number in range(20)) + last)
    places = [found.index(b"/%d?" % number) for number in range(20)]
    assert places == sorted(places)


def test_those_who_say_nothing_or_little_keep_nobody_out(site: Site) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(MANY):
            client = stack.enter_context(site.connect())
            client.sendall(b"GET / HTTP/1.1\r\nX:"[: number % 16])
            if number % 50 == 0:
                assert site.ask("GET", "/a")[0] == 200
        assert site.ask("GET", "/a")[0] == 200


def test_those_who_read_nothing_keep_nobody_out(site: Site) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(80):
            client = stack.enter_context(site.connect())
            client.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        assert site.ask("GET", "/a")[0] == 200


def test_one_slow_answer_does_not_hold_up_another(site: Site) -> None:
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(site.ask, "GET", "/held")
        assert site.ask("GET", "/a")[0] == 200
        site.held.set()
        assert slow.result(PATIENCE_SECONDS)[0] == 200


def test_it_ends_at_once_whoever_is_connected(site: Site) -> None:
    with site.connect() as silent, site.connect() as deaf, ThreadPoolExecutor(1) as pool:
        deaf.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        pool.submit(site.ask, "GET", "/held")
        site.server.close()
        site.held.set()
        assert silent.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        site.connect()
