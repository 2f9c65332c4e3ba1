"""Makes a certificate authority and one serving certificate, as files, for clusters without cert-manager.

The authority's key is thrown away: what is signed is one certificate, and a new one gets a new authority. `ca.crt` then
has the old one too while it is valid, so that a webhook configuration with it trusts either.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
_PEM = serialization.Encoding.PEM
_CLOCKS_DIFFER = timedelta(minutes=5)


def names_of_service(service: str, namespace: str) -> tuple[str, ...]:
    """What an API server calls a Service by, and what others may."""
    base = f"{service}.{namespace}.svc"
    return base, f"{base}.cluster.local", f"{service}.{namespace}"


def make(folder: Path, names: tuple[str, ...], days: int, now: datetime) -> None:
    """Writes the three files, for these DNS names; each is whole or as before, the certificate last."""
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    end = now + timedelta(days=days)
    authority = _authority(authority_key, now, end)
    certificate = _certificate(names, key, authority, authority_key)
    old = [each for each in _read(folder / AUTHORITY) if each.not_valid_after_utc > now]
    bundle = b"".join(each.public_bytes(_PEM) for each in (authority, *old))
    private = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / AUTHORITY, bundle, 0o644)
    _write(folder / KEY, private, 0o600)
    _write(folder / CERTIFICATE, certificate.public_bytes(_PEM), 0o644)


def is_good(folder: Path, names: tuple[str, ...], until: datetime) -> bool:
    """Whether the files in `folder` belong together, are for these names, and last until then."""
    certificates, authorities = _read(folder / CERTIFICATE), _read(folder / AUTHORITY)
    if not certificates:
        return False
    certificate = certificates[0]
    try:
        key = serialization.load_pem_private_key((folder / KEY).read_bytes(), password=None)
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        signed = any(_signed(certificate, authority) for authority in authorities)
    except (OSError, ValueError, TypeError, x509.ExtensionNotFound):
        return False
    has_names = set(names) <= set(found.get_values_for_type(x509.DNSName))
    return (
        signed
        and has_names
        and key.public_key() == certificate.public_key()
        and certificate.not_valid_after_utc > until
    )


def _signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _authority(key: ec.EllipticCurvePrivateKey, now: datetime, end: datetime) -> x509.Certificate:
    # Each has a name of its own: a verifier looks authorities up by name.
    name = _name(f"slotcar-injector CA {x509.random_serial_number():x}"[:60])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        **dict.fromkeys(
            (
                "content_commitment",
                "key_encipherment",
                "data_encipherment",
                "key_agreement",
                "encipher_only",
                "decipher_only",
            ),
            False,
        ),
    )
    return (
        _unsigned(name, name, key, now - _CLOCKS_DIFFER, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _certificate(
    names: tuple[str, ...],
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
    authority_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    begin, end = authority.not_valid_before_utc, authority.not_valid_after_utc
    return (
        _unsigned(_name(names[0][:60]), authority.subject, key, begin, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(alternatives, critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(authority_id, critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def _unsigned(
    name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, begin: datetime, end: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key.public_key())
    return builder.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _read(path: Path) -> Sequence[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError):
        return ()


def _write(path: Path, data: bytes, mode: int) -> None:
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    new.replace(path)
