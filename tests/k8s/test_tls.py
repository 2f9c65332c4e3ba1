"""Certificates that change while the webhook serves, and files that are no certificate."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme

from tests.k8s.cluster import Webhook, running, trusting, write_pair
from tests.k8s.pods import body, pod, review

WHOLE = body(review(pod()))


@pytest.fixture
def webhook(tmp_path: Path) -> Iterator[Webhook]:
    with running(tmp_path) as started:
        yield started


def serial(webhook: Webhook) -> str:
    connection = webhook.connect()
    try:
        found = connection.sock.getpeercert()
        return str(found["serialNumber"])
    finally:
        connection.close()


class Load(threading.Thread):
    """Reviews without a pause, each on a connection of its own, or all on one."""

    def __init__(self, webhook: Webhook, *, one_connection: bool) -> None:
        super().__init__(daemon=True)
        self._webhook = webhook
        self._one_connection = one_connection
        self.stopping = threading.Event()
        self.answered = 0
        self.failed: list[object] = []

    def run(self) -> None:
        connection = self._webhook.connect()
        while not self.stopping.is_set():
            try:
                if not self._one_connection:
                    connection.close()
                    connection = self._webhook.connect()
                connection.request("POST", "/inject", WHOLE)
                response = connection.getresponse()
                response.read()
            except (OSError, ssl.SSLError) as error:
                self.failed.append(error)
                return
            if response.status == 200:
                self.answered += 1
            else:
                self.failed.append(response.status)
        connection.close()


def test_a_certificate_is_rotated_under_load_and_no_request_is_lost(webhook: Webhook) -> None:
    """vault#15389: the certificate was renewed, and the old one went on being served."""
    before = serial(webhook)
    loads = [Load(webhook, one_connection=one) for one in (True, False, False)]
    for load in loads:
        load.start()
    serials = {before}
    for count in range(2, 12):
        write_pair(webhook.folder, webhook.authority)
        webhook.wait_for("certificate_used", count)
        serials.add(serial(webhook))
    for load in loads:
        load.stopping.set()
    for load in loads:
        load.join(60)
        assert load.failed == []
        assert load.answered > 0
    assert len(serials) == 11


def test_an_authority_can_be_replaced_by_another(webhook: Webhook) -> None:
    other = trustme.CA()
    write_pair(webhook.folder, other)
    webhook.wait_for("certificate_used", 2)
    with pytest.raises(ssl.SSLCertVerificationError):
        webhook.connect()
    webhook.trust = trusting(other)
    assert webhook.admit(pod()).operations


def half_written(webhook: Webhook) -> None:
    text = (webhook.folder / "tls.crt").read_bytes()
    (webhook.folder / "..data" / "tls.crt").write_bytes(text[: len(text) // 2])


def another_s_key(webhook: Webhook) -> None:
    key = trustme.CA().issue_cert("other").private_key_pem
    (webhook.folder / "..data" / "tls.key").write_bytes(key.bytes())


def empty(webhook: Webhook) -> None:
    (webhook.folder / "..data" / "tls.crt").write_bytes(b"")


def garbage(webhook: Webhook) -> None:
    (webhook.folder / "..data" / "tls.key").write_bytes(b"\x00" * 5000)


@pytest.mark.parametrize("change", [half_written, another_s_key, empty, garbage])
def test_a_pair_that_cannot_be_used_leaves_the_old_one(webhook: Webhook, change: object) -> None:
    before = serial(webhook)
    assert callable(change)
    change(webhook)
    webhook.wait_for("certificate_refused")
    assert serial(webhook) == before
    assert webhook.admit(pod()).operations
    assert webhook.get("/readyz")[0] == 200
    write_pair(webhook.folder, webhook.authority)
    webhook.wait_for("certificate_used", 2)
    assert serial(webhook) != before


def test_files_that_are_gone_leave_the_old_pair(webhook: Webhook) -> None:
    (webhook.folder / "..data").unlink()
    webhook.wait_for("certificate_unreadable")
    assert webhook.admit(pod()).operations


def test_it_waits_for_its_first_certificate(tmp_path: Path) -> None:
    """cert-manager may come later than the Deployment."""
    webhook = Webhook(tmp_path, trustme.CA())
    webhook.start()
    try:
        assert webhook.get("/healthz")[0] == 200
        assert webhook.get("/readyz") == (503, "no valid certificate\n")
        with pytest.raises((ssl.SSLError, OSError)):
            webhook.connect()
        write_pair(tmp_path, webhook.authority)
        webhook.wait_for("certificate_used")
        assert webhook.get("/readyz")[0] == 200
        assert webhook.admit(pod()).operations
    finally:
        assert webhook.end() == 0


def test_an_expired_certificate_is_not_ready(tmp_path: Path) -> None:
    webhook = Webhook(tmp_path, trustme.CA())
    expired = webhook.authority.issue_cert("a", not_after=datetime(2020, 1, 1, tzinfo=UTC))
    expired.private_key_pem.write_to_path(str(tmp_path / "tls.key"))
    expired.cert_chain_pems[0].write_to_path(str(tmp_path / "tls.crt"))
    webhook.start()
    try:
        assert webhook.get("/readyz")[0] == 503
        expiry = datetime(2020, 1, 1, tzinfo=UTC).timestamp()
        shown = f"slotcar_injector_certificate_expiry_timestamp_seconds {expiry!r}".replace(
            "1577836800.0", "1.5778368e+09"
        )
        assert shown in webhook.get("/metrics")[1]
    finally:
        assert webhook.end() == 0


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_old_versions_of_tls_are_refused(webhook: Webhook) -> None:
    webhook.trust.minimum_version = ssl.TLSVersion.TLSv1
    webhook.trust.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        webhook.connect()


def test_the_metrics_count_what_was_used_and_refused(webhook: Webhook) -> None:
    another_s_key(webhook)
    webhook.wait_for("certificate_refused")
    _, text = webhook.get("/metrics")
    assert 'slotcar_injector_certificate_reloads_total{result="used"} 1.0' in text
    assert 'slotcar_injector_certificate_reloads_total{result="refused"} 1.0' in text
