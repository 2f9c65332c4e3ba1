"""`slotcar-injector probe`: it says what a webhook answers, and fails for all that an API server would not take."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme
from click.testing import CliRunner
from slotcar_injector.cli import main

from tests.k8s.chart_webhook import lead
from tests.k8s.cluster import HOST, Webhook, running

URL = f"https://{HOST}/inject"


def probe(authority: trustme.CA, url: str = URL) -> Any:
    return CliRunner().invoke(main, ["probe", url, "--authority", authority.cert_pem.bytes().decode()])


def test_it_says_that_a_pod_is_injected(webhook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    lead(monkeypatch, (HOST, 443), webhook.port)
    done = probe(webhook.authority)
    assert (done.exit_code, done.stdout) == (0, "injected\n")


def test_a_denial_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as where the defaults name volumes that pods are to have."""
    with running(tmp_path, "--default=roots=adapters:/srv") as webhook:
        lead(monkeypatch, (HOST, 443), webhook.port)
        done = probe(webhook.authority)
        assert done.exit_code == 0
        assert done.stdout.startswith("denied: slotcar: annotation slotcar.dev/roots")


def test_another_path_is_no_webhook(webhook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    lead(monkeypatch, (HOST, 443), webhook.port)
    done = probe(webhook.authority, f"https://{HOST}/other")
    assert done.exit_code == 1
    assert "answered 404" in done.stderr


def test_another_authority_or_name_is_not_trusted(webhook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Hostname mismatch" in probe(webhook.authority, f"https://localhost:{webhook.port}/inject").stderr
    lead(monkeypatch, (HOST, 443), webhook.port)
    assert "certificate verify failed" in probe(trustme.CA()).stderr


@pytest.mark.parametrize("authority", ["", "no PEM", "-----BEGIN CERTIFICATE-----\n", "é"])
def test_an_authority_that_is_none_trusts_nobody(authority: str) -> None:
    done = CliRunner().invoke(main, ["probe", URL, "--authority", authority])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"Error: {URL}: ")


@pytest.mark.parametrize("url", ["http://a/inject", "a.b.svc", "https://", "https://[", "https://a:port/"])
def test_an_address_is_one_of_https(url: str) -> None:
    done = probe(trustme.CA(), url)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"Error: {url}: ")


ANSWERS = [
    b"",
    b"{",
    b"[]",
    b"{}",
    b'{"response": null}',
    b'{"response": {"uid": "slotcar-injector-probe"}}',
    b'{"response": {"uid": "slotcar-injector-probe", "allowed": false}}',
    json.dumps({"response": {"uid": "other", "allowed": True}}).encode(),
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_is_an_admission_review_of_the_question(answer: bytes) -> None:
    authority = trustme.CA()
    with answering(authority, answer) as port:
        done = probe(authority, f"https://localhost:{port}/inject")
    assert done.exit_code == 1
    assert "Error: the answer is" in done.stderr


@contextmanager
def answering(authority: trustme.CA, answer: bytes) -> Iterator[int]:
    """The port of a server that says this to everybody."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        yield server.server_port
        thread.join()
