"""Serves reviews over HTTPS, and health and metrics over HTTP on a port of their own, until SIGTERM.

Every review is answered, or refused, within its deadline; a stop answers those that have begun and exits with 0.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from aiohttp import web

from slotcar_injector import tls
from slotcar_injector.denial import BadReview, Reason, Result
from slotcar_injector.logs import say
from slotcar_injector.metrics import CONTENT_TYPE, Metrics
from slotcar_injector.review import review
from slotcar_injector.settings import Serving, Settings

_STOP_SECONDS = 10.0
_REFUSALS = {
    Reason.BODY_INVALID: 400,
    Reason.BODY_TOO_LARGE: 413,
    Reason.DEADLINE: 503,
    Reason.INTERNAL: 500,
}


class Webhook:
    """The two applications, and what they share."""

    def __init__(self, settings: Settings, serving: Serving, metrics: Metrics, certificate: tls.Certificate) -> None:
        self._settings = settings
        self._serving = serving
        self._metrics = metrics
        self._certificate = certificate
        self._room = asyncio.Semaphore(serving.most_requests)
        self.stopping = asyncio.Event()
        self._hurrying = asyncio.Event()
        self._reviews = 0
        # Set while there is no review; each ends within its deadline.
        self.unoccupied = asyncio.Event()
        self.unoccupied.set()

    def stop(self) -> None:
        """Called once, it is not ready any more; called again, it waits for nobody who has yet to come."""
        if self.stopping.is_set():
            self._hurrying.set()
        self.stopping.set()

    async def drain(self) -> None:
        """API servers learn by and by that it is not ready: what comes until then is answered."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurrying.wait(), self._serving.drain_seconds)

    def reviews(self) -> web.Application:
        application = web.Application(client_max_size=self._serving.body_bytes)
        application.add_routes([web.post("/inject", self._inject), *self._health()])
        return application

    def operations(self) -> web.Application:
        application = web.Application()
        application.add_routes([web.get("/metrics", self._show_metrics), *self._health()])
        return application

    def _health(self) -> list[web.RouteDef]:
        return [web.get("/healthz", self._say_alive), web.get("/readyz", self._say_ready)]

    async def _say_alive(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _say_ready(self, _: web.Request) -> web.Response:
        if self.stopping.is_set():
            return web.Response(status=503, text="stopping\n")
        if not self._certificate.is_valid(tls.now()):
            return web.Response(status=503, text="no valid certificate\n")
        return web.Response(text="ok\n")

    async def _show_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _inject(self, request: web.Request) -> web.Response:
        began = time.monotonic()
        with self._counted():
            response, result, reason, facts = await self._answer(request)
        seconds = time.monotonic() - began
        self._metrics.admitted(result, reason, seconds)
        level = logging.WARNING if result is Result.FAILED else logging.INFO
        say("admission", level, **{"result": result, "reason": reason, **facts, "seconds": round(seconds, 6)})
        if self.stopping.is_set():
            response.force_close()
        return response

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._reviews += 1
        self.unoccupied.clear()
        try:
            with self._metrics.in_flight.track_inprogress():
                yield
        finally:
            self._reviews -= 1
            if not self._reviews:
                self.unoccupied.set()

    async def _answer(self, request: web.Request) -> tuple[web.Response, Result, Reason, dict[str, object]]:
        try:
            async with asyncio.timeout(self._serving.deadline_seconds), self._room:
                body = await request.read()
                reviewed = review(body, self._settings)
        except BadReview as error:
            return _refused(Reason.BODY_INVALID, str(error))
        except web.HTTPRequestEntityTooLarge:
            return _refused(Reason.BODY_TOO_LARGE, f"the body has more than {self._serving.body_bytes} bytes")
        except TimeoutError:
            return _refused(Reason.DEADLINE, f"no whole body within {self._serving.deadline_seconds} s")
        except (web.HTTPException, web.RequestPayloadError, ConnectionError) as error:
            return _refused(Reason.BODY_INVALID, f"the body could not be read: {type(error).__name__}")
        except Exception as error:
            logging.getLogger("slotcar_injector").exception("review_failed")
            return _refused(Reason.INTERNAL, type(error).__name__)
        response = web.Response(body=reviewed.answer, content_type="application/json")
        return response, reviewed.result, reviewed.reason, reviewed.facts


def _refused(reason: Reason, message: str) -> tuple[web.Response, Result, Reason, dict[str, object]]:
    """Not a denial: the API server then does what the webhook's failurePolicy says. The connection may have a rest."""
    response = web.Response(status=_REFUSALS[reason], text=f"{message}\n")
    response.force_close()
    return response, Result.FAILED, reason, {"message": message}


async def serve(settings: Settings, serving: Serving) -> None:
    """Serves until SIGTERM or SIGINT. Raises OSError for a port that it cannot have."""
    metrics = Metrics(settings.version)
    certificate = tls.Certificate(serving.certificate, serving.key, metrics)
    certificate.look()
    webhook = Webhook(settings, serving, metrics, certificate)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, webhook.stop)
    following = asyncio.create_task(certificate.follow(serving.poll_seconds))
    async with (
        _listening(webhook.operations(), serving, serving.ops_port) as operations,
        _listening(webhook.reviews(), serving, serving.port, certificate.context) as reviews,
    ):
        say("serving", port=reviews.port, ops_port=operations.port, version=settings.version)
        await webhook.stopping.wait()
        say("stopping", drain_seconds=serving.drain_seconds)
        await webhook.drain()
        await reviews.stop()
        # aiohttp's own stop would hear nothing more of a body that is still on its way.
        await webhook.unoccupied.wait()
    following.cancel()
    say("stopped")


@asynccontextmanager
async def _listening(
    application: web.Application, serving: Serving, port: int, context: ssl.SSLContext | None = None
) -> AsyncIterator[web.TCPSite]:
    """Where the application is served; at the end its connections are closed."""
    runner = web.AppRunner(
        application,
        access_log=None,
        auto_decompress=False,  # an API server compresses nothing, and a small body must not become a large one
        keepalive_timeout=serving.idle_seconds,  # and the time for a connection's first request
        shutdown_timeout=_STOP_SECONDS,
        lingering_time=1.0,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, serving.host, port, ssl_context=context)
        await site.start()
        yield site
    finally:
        await runner.cleanup()
