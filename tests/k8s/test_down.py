"""A webhook that hangs, dies or is sent too much: its callers find out, and the next review is answered as ever."""

from __future__ import annotations

import http.client
import os
import signal
import socket
from pathlib import Path

import pytest
import trustme

from tests.k8s.cluster import Webhook, running, write_pair
from tests.k8s.pods import body, pod, review

WHOLE = body(review(pod()))
CHUNK_BYTES = 1 << 20
CALLER_SECONDS = 0.5


def pid(webhook: Webhook) -> int:
    assert webhook.process is not None
    return webhook.process.pid


def test_a_webhook_that_hangs_is_given_up_by_its_callers_and_answers_the_next(tmp_path: Path) -> None:
    """What an API server gave up after timeoutSeconds is answered to nobody, and nothing of it is left."""
    with running(tmp_path) as webhook:
        kept = webhook.connect(CALLER_SECONDS)
        os.kill(pid(webhook), signal.SIGSTOP)
        try:
            kept.request("POST", "/inject", WHOLE)
            with pytest.raises(TimeoutError):
                kept.getresponse()
            with pytest.raises(TimeoutError):
                webhook.connect(CALLER_SECONDS)
        finally:
            os.kill(pid(webhook), signal.SIGCONT)
        kept.close()
        assert webhook.admit(pod()).operations
        webhook.wait_for("admission", 2)
        assert "slotcar_injector_reviews_in_flight 0.0" in webhook.get("/metrics")[1]
        assert webhook.count("failed", "internal") == 0


def test_a_webhook_that_was_killed_is_back_with_its_next_life(tmp_path: Path) -> None:
    """Callers of the dead one are told at once; nothing that it leaves stops the one after it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    webhook = Webhook(tmp_path, trustme.CA())
    write_pair(tmp_path, webhook.authority)
    webhook.start(f"--port={port}")
    try:
        begun = webhook.connect()
        begun.putrequest("POST", "/inject")
        begun.putheader("Content-Length", str(len(WHOLE)))
        begun.endheaders(WHOLE[:10])
        os.kill(pid(webhook), signal.SIGKILL)
        with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
            begun.getresponse()
        assert webhook.process is not None
        assert webhook.process.wait(60) == -signal.SIGKILL
        with pytest.raises(ConnectionRefusedError):
            webhook.connect()
        (tmp_path / "log").unlink()
        webhook.start(f"--port={port}")
        assert webhook.admit(pod()).operations
    finally:
        assert webhook.end() == 0


def test_a_body_in_chunks_is_refused_when_it_is_above_the_limit(tmp_path: Path) -> None:
    """No head says how long it is, and its end never comes."""
    with running(tmp_path, f"--body-bytes={2 * CHUNK_BYTES}") as webhook:
        connection = webhook.connect()
        connection.sock.sendall(b"POST /inject HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sock.sendall((b"%x\r\n" % CHUNK_BYTES + b" " * CHUNK_BYTES + b"\r\n") * 3)
        assert connection.sock.recv(65536).startswith(b"HTTP/1.1 413 ")
        connection.close()
        assert webhook.count("failed", "body_too_large") == 1
        assert webhook.admit(pod()).operations
