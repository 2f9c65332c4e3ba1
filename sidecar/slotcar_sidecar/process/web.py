"""Answers GET and HEAD over HTTP in a thread of its own, whatever clients do.

Invariant: a client costs at most one connection, of which there are few, for a bounded time; nobody waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus

import h11

__all__ = ["Answer", "Headers", "Request", "Respond", "WebServer", "listen"]

_log = logging.getLogger("slotcar")

_MAX_CONNECTIONS = 64
_MAX_HEADER_BYTES = 16 << 10
_BACKLOG = 64
_CHUNK_BYTES = 16 << 10
_THREADS = 2
_REQUEST_SECONDS = 30.0
"""From the moment that a request is awaited until it is there whole."""
_ANSWER_SECONDS = 15.0
"""To make an answer and to send it."""
_FULL_SECONDS = 1.0
"""Until connections are accepted again after that failed, as it does when there is no descriptor left."""
_LINGER_SECONDS = 1.0
_LINGER_CHUNKS = 64
_SHOWN_CHARACTERS = 200
_METHODS = (b"GET", b"HEAD")

Headers = tuple[tuple[str, str], ...]
_TEXT: Headers = (("Content-Type", "text/plain; charset=utf-8"),)


@dataclass(frozen=True, slots=True)
class Request:
    """A GET or HEAD; header names are in lower case, `query` is what is behind the question mark."""

    path: str
    query: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What is sent; lengths are added."""

    status: HTTPStatus
    body: bytes
    headers: Headers = _TEXT


Respond = Callable[[Request], Answer]

_SAFE: Headers = (
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at the first address of a name. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


class WebServer:
    """Serves a listening socket, from `start` to `close`; `respond` runs in a few threads beside it."""

    def __init__(self, listener: socket.socket, respond: Respond) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._respond = respond
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="web")
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._open: dict[_Connection, asyncio.Task[None]] = {}
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="web", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends every connection, and returns when that is done. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self) -> None:
        with self._listener, self._runner:  # which ends, at its own end, every task that is left
            self._runner.run(self._serve())
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _serve(self) -> None:
        accepting = asyncio.create_task(self._accept())
        await self._stop.wait()
        accepting.cancel()

    async def _accept(self) -> None:
        while True:
            try:
                client, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:
                _log.warning("no HTTP connection", extra={"fields": {"reason": error.strerror}})
                await asyncio.sleep(_FULL_SECONDS)
                continue
            self._make_room()
            connection = _Connection(client, self._respond, self._pool)
            self._open[connection] = task = asyncio.create_task(connection.run())
            task.add_done_callback(functools.partial(self._forget, connection))

    def _forget(self, connection: _Connection, _: asyncio.Task[None]) -> None:
        self._open.pop(connection, None)

    def _make_room(self) -> None:
        """Whoever is the slowest gives way: one that asks at once, and reads, is never that for long."""
        if len(self._open) >= _MAX_CONNECTIONS:
            slowest = min(self._open, key=lambda connection: connection.since)
            self._open.pop(slowest).cancel()


class _Connection:
    """One client, from its first byte to its last; `since` is when it was last awaited."""

    def __init__(self, client: socket.socket, respond: Respond, pool: Executor) -> None:
        self._client = client
        self._respond = respond
        self._pool = pool
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEADER_BYTES)
        self._clock = asyncio.get_running_loop().time
        self.since = self._clock()

    async def run(self) -> None:
        """Returns when the client is served, gone, or too slow."""
        with self._client:
            try:
                self._reader, self._writer = await asyncio.open_connection(sock=self._client, limit=_CHUNK_BYTES)
            except OSError:
                return
            # What was written has been taken from us when `drain` returns.
            self._writer.transport.set_write_buffer_limits(high=0)
            try:
                await self._serve()
            except (OSError, TimeoutError) as error:
                _log.debug("an HTTP connection ended", extra={"fields": {"reason": str(error) or "too slow"}})
            finally:
                self._writer.transport.abort()

    async def _serve(self) -> None:
        """Until the client has no more requests, or said what is none. Raises TimeoutError or OSError."""
        while True:
            self.since = self._clock()
            try:
                async with asyncio.timeout(_REQUEST_SECONDS):
                    request = await self._request()
                if request is None:
                    return
                self.since = self._clock()
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await self._send(await self._answer(request), with_body=request.method != b"HEAD")
            except h11.RemoteProtocolError as error:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await self._send(_plain(HTTPStatus(error.error_status_hint)))
            if self._http.states != {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}:
                await self._linger()
                return
            self._http.start_next_cycle()

    async def _request(self) -> h11.Request | None:
        """The next request, None when the client has no more. What is no GET or HEAD may be half."""
        head: h11.Request | None = None
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(_CHUNK_BYTES))
            elif isinstance(event, h11.Request):
                head = event
                if head.method not in _METHODS:
                    return head
            elif isinstance(event, h11.EndOfMessage):
                return head
            elif isinstance(event, h11.Data):
                raise h11.RemoteProtocolError("a body", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            else:
                return None

    async def _answer(self, request: h11.Request) -> Answer:
        if request.method not in _METHODS:
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED, ("Allow", "GET, HEAD"))
        path, _, query = request.target.decode("latin-1").partition("?")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
        asked = Request(path, query, headers)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._respond, asked)
        except Exception:
            _log.exception("an HTTP request failed", extra={"fields": {"path": path[:_SHOWN_CHARACTERS]}})
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR)

    async def _send(self, answer: Answer, *, with_body: bool = True) -> None:
        headers = [*answer.headers, *_SAFE, ("Content-Length", str(len(answer.body)))]
        head = h11.Response(status_code=answer.status, reason=answer.status.phrase.encode(), headers=headers)
        self._writer.write(self._http.send(head) or b"")
        for start in range(0, len(answer.body) if with_body else 0, _CHUNK_BYTES):
            self._writer.write(self._http.send(h11.Data(data=answer.body[start : start + _CHUNK_BYTES])) or b"")
            await self._writer.drain()
        self._writer.write(self._http.send(h11.EndOfMessage()) or b"")
        await self._writer.drain()

    async def _linger(self) -> None:
        """Takes what the client still sends for a moment: else it might never see the answer."""
        self._writer.write_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                for _ in range(_LINGER_CHUNKS):
                    if not await self._reader.read(_CHUNK_BYTES):
                        return


def _plain(status: HTTPStatus, *headers: tuple[str, str]) -> Answer:
    return Answer(status, f"{status.phrase}\n".encode(), (*_TEXT, *headers))
