"""Serves /metrics, the status page and its data over HTTP: read-only, and for whoever can reach the address.

Each answer is of one moment: the cache's owner is asked once for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from prometheus_client import make_wsgi_app

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.config import Config, TcpAddress
from slotcar_sidecar.core.reconcile import DesiredStatus
from slotcar_sidecar.ops.metrics import Metrics
from slotcar_sidecar.ops.page import render
from slotcar_sidecar.ops.recent import LoadLog
from slotcar_sidecar.ops.state import State
from slotcar_sidecar.process.owner import NoAnswer, Owner
from slotcar_sidecar.process.scrapes import watch
from slotcar_sidecar.process.sockets import StartError
from slotcar_sidecar.process.states import Facts, StateTaker
from slotcar_sidecar.process.web import Answer, Headers, Request, Respond, WebServer, listen
from slotcar_sidecar.rpc.health import Phase

__all__ = ["Seen", "serve_pages"]

_log = logging.getLogger("slotcar")

_FRESH_SECONDS = 0.25
"""However many people look, the owner takes no more than so many states a second."""
_NOTE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What the pages show beside the cache: `desired` has the declared set, with so many of its entries."""

    planes: tuple[str, ...]
    phase: Callable[[], Phase]
    desired: Callable[[int], DesiredStatus]


def serve_pages(
    config: Config, cache: AdapterCache, metrics: Metrics, seen: Seen, resources: contextlib.ExitStack
) -> str:
    """Answers at the address of --metrics until `resources` are closed; call it on the owner's thread.

    Returns the URL of /metrics, "" where nothing is served. Raises StartError.
    """
    address = config.metrics_address
    if address is None:
        return ""
    try:
        listener = listen(address.host, address.port)
    except OSError as error:
        raise StartError(f"cannot serve metrics at {address.authority}: {error}") from error
    owner = Owner()
    watch(metrics, cache, config, owner)
    routes: dict[str, Respond] = {"/metrics": _Metrics(metrics)}
    if not config.no_pages:
        pages = _Pages(_make_taker(config, cache, metrics, seen, resources), owner)
        routes |= {"/": pages.page, "/debug/state.json": pages.data}
    server = WebServer(listener, functools.partial(_respond, routes))
    resources.callback(server.close)
    resources.callback(owner.close)
    server.start()
    url = f"http://{TcpAddress(address.host, listener.getsockname()[1]).authority}/metrics"
    _log.info("metrics", extra={"fields": {"at": url}})
    return url


def _make_taker(
    config: Config, cache: AdapterCache, metrics: Metrics, seen: Seen, resources: contextlib.ExitStack
) -> StateTaker:
    """Takes states, and notes what they need from now on."""
    now = cache.environment.clock()
    build = metrics.facts
    host = socket.gethostname()
    facts = Facts(host, build["version"], build["device"], build["kernel"], config.eviction, seen.planes)
    taker = StateTaker(cache, facts, seen.phase, seen.desired, time.time, now, LoadLog(time.time))
    metrics.stage_listeners.append(taker.loads.stage)
    cache.events.listeners.append(taker.names.note)
    for event in cache.events.since(0):
        taker.names.note(event)
    resources.enter_context(_repeated(taker.note_uses))
    return taker


@contextlib.contextmanager
def _repeated(call: Callable[[], None]) -> Iterator[None]:
    """Calls it now and then while the context is open."""
    loop, is_open = asyncio.get_running_loop(), True

    def repeat() -> None:
        if is_open:
            call()
            loop.call_later(_NOTE_SECONDS, repeat)

    repeat()
    try:
        yield
    finally:
        is_open = False


def _respond(routes: Mapping[str, Respond], request: Request) -> Answer:
    respond = routes.get(request.path)
    if respond is None:
        return Answer(HTTPStatus.NOT_FOUND, f"there is {' '.join(routes)}\n".encode())
    try:
        return respond(request)
    except NoAnswer:
        return Answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the server is busy, or ends\n")


class _Metrics:
    """The library's own answer to a scrape, with its choice of format and compression."""

    def __init__(self, metrics: Metrics) -> None:
        self._application = make_wsgi_app(metrics.registry)

    def __call__(self, request: Request) -> Answer:
        status, found = "", []
        environ = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": request.path,
            "QUERY_STRING": request.query,
            "HTTP_ACCEPT": request.headers.get("accept", ""),
            "HTTP_ACCEPT_ENCODING": request.headers.get("accept-encoding", ""),
        }

        def start(line: str, headers: list[tuple[str, str]], *_: object) -> Callable[[bytes], object]:
            nonlocal status, found
            status, found = line, headers
            return lambda _: None

        body = b"".join(self._application(environ, start))
        return Answer(HTTPStatus(int(status.split(" ", 1)[0])), body, tuple(found))


class _Pages:
    """The state as a page and as data; what was taken a moment ago is shown again."""

    def __init__(self, taker: StateTaker, owner: Owner) -> None:
        self._taker = taker
        self._owner = owner
        self._lock = threading.Lock()
        self._last: State | None = None
        self._taken = 0.0

    def page(self, request: Request) -> Answer:
        page = render(self._state())
        headers = (("Content-Type", "text/html; charset=utf-8"), ("Content-Security-Policy", page.policy))
        return _compressed(request, page.text.encode(), headers)

    def data(self, request: Request) -> Answer:
        body = json.dumps(self._state().plain()).encode()
        return _compressed(request, body, (("Content-Type", "application/json"),))

    def _state(self) -> State:
        with self._lock:
            now = time.monotonic()
            if self._last is None or now - self._taken > _FRESH_SECONDS:
                self._last, self._taken = self._owner.ask(self._taker.take), now
            return self._last


def _compressed(request: Request, body: bytes, headers: Headers) -> Answer:
    if "gzip" in request.headers.get("accept-encoding", ""):
        body, headers = gzip.compress(body, 1), (*headers, ("Content-Encoding", "gzip"))
    return Answer(HTTPStatus.OK, body, (*headers, ("Vary", "Accept-Encoding")))
