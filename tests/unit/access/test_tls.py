"""TCP with certificates on both sides, which change while calls run."""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID
from grpc import aio
from slotcar.v1 import adapter_service_pb2 as adapters
from slotcar_client import Credentials
from slotcar_client import aio as clients
from slotcar_client.errors import Unauthenticated, Unavailable
from slotcar_sidecar.core.errors import RequestInvalid, SourceUnavailable
from slotcar_sidecar.process.tls import Certificates

from tests.unit.access.guarded import Guarded, entry, guarded

NOW = 1_700_000_000.0
PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
SAN = entry("engine", san="[engine.example, 'spiffe://cluster/engine']", token_sha256="[]")


def pem(certificate: trustme.LeafCert) -> bytes:
    return b"".join(part.bytes() for part in certificate.cert_chain_pems)


@dataclass
class Server:
    """A port with certificates; `expires` has what metrics are told."""

    folder: Path
    authority: trustme.CA
    certificates: Certificates
    expires: dict[str, float]
    guarded: Guarded = field(init=False)

    @property
    def port(self) -> int:
        return self.guarded.tls_port

    def renew(self, authority: trustme.CA | None = None, expires: datetime.datetime | None = None) -> None:
        """New files for the server, which a reload would read."""
        leaf = (authority or self.authority).issue_cert("localhost", not_after=expires)
        (self.folder / "tls.crt").write_bytes(pem(leaf))
        (self.folder / "tls.key").write_bytes(leaf.private_key_pem.bytes())
        self.authority.cert_pem.write_to_path(str(self.folder / "ca.crt"))

    def credentials(self, leaf: trustme.LeafCert | None) -> Credentials:
        """What a client shows; nothing for None."""
        if leaf is None:
            return Credentials(tls_ca=self.folder / "ca.crt")
        (self.folder / "client.crt").write_bytes(pem(leaf))
        (self.folder / "client.key").write_bytes(leaf.private_key_pem.bytes())
        return Credentials(self.folder / "ca.crt", self.folder / "client.crt", self.folder / "client.key")

    def client(self, leaf: trustme.LeafCert | None) -> clients.AsyncClient:
        target = f"localhost:{self.port}"
        return clients.connect(target, timeout_seconds=20, credentials=self.credentials(leaf))


@asynccontextmanager
async def serving(folder: Path, *entries: str) -> AsyncIterator[Server]:
    expires: dict[str, float] = {}
    paths = (folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
    certificates = Certificates(paths, lambda: NOW, expires.__setitem__)
    server = Server(folder, trustme.CA(), certificates, expires)
    server.renew()
    certificates.read()
    async with guarded(folder, *entries, credentials=certificates.credentials()) as server.guarded:
        yield server


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path, SAN, entry("ann")) as server:
        yield server


@pytest.mark.parametrize("san", ["engine.example", "spiffe://cluster/engine"])
async def test_a_client_is_known_by_its_certificate(server: Server, san: str) -> None:
    leaf = spiffe_certificate(server.authority, san) if "://" in san else server.authority.issue_cert(san)
    async with server.client(leaf) as client:
        assert (await client.capacity()).slots


