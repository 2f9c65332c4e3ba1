"""The certificate that is served, followed while its files change.

Invariant: the live context always has a certificate and the key that belongs to it. Files are read once, what was read
is tried in a context of its own, and only then taken, so that a half-written pair, or one of two moments, changes
nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from slotcar_injector.logs import say
from slotcar_injector.metrics import Metrics


class Certificate:
    """`context` is for the listener; it serves nothing before `look` has found a pair that can be used."""

    def __init__(self, certificate: Path, key: Path, metrics: Metrics) -> None:
        self.context = _context()
        self._files = (certificate, key)
        self._metrics = metrics
        self._seen: tuple[bytes, bytes] | None = None
        self._expires: datetime | None = None

    def is_valid(self, now: datetime) -> bool:
        return self._expires is not None and now < self._expires

    def look(self) -> None:
        """Reads the files, and takes what is in them if that is new and can be used."""
        try:
            pair = (self._files[0].read_bytes(), self._files[1].read_bytes())
        except OSError as error:
            if self._seen is not None or self._expires is None:
                say("certificate_unreadable", logging.WARNING, error=str(error))
            self._seen = None
            return
        if pair == self._seen:
            return
        self._seen = pair
        try:
            expires = x509.load_pem_x509_certificate(pair[0]).not_valid_after_utc
            _load(_context(), pair)
        except (ValueError, ssl.SSLError, OSError) as error:
            self._metrics.reloaded(used=False)
            say("certificate_refused", logging.ERROR, file=str(self._files[0]), error=str(error))
            return
        _load(self.context, pair)
        self._expires = expires
        self._metrics.reloaded(used=True)
        self._metrics.expiry.set(expires.timestamp())
        say("certificate_used", file=str(self._files[0]), expires=expires.isoformat())

    async def follow(self, seconds: float) -> None:
        """Looks again and again; connections that are open keep the certificate that they began with."""
        while True:
            await asyncio.sleep(seconds)
            self.look()


def now() -> datetime:
    return datetime.now(UTC)


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _load(context: ssl.SSLContext, pair: tuple[bytes, bytes]) -> None:
    """The ssl module reads files only; these have the bytes that were read, and no name."""
    with ExitStack() as stack:
        context.load_cert_chain(*(_memory_file(stack, data) for data in pair))


def _memory_file(stack: ExitStack, data: bytes) -> str:
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    stack.callback(os.close, descriptor)
    os.write(descriptor, data)
    return f"/proc/self/fd/{descriptor}"
