"""The chart's certificates served by a real injector and trusted by its caBundle, over installs and upgrades.

Helm installs and upgrades against `objects`, so that its `lookup` finds what it made before.
"""

from __future__ import annotations

import base64
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
from click.testing import CliRunner
from cryptography import x509
from slotcar_injector.cli import main

from tests.k8s import charts
from tests.k8s.chart_webhook import ChartWebhook, lead, serving, write_secret
from tests.k8s.cluster import HOST
from tests.k8s.objects import Objects
from tests.k8s.objects import serving as api_server
from tests.k8s.pods import body, pod, review

Json = dict[str, Any]
SECRET = "slotcar-injector-generated"
CHANGED = "slotcar.dev/renew-after"


@dataclass
class Release:
    """What Helm installed, and the cluster that it is in."""

    config: helm.Config
    cluster: Objects

    def upgrade(self, **generated: int) -> None:
        values = charts.merged(charts.IMAGES, {"tls": {"generated": generated}})
        self.config.upgrade(charts.CHART, charts.RELEASE, values, namespace=charts.NAMESPACE)

    @property
    def objects(self) -> list[Json]:
        return list(self.cluster.kept.values())

    @property
    def secret(self) -> Json:
        return charts.one(self.objects, "Secret")

    @property
    def pair(self) -> tuple[str, ...]:
        return tuple(self.secret["data"][name] for name in ("ca.crt", "tls.crt", "tls.key"))


@pytest.fixture
def release() -> Iterator[Release]:
    with installed() as found:
        yield found


@contextmanager
def installed(version: str = "1.31") -> Iterator[Release]:
    with api_server(version) as cluster, configured(cluster) as config:
        config.install(charts.CHART, charts.RELEASE, charts.IMAGES, namespace=charts.NAMESPACE)
        yield Release(config, cluster)


def configured(cluster: Objects) -> helm.Config:
    """Helm, with its releases in memory."""
    return helm.Config(kube_apiserver=cluster.address, namespace=charts.NAMESPACE, storage_driver="memory")


def certificates(bundle: str) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(bundle.encode())


def test_the_bundle_trusts_what_is_served_and_the_webhook_answers(tmp_path: Path) -> None:
    objects = charts.rendered(charts.values_of("generated"))
    write_secret(tmp_path, charts.one(objects, "Secret"))
    with serving(tmp_path, objects) as webhook:
        admission = webhook.admit(pod())
        assert admission.allowed
        assert admission.operations
        assert webhook.get("/readyz")[0] == 200
        (configuration,) = charts.one(objects, "MutatingWebhookConfiguration")["webhooks"]
        path = configuration["clientConfig"]["service"]["path"]
        assert webhook.post(body(review(pod())), path)[0] == 200
        assert webhook.post(body(review(pod())), "/")[0] == 404


def test_what_is_served_has_the_service_s_names_and_lasts_as_long_as_is_said() -> None:
    objects = charts.rendered(charts.merged(charts.IMAGES, {"tls": {"generated": {"days": 30, "renewDays": 10}}}))
    secret = charts.one(objects, "Secret")
    (served,) = certificates(base64.b64decode(secret["data"]["tls.crt"]).decode())
    (authority,) = certificates(charts.ca_bundle(objects))
    served.verify_directly_issued_by(authority)
    names = served.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName)[0] == "slotcar-injector.slotcar-system.svc"
    lasting = (served.not_valid_after_utc - served.not_valid_before_utc).days
    assert lasting == 30
    renewed = int(secret["metadata"]["annotations"][CHANGED]) - served.not_valid_before_utc.timestamp()
    assert renewed == pytest.approx(20 * 86400, abs=10)


def test_long_names_are_served_as_well(tmp_path: Path) -> None:
    """A certificate's common name has at most 64 characters."""
    objects = charts.rendered(charts.values_of("generated"), "x" * 53, "n" * 63)
    (served,) = certificates(base64.b64decode(charts.one(objects, "Secret")["data"]["tls.crt"]).decode())
    names = served.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    called = charts.one(objects, "Service")["metadata"]["name"]
    assert f"{called}.{'n' * 63}.svc" in names.get_values_for_type(x509.DNSName)


def test_helm_s_test_asks_the_webhook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = charts.rendered(charts.values_of("generated"))
    write_secret(tmp_path, charts.one(objects, "Secret"))
    with serving(tmp_path, objects) as webhook:
        done = helm_test(objects, webhook, monkeypatch)
        assert (done.exit_code, done.stdout) == (0, "injected\n")


def test_helm_s_test_fails_where_the_authority_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = charts.rendered(charts.values_of("generated"))
    write_secret(tmp_path, charts.one(objects, "Secret"))
    with serving(tmp_path, objects) as webhook:
        done = helm_test(charts.rendered(charts.values_of("generated")), webhook, monkeypatch)
        assert done.exit_code == 1
        assert "certificate verify failed" in done.stderr


