"""A real injector that is started with the arguments of the chart's Deployment, and trusted by its caBundle."""

from __future__ import annotations

import base64
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.k8s import charts
from tests.k8s.cluster import Webhook, write_files

Json = dict[str, Any]


@dataclass
class ChartWebhook(Webhook):
    """`folder` has what the Secret has; where it listens, and how often it looks, is the test's."""

    args: Sequence[str] = field(default_factory=tuple)

    def command(self, *options: str) -> list[str]:
        files = [f"--certificate={self.folder / 'tls.crt'}", f"--key={self.folder / 'tls.key'}"]
        here = ["--host=127.0.0.1", "--port=0", "--ops-port=0", "--poll-seconds=0.02", "--drain-seconds=0"]
        return [sys.executable, "-m", "slotcar_injector", *self.args, *files, *here, *options]

    def trust_bundle(self, bundle: str) -> None:
        """These authorities and no others, as an API server does."""
        self.trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.trust.load_verify_locations(cadata=bundle)


@contextmanager
def serving(folder: Path, objects: list[Json], *options: str) -> Iterator[ChartWebhook]:
    """Of these objects of the chart; ended at the end."""
    webhook = ChartWebhook(folder, trustme.CA(), args=charts.args_of(objects))
    webhook.trust_bundle(charts.ca_bundle(objects))
    webhook.start(*options)
    try:
        yield webhook
    finally:
        webhook.end()


def write_secret(folder: Path, secret: Json) -> None:
    files = {name: base64.b64decode(secret["data"][name], validate=True) for name in ("tls.crt", "tls.key")}
    write_files(folder, files)


def lead(monkeypatch: pytest.MonkeyPatch, address: tuple[str, int], port: int) -> None:
    """As a Service does, from its address to a port of this machine."""
    resolve = socket.getaddrinfo

    def resolved(host: str, of: int, *rest: Any, **more: Any) -> Any:
        assert (host, of) == address
        return resolve("127.0.0.1", port, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
