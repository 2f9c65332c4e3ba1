"""Envoy's certificate is read again when its Secret is renewed, and who has none of its authority does not come in."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest
import trustme

from tests.ports import free_port
from tests.scaleout.configuration import LOOPBACK
from tests.scaleout.pool import ENVOY, certificate
from tests.scaleout.proxy import proxy
from tests.waiting import eventually

# How a client opens HTTP/2: its preface, and empty settings.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def renew(folder: Path, authority: trustme.CA) -> None:
    """As a kubelet writes a Secret: the files in a new folder, and one link that changes."""
    folder.mkdir(exist_ok=True)
    new = folder / f"..{len(list(folder.iterdir()))}"
    certificate(new, authority, ENVOY)
    link = folder / "..data.new"
    link.symlink_to(new)
    link.replace(folder / "..data")
    for name in ("ca.crt", "tls.crt", "tls.key"):
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")


def served(port: int, authority: trustme.CA, shown: trustme.LeafCert) -> bytes:
    """The certificate of who answers at `port`, in a connection that it takes. Raises ssl.SSLError, OSError."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    authority.configure_trust(context)
    shown.configure_cert(context)
    with (
        socket.create_connection((LOOPBACK, port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname=ENVOY) as connection,
    ):
        # With TLS 1.3 a server refuses a client's certificate only when this side has its own already: wait for a word.
        connection.sendall(PREFACE)
        assert connection.recv(9)
        return connection.getpeercert(binary_form=True) or b""


def test_a_renewed_certificate_counts_without_a_restart(tmp_path: Path) -> None:
    authority = trustme.CA()
    engine = authority.issue_cert("engine.example")
    renew(tmp_path / "tls", authority)
    with proxy(tmp_path, [free_port() for _ in range(3)]) as running:
        before = served(running.ports.engines, authority, engine)
        renew(tmp_path / "tls", authority)
        eventually(lambda: served(running.ports.engines, authority, engine) != before, "the new certificate")


def test_a_client_of_another_authority_does_not_come_in(tmp_path: Path) -> None:
    authority = trustme.CA()
    renew(tmp_path / "tls", authority)
    with (
        proxy(tmp_path, [free_port() for _ in range(3)]) as running,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        served(running.ports.engines, authority, trustme.CA().issue_cert("engine.example"))