def helm_test(objects: list[Json], webhook: ChartWebhook, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command of the test's pod, with its environment; the Service's name leads to the webhook."""
    (container,) = charts.one(objects, "Pod")["spec"]["containers"]
    (variable,) = container["env"]
    value = variable.get("value")
    if value is None:
        wanted = variable["valueFrom"]["secretKeyRef"]
        secret = charts.one(objects, "Secret")
        assert secret["metadata"]["name"] == wanted["name"]
        value = base64.b64decode(secret["data"][wanted["key"]]).decode()
    lead(monkeypatch, (HOST, 443), webhook.port)
    return CliRunner().invoke(main, container["args"], env={variable["name"]: value})


def test_a_provided_certificate_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/kubernetes.md makes it."""
    assert CliRunner().invoke(main, ["certs", str(tmp_path)]).exit_code == 0
    given = {"mode": "provided", "provided": {"secretName": "own", "caBundle": (tmp_path / "ca.crt").read_text()}}
    objects = charts.rendered(charts.merged(charts.IMAGES, {"tls": given}))
    assert charts.ca_bundle(objects) == (tmp_path / "ca.crt").read_text()
    with serving(tmp_path, objects) as webhook:
        assert webhook.admit(pod()).operations
        assert helm_test(objects, webhook, monkeypatch).stdout == "injected\n"


def test_an_upgrade_keeps_the_certificate(release: Release) -> None:
    before, bundle = release.pair, charts.ca_bundle(release.objects)
    release.upgrade()
    release.upgrade(days=100, renewDays=50)
    assert release.pair == before, "others of its values count for the next one"
    assert charts.ca_bundle(release.objects) == bundle


def test_what_an_upgrade_renews_is_trusted_beside_what_was_before(release: Release, tmp_path: Path) -> None:
    write_secret(tmp_path, release.secret)
    with serving(tmp_path, release.objects) as webhook:
        before = charts.ca_bundle(release.objects)
        release.upgrade(generation=2)
        webhook.trust_bundle(charts.ca_bundle(release.objects))
        assert webhook.admit(pod()).operations, "replicas have the old one until the kubelet has written the new"
        write_secret(tmp_path, release.secret)
        webhook.wait_for("certificate_used", 2)
        assert webhook.admit(pod()).operations
        webhook.trust_bundle(before)
        with pytest.raises(ssl.SSLCertVerificationError):
            webhook.connect()


def test_the_bundle_has_two_authorities_at_most(release: Release) -> None:
    seen = certificates(charts.ca_bundle(release.objects))
    for generation in (2, 3, 4):
        release.upgrade(generation=generation)
        bundle = certificates(charts.ca_bundle(release.objects))
        assert len(bundle) == 2
        assert bundle[1] == seen[-1]
        seen.append(bundle[0])
    assert len({each.fingerprint(each.signature_hash_algorithm) for each in seen}) == 4  # type: ignore[arg-type]


def test_an_upgrade_renews_what_is_near_its_end(release: Release) -> None:
    before = release.pair
    release.secret["metadata"]["annotations"][CHANGED] = "1"
    release.upgrade()
    assert release.pair != before
    assert len(certificates(charts.ca_bundle(release.objects))) == 2
    renewed = release.pair
    release.upgrade()
    assert release.pair == renewed


@pytest.mark.parametrize("key", ["ca.crt", "tls.crt", "tls.key"])
def test_a_secret_that_lacks_a_part_is_made_anew(release: Release, key: str) -> None:
    before = release.pair
    del release.secret["data"][key]
    release.upgrade()
    assert not set(release.pair) & set(before)


def test_a_secret_that_is_gone_is_made_anew_and_the_old_authority_is_lost(release: Release) -> None:
    (before,) = certificates(charts.ca_bundle(release.objects))
    del release.cluster.kept[f"/api/v1/namespaces/{charts.NAMESPACE}/secrets/{SECRET}"]
    release.upgrade()
    (now,) = certificates(charts.ca_bundle(release.objects))
    assert now != before


def test_a_rollback_brings_back_the_pair_and_its_bundle(release: Release) -> None:
    before, bundle = release.pair, charts.ca_bundle(release.objects)
    release.upgrade(generation=2)
    release.config.rollback(charts.RELEASE, version=1)
    assert (release.pair, charts.ca_bundle(release.objects)) == (before, bundle)


def test_the_secret_is_there_before_the_pods_and_the_webhook_comes_last(release: Release) -> None:
    changes = [line.split()[1] for line in release.cluster.said if line.startswith("PATCH")]
    kinds = [next(part for part in reversed(path.partition("?")[0].split("/")[:-1]) if part) for path in changes]
    assert kinds.index("secrets") < kinds.index("deployments")
    assert kinds[-1] == "mutatingwebhookconfigurations"


def test_uninstalling_leaves_nothing_and_lets_pods_through_first(release: Release) -> None:
    release.cluster.said.clear()
    release.config.uninstall(charts.RELEASE)
    assert release.objects == []
    deleted = [line for line in release.cluster.said if line.startswith("DELETE")]
    assert "/mutatingwebhookconfigurations/" in deleted[0]


def test_a_change_of_mode_leaves_cert_manager_its_own_secret(release: Release) -> None:
    values = charts.values_of("cert-manager")
    release.config.upgrade(charts.CHART, charts.RELEASE, values, namespace=charts.NAMESPACE)
    assert charts.of_kind(release.objects, "Secret") == []
    assert SECRET not in {each["spec"]["secretName"] for each in charts.of_kind(release.objects, "Certificate")}


def test_a_cluster_that_is_too_old_is_refused() -> None:
    with pytest.raises(helm.HelmError, match=r"requires kubeVersion: >=1.27.0-0"), installed("1.26"):
        pass