def spiffe_certificate(authority: trustme.CA, uri: str) -> trustme.LeafCert:
    """With a URI in place of a name, which trustme has no way to ask for."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.load_pem_x509_certificate(authority.cert_pem.bytes())
    signer = load_pem_private_key(authority.private_key_pem.bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    builder = x509.CertificateBuilder(issuer.subject, x509.Name([]), key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(PAST).not_valid_after(PAST + datetime.timedelta(days=36500))
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    signed = builder.add_extension(names, critical=True).add_extension(usage, critical=True).sign(signer, SHA256())
    plain = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return trustme.LeafCert(plain, signed.public_bytes(Encoding.PEM), [])


REFUSED: dict[str, Callable[[Server], trustme.LeafCert | None]] = {
    "none": lambda server: None,
    "another authority's": lambda server: trustme.CA().issue_cert("engine.example"),
    "an expired one": lambda server: server.authority.issue_cert("engine.example", not_after=PAST),
}


@pytest.mark.parametrize("shown", REFUSED)
async def test_a_client_without_a_good_certificate_has_no_connection(server: Server, shown: str) -> None:
    async with server.client(REFUSED[shown](server)) as client:
        with pytest.raises(Unavailable):
            await client.capacity()


async def test_a_good_certificate_of_nobody_is_refused_by_name(server: Server) -> None:
    async with server.client(server.authority.issue_cert("other.example")) as client:
        with pytest.raises(Unauthenticated, match=r"other\.example"):
            await client.capacity()


async def test_a_client_does_not_talk_to_another_authoritys_server(server: Server) -> None:
    server.renew(trustme.CA())
    server.certificates.read()
    async with server.client(server.authority.issue_cert("engine.example")) as client:
        with pytest.raises(Unavailable):
            await client.capacity()


async def test_certificates_change_under_load_and_no_call_is_lost(server: Server) -> None:
    """Connections before and after; each serial number is seen. To see it fail: give gRPC the first pair for good."""
    leaf = server.authority.issue_cert("engine.example")
    async with server.client(leaf) as steady:
        running, calls = True, 0

        async def load() -> None:
            nonlocal calls
            while running:
                await steady.capacity()
                calls += 1

        under_load = asyncio.create_task(load())
        for _ in range(3):
            before = (server.folder / "tls.crt").read_bytes()
            server.renew()
            server.certificates.read()
            assert (server.folder / "tls.crt").read_bytes() != before
            async with server.client(leaf) as fresh:
                await fresh.capacity()
        running = False
        await under_load
        assert calls


async def test_a_new_connection_sees_the_new_pair_alone(server: Server) -> None:
    """The first pair's authority is not trusted by a client that knows the second's only."""
    second = trustme.CA()
    leaf = server.authority.issue_cert("engine.example")
    server.renew(second)
    server.certificates.read()
    second.cert_pem.write_to_path(str(server.folder / "second.crt"))
    shown = server.credentials(leaf)
    trusting = Credentials(server.folder / "second.crt", shown.tls_cert, shown.tls_key)
    async with clients.connect(f"localhost:{server.port}", timeout_seconds=20, credentials=trusting) as client:
        assert (await client.capacity()).slots


async def test_a_client_that_gets_a_new_certificate_shows_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotcar_client.credentials._LOOK_SECONDS", 0.0)
    async with server.client(server.authority.issue_cert("other.example")) as client:
        with pytest.raises(Unauthenticated):
            await client.capacity()
        server.credentials(server.authority.issue_cert("engine.example"))
        assert (await client.capacity()).slots


async def test_a_client_goes_on_while_its_new_certificate_cannot_be_read(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To see it fail: note what is to be read before it is read."""
    monkeypatch.setattr("slotcar_client.credentials._LOOK_SECONDS", 0.0)
    certificate = server.folder / "client.crt"
    async with server.client(server.authority.issue_cert("other.example")) as client:
        certificate.unlink()
        certificate.mkdir()
        for _ in range(2):
            with pytest.raises(Unauthenticated, match=r"other\.example"):
                await client.capacity()
        certificate.rmdir()
        server.credentials(server.authority.issue_cert("engine.example"))
        assert (await client.capacity()).slots


@pytest.mark.parametrize("broken", ["tls.crt", "tls.key", "ca.crt"])
async def test_a_bad_pair_leaves_the_one_before(server: Server, broken: str) -> None:
    """Half a write, or a key of another certificate, takes nobody's connection."""
    (server.folder / broken).write_bytes(b"-----BEGIN NOTHING-----\n")
    with pytest.raises(RequestInvalid, match=broken):
        server.certificates.read()
    server.authority.cert_pem.write_to_path(str(server.folder / "ca.crt"))
    async with server.client(server.authority.issue_cert("engine.example")) as client:
        assert (await client.capacity()).slots


async def test_a_bundle_that_is_cut_off_leaves_the_one_before(server: Server) -> None:
    """Clients of the second authority would be cut off with it. To see it fail: take what is whole."""
    bundle = server.authority.cert_pem.bytes() + trustme.CA().cert_pem.bytes()
    (server.folder / "ca.crt").write_bytes(bundle)
    server.certificates.read()
    (server.folder / "ca.crt").write_bytes(bundle[:-100])
    with pytest.raises(RequestInvalid, match="cut off"):
        server.certificates.read()


