"""`slotcar-injector certs`: files that a webhook and an API server can use, and their renewal."""

from __future__ import annotations

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from click.testing import CliRunner
from cryptography import x509
from slotcar_injector import certs
from slotcar_injector.cli import main

from tests.k8s.cluster import Webhook
from tests.k8s.pods import pod

NAMES = certs.names_of_service("slotcar-injector", "slotcar-system")
NOW = datetime(2030, 1, 1, tzinfo=UTC)


def call(*arguments: str) -> str:
    done = CliRunner().invoke(main, ["certs", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_webhook_serves_them_and_an_api_server_trusts_them(tmp_path: Path) -> None:
    call(str(tmp_path))
    webhook = Webhook(tmp_path, trustme.CA())
    webhook.trust = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    webhook.trust.verify_flags |= ssl.VERIFY_X509_STRICT
    webhook.start()
    try:
        assert webhook.admit(pod()).operations
        old = (tmp_path / "ca.crt").read_bytes()
        call(str(tmp_path), "--renew-days=3650")
        webhook.wait_for("certificate_used", 2)
        with pytest.raises(ssl.SSLCertVerificationError):
            webhook.connect()  # trusts the old authority only
        webhook.trust = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
        assert webhook.admit(pod()).operations
        assert (tmp_path / "ca.crt").read_bytes().endswith(old), "the old one is trusted until no replica has it"
    finally:
        webhook.end()


def test_files_that_last_are_kept(tmp_path: Path) -> None:
    assert call(str(tmp_path)).startswith("made")
    before = [(tmp_path / name).read_bytes() for name in ("ca.crt", "tls.crt", "tls.key")]
    assert call(str(tmp_path)).startswith("kept")
    assert [(tmp_path / name).read_bytes() for name in ("ca.crt", "tls.crt", "tls.key")] == before


def test_the_key_is_its_owner_s_alone(tmp_path: Path) -> None:
    call(str(tmp_path / "new" / "folder"))
    mode = (tmp_path / "new" / "folder" / "tls.key").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
@pytest.mark.parametrize("data", [None, b"", b"garbage"])
def test_a_broken_file_makes_them_anew(tmp_path: Path, name: str, data: bytes | None) -> None:
    call(str(tmp_path))
    if data is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(data)
    assert call(str(tmp_path)).startswith("made")


def test_another_service_s_or_another_authority_s_are_not_good(tmp_path: Path) -> None:
    certs.make(tmp_path, NAMES, 100, NOW)
    assert certs.is_good(tmp_path, NAMES, NOW)
    assert not certs.is_good(tmp_path, certs.names_of_service("other", "slotcar-system"), NOW)
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    assert not certs.is_good(tmp_path, NAMES, NOW)


def test_a_key_of_another_is_not_good(tmp_path: Path) -> None:
    certs.make(tmp_path, NAMES, 100, NOW)
    key = trustme.CA().issue_cert("x").private_key_pem
    key.write_to_path(str(tmp_path / "tls.key"))
    assert not certs.is_good(tmp_path, NAMES, NOW)


def test_they_are_renewed_in_time(tmp_path: Path) -> None:
    certs.make(tmp_path, NAMES, 100, NOW)
    assert certs.is_good(tmp_path, NAMES, NOW + timedelta(days=99))
    assert not certs.is_good(tmp_path, NAMES, NOW + timedelta(days=100))


def test_authorities_that_have_ended_leave_the_bundle(tmp_path: Path) -> None:
    certs.make(tmp_path, NAMES, 100, NOW)
    certs.make(tmp_path, NAMES, 100, NOW + timedelta(days=50))
    assert len(x509.load_pem_x509_certificates((tmp_path / "ca.crt").read_bytes())) == 2
    certs.make(tmp_path, NAMES, 100, NOW + timedelta(days=101))
    assert len(x509.load_pem_x509_certificates((tmp_path / "ca.crt").read_bytes())) == 2
