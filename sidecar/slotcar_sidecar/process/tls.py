"""The certificates of TCP addresses: new ones count for the next connection, and a bad pair leaves the one before.

Invariant: what gRPC is given is a pair whose key fits, with authorities to check clients by.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from slotcar_sidecar.config import Config
from slotcar_sidecar.core.errors import RequestInvalid, SourceUnavailable
from slotcar_sidecar.process.reload import Reloads
from slotcar_sidecar.process.sockets import StartError
from slotcar_sidecar.sync.file import MAX_FILE_BYTES, contents

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

__all__ = ["Certificates", "make_certificates"]

_log = logging.getLogger("slotcar")

_BEGIN = re.compile(rb"-----BEGIN (?:X509 )?CERTIFICATE-----")

Expiry = Callable[[str, float], None]
"""Called with the certificate's kind and the end of its life, in Unix seconds."""


class Certificates:
    """The server's certificate and key, and the authorities of its clients."""

    def __init__(self, paths: tuple[Path, Path, Path], wall_clock: Callable[[], float], expiry: Expiry) -> None:
        """`paths`: of the certificate with its chain, of its key, and of the authorities; all of them PEM."""
        self._paths = paths
        self._wall_clock = wall_clock
        self._expiry = expiry
        self._current: grpc.ServerCertificateConfiguration | None = None
        self._ends: dict[str, float] = {}

    def files(self) -> tuple[Path, ...]:
        return self._paths

    def ends(self) -> dict[str, float]:
        """When those in force end, in Unix seconds: the server's, and the first of the authorities'."""
        return dict(self._ends)

    def read(self) -> None:
        """Puts in force what the files have, for connections from now on. Raises SlotcarError or OSError."""
        chain, key, authorities = map(_read, self._paths)
        own, others = _certificates(self._paths[0], chain), _certificates(self._paths[2], authorities)
        _check_key(self._paths, key, own[0])
        self._check_life(own[0])
        self._current = grpc.ssl_server_certificate_configuration([(key, chain)], authorities)
        first = min(each.not_valid_after_utc.timestamp() for each in others)
        self._ends = {"server": own[0].not_valid_after_utc.timestamp(), "client_ca": first}
        for name, end in self._ends.items():
            self._expiry(name, end)

    def _check_life(self, certificate: Certificate) -> None:
        """A server starts with what it has. Raises RequestInvalid when there is one in force that may be better."""
        begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if begin.timestamp() <= self._wall_clock() < end.timestamp():
            return
        state = f"not valid before {begin}" if self._wall_clock() < begin.timestamp() else f"expired {end}"
        if self._current is not None:
            raise RequestInvalid(str(self._paths[0]), found=state, wanted="one that is valid now")
        _log.error("the certificate is of no use now", extra={"fields": {"file": self._paths[0], "reason": state}})

    def credentials(self) -> grpc.ServerCredentials:
        """For one port: every connection shows and wants a certificate."""
        given = self._current
        assert given is not None, "read before"

        def newer() -> grpc.ServerCertificateConfiguration | None:
            """Asked by gRPC, in a thread of its own, at each hand-shake; None where nothing changed."""
            nonlocal given
            before, given = given, self._current
            return None if given is before else given

        # The stubs do not know that None may be returned.
        fetch: Any = newer
        return grpc.dynamic_ssl_server_credentials(given, fetch, require_client_authentication=True)


def make_certificates(config: Config, reloads: Reloads, expiry: Expiry) -> Certificates | None:
    """Those of the settings, followed while they change; None without. Raises StartError."""
    if config.tls_cert is None or config.tls_key is None or config.tls_client_ca is None:
        return None
    certificates = Certificates((config.tls_cert, config.tls_key, config.tls_client_ca), time.time, expiry)
    reloads.add("certificates", certificates.files, certificates.read)
    try:
        certificates.read()
    except ModuleNotFoundError as error:
        raise StartError("--tls-cert needs the package cryptography: pip install 'slotcar[tls]'") from error
    except (RequestInvalid, SourceUnavailable) as error:
        raise StartError(f"the certificates cannot be used: {error.message}") from error
    except OSError as error:
        raise StartError(f"{error.filename} cannot be read: {error.strerror}") from error
    return certificates


def _read(path: Path) -> bytes:
    try:
        return contents(path, MAX_FILE_BYTES)
    except RequestInvalid as error:
        raise error.at(str(path)) from None


def _certificates(path: Path, data: bytes) -> Sequence[Certificate]:
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(data)
    except ValueError:
        raise RequestInvalid(str(path), found="no certificate", wanted="certificates as PEM") from None
    if len(_BEGIN.findall(data)) != len(found):
        raise RequestInvalid(str(path), found="a certificate that is cut off", wanted="whole ones")
    return found


def _check_key(paths: Sequence[Path], data: bytes, certificate: Certificate) -> None:
    """`paths`: of the certificate, and of the key. Raises RequestInvalid unless they belong together."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise RequestInvalid(str(paths[1]), found="no key", wanted="a private key as PEM, without a password") from None
    try:
        fits = key.public_key() == certificate.public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        wanted = "RSA, an elliptic curve, or Ed25519"
        raise RequestInvalid(str(paths[0]), found="a key of an unknown kind", wanted=wanted) from None
    if not fits:
        raise RequestInvalid(str(paths[1]), found="the key of another certificate", wanted="that of --tls-cert")