async def test_a_pipe_is_no_file_to_wait_for(server: Server) -> None:
    (server.folder / "ca.crt").unlink()
    os.mkfifo(server.folder / "ca.crt")
    with pytest.raises(SourceUnavailable, match="no regular file"):
        server.certificates.read()


async def test_a_pair_that_is_not_valid_yet_does_not_take_the_place_of_a_good_one(server: Server) -> None:
    leaf = server.authority.issue_cert("localhost", not_before=datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC))
    (server.folder / "tls.crt").write_bytes(pem(leaf))
    (server.folder / "tls.key").write_bytes(leaf.private_key_pem.bytes())
    with pytest.raises(RequestInvalid, match="not valid before 2100"):
        server.certificates.read()


UNKNOWN_KEY = b"""-----BEGIN PRIVATE KEY-----
MA8CAQAwBQYDKgMEBANhYmM=
-----END PRIVATE KEY-----
"""


async def test_a_key_of_an_unknown_kind_is_refused(server: Server) -> None:
    (server.folder / "tls.key").write_bytes(UNKNOWN_KEY)
    with pytest.raises(RequestInvalid, match=r"tls\.key is 'no key'"):
        server.certificates.read()


async def test_a_key_of_another_certificate_is_refused(server: Server) -> None:
    key = server.authority.issue_cert("localhost").private_key_pem.bytes()
    (server.folder / "tls.key").write_bytes(key)
    with pytest.raises(RequestInvalid, match="another certificate"):
        server.certificates.read()


async def test_an_expired_pair_does_not_take_the_place_of_a_good_one(server: Server) -> None:
    server.renew(expires=PAST)
    with pytest.raises(RequestInvalid, match="expired"):
        server.certificates.read()


async def test_the_end_of_their_lives_is_told(server: Server) -> None:
    end = datetime.datetime(2030, 5, 1, tzinfo=datetime.UTC)
    server.renew(expires=end)
    server.certificates.read()
    assert server.expires["server"] == end.timestamp()
    assert server.expires["client_ca"] > NOW
    assert server.certificates.ends() == server.expires


async def test_a_bearer_token_counts_over_tls_too(server: Server) -> None:
    """A wrong one is not made good by the certificate."""
    leaf = server.authority.issue_cert("engine.example")
    shown = server.credentials(leaf)
    (server.folder / "token").write_text("the-token-of-ann", encoding="utf-8")
    with_token = Credentials(shown.tls_ca, shown.tls_cert, shown.tls_key, server.folder / "token")
    async with clients.connect(f"localhost:{server.port}", credentials=with_token) as client:
        assert (await client.capacity()).slots
        (server.folder / "token").write_text("the-token-of-nobody", encoding="utf-8")
        with pytest.raises(Unauthenticated):
            await client.capacity()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2])
async def test_a_connection_is_of_tls_1_2_at_least(server: Server, version: ssl.TLSVersion) -> None:
    """The last one shows that the client may be as old as the others, and its ciphers too."""
    leaf = server.authority.issue_cert("engine.example")
    server.credentials(leaf)
    context = ssl.create_default_context(cafile=server.folder / "ca.crt")
    context.load_cert_chain(server.folder / "client.crt", server.folder / "client.key")
    context.set_ciphers("DEFAULT@SECLEVEL=0")
    context.set_alpn_protocols(["h2"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = version
    connecting = asyncio.open_connection("localhost", server.port, ssl=context)
    if version >= ssl.TLSVersion.TLSv1_2:
        _, writer = await connecting
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.2"
        writer.close()
    else:
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            await connecting


async def test_a_port_with_certificates_speaks_nothing_else(server: Server) -> None:
    async with aio.insecure_channel(f"localhost:{server.port}") as channel:
        with pytest.raises(aio.AioRpcError) as refused:
            await server.guarded.method("GetCapacity", channel)(adapters.GetCapacityRequest(), timeout=20)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
