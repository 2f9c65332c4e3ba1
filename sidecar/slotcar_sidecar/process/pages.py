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
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import urlsplit

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
from slotcar_sidecar.process.states import Facts, FollowedFiles, StateTaker
from slotcar_sidecar.process.web import Answer, Headers, Request, Respond, WebServer, listen
from slotcar_sidecar.rpc.health import Phase

__all__ = ["Pages", "Seen", "serve_pages"]

_log = logging.getLogger("slotcar")

_FRESH_SECONDS = 1.0
"""However many people look, no more than one state in this time is taken, and made a page of."""
_NOTE_SECONDS = 1.0
_NEAR_NAMES = (".localhost", ".svc", ".cluster.local")
"""Names that nobody outside can give an address to."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the pages show beside the cache: `desired` has the declared set, with so many of its entries."""

    planes: tuple[str, ...]
    phase: Callable[[], Phase]
    desired: Callable[[int], DesiredStatus]
    files: FollowedFiles


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
    if config.pages == "always" or (config.pages == "loopback" and address.is_loopback):
        taker = _make_taker(config, cache, metrics, seen, resources)
        pages = Pages(lambda: owner.ask(taker.take), time.monotonic)
        near = functools.partial(_near_alone, address.host)
        routes |= {"/": near(pages.page), "/debug/state.json": near(pages.data)}
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
    loads = LoadLog(time.time)
    taker = StateTaker(cache, facts, seen.phase, seen.desired, time.time, now, loads, files=seen.files)
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


def _near_alone(own: str, respond: Respond) -> Respond:
    """Refuses who asks for a public name that is not `own`: a page of that name could read what it then gets."""

    def answer(request: Request) -> Answer:
        if _is_near(request.headers.get("host", ""), own):
            return respond(request)
        return Answer(HTTPStatus.MISDIRECTED_REQUEST, b"ask by an address, or by the name of --metrics\n")

    return answer


def _is_near(authority: str, own: str) -> bool:
    """Whether a Host is an address, `own`, or a name that has no meaning beyond this network."""
    try:
        host = (urlsplit(f"//{authority}").hostname or "").removesuffix(".")
    except ValueError:
        return False
    if "." not in host and ":" not in host:
        return True
    if host == own.lower() or host.endswith(_NEAR_NAMES):
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


# The library compares the version that it is asked for with numbers, and fails at others.
_STRANGE_VERSION = re.compile(r";\s*version=(?!\s*\d{1,9}(\.\d{1,9})*\s*(;|$))", re.ASCII)


def _acceptable(header: str) -> str:
    """The Accept header without formats of versions that there are not."""
    return ",".join(each for each in header.split(",") if not _STRANGE_VERSION.search(each))


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
            "HTTP_ACCEPT": _acceptable(request.headers.get("accept", "")),
            "HTTP_ACCEPT_ENCODING": request.headers.get("accept-encoding", ""),
        }

        def start(line: str, headers: list[tuple[str, str]], *_: object) -> Callable[[bytes], object]:
            nonlocal status, found
            status, found = line, headers
            return lambda _: None

        body = b"".join(self._application(environ, start))
        return Answer(HTTPStatus(int(status.split(" ", 1)[0])), body, tuple(found))


class _Body:
    """What is sent, as it is and compressed."""

    def __init__(self, body: bytes, headers: Headers) -> None:
        self._body = body
        self._headers = (*headers, ("Vary", "Accept-Encoding"))

    @cached_property
    def _compressed(self) -> bytes:
        return gzip.compress(self._body, 1)

    def answer(self, request: Request) -> Answer:
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Answer(HTTPStatus.OK, self._compressed, (*self._headers, ("Content-Encoding", "gzip")))
        return Answer(HTTPStatus.OK, self._body, self._headers)


class _Shown:
    """What is made of one state, each at most once."""

    def __init__(self, state: State) -> None:
        self._state = state

    @cached_property
    def page(self) -> _Body:
        page = render(self._state)
        headers = (("Content-Type", "text/html; charset=utf-8"), ("Content-Security-Policy", page.policy))
        return _Body(page.text.encode(), headers)

    @cached_property
    def data(self) -> _Body:
        return _Body(json.dumps(self._state.plain()).encode(), (("Content-Type", "application/json"),))


class Pages:
    """The state as a page and as data; what was made a moment ago is shown again. The lock is held while it is made."""

    def __init__(self, take: Callable[[], State], clock: Callable[[], float]) -> None:
        self._take = take
        self._clock = clock
        self._lock = threading.Lock()
        self._last: _Shown | None = None
        self._taken = 0.0

    def page(self, request: Request) -> Answer:
        with self._lock:
            return self._shown().page.answer(request)

    def data(self, request: Request) -> Answer:
        with self._lock:
            return self._shown().data.answer(request)

    def _shown(self) -> _Shown:
        now = self._clock()
        if self._last is None or now - self._taken > _FRESH_SECONDS:
            self._last, self._taken = _Shown(self._take()), now
        return self._last
