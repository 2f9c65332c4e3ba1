"""Values that the chart refuses, each with the place of the fault, before anything is rendered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import helm_python as helm
import pytest

from tests.k8s import charts

Json = dict[str, Any]
PROVIDED = {"tls": {"mode": "provided", "provided": {"secretName": "own", "caBundle": charts.AUTHORITY}}}


def nested(place: str, value: object) -> Json:
    """{"a": {"b/c": value}} for /a/b~1c."""
    *outer, name = (part.replace("~1", "/") for part in place.strip("/").split("/"))
    found: Json = {name: value}
    for each in reversed(outer):
        found = {each: found}
    return found


# Place, value, and a part of what is said of it.
BAD = [
    ("/replica", 2, "additional properties 'replica' not allowed"),
    ("/tls/certmanager", {}, "additional properties 'certmanager' not allowed"),
    ("/serving/bodyMiB", 8, "additional properties 'bodyMiB' not allowed"),
    ("/sidecar/defaults/slot", "1", "additional properties 'slot' not allowed"),
    ("/sidecar/defaults/image", "a", "additional properties 'image' not allowed"),
    ("/sidecar/defaults/slots", 16, "got number, want string"),
    ("/sidecar/defaults/status-page", True, "got boolean, want string"),
    ("/sidecar/user", 0, "minimum: got 0, want 1"),
    ("/sidecar/bind", "localhost", "does not match pattern"),
    ("/sidecar/kubeVersion", 1.31, "got number, want string"),
    ("/sidecar/kubeVersion", "new", "does not match pattern"),
    ("/replicas", 0, "minimum: got 0, want 1"),
    ("/replicas", "2", "got string, want integer"),
    ("/image/repository", "registry.example/a:1", "does not match pattern"),
    ("/image/repository", "Registry/A", "does not match pattern"),
    ("/image/tag", "a b", "does not match pattern"),
    ("/image/tag", 1.2, "got number, want string"),
    ("/image/digest", "sha256:12", "does not match pattern"),
    ("/image/pullPolicy", "always", "value must be one of 'Always', 'IfNotPresent', 'Never'"),
    ("/imagePullSecrets", ["registry"], "got string, want object"),
    ("/name", "Injector", "does not match pattern"),
    ("/name", "x" * 51, "maxLength: got 51, want 50"),
    ("/labels/app.kubernetes.io~1name", "mine", "false schema"),
    ("/labels/team", 1, "got number, want string"),
    ("/webhook/timeoutSeconds", 1, "minimum: got 1, want 2"),
    ("/webhook/timeoutSeconds", 31, "maximum: got 31, want 30"),
    ("/webhook/leaveOut", ["kube-*"], "does not match pattern"),
    ("/webhook/failurePolicy", "Ignore", "additional properties 'failurePolicy' not allowed"),
    ("/serving/port", 443, "minimum: got 443, want 1,024"),
    ("/serving/host", "localhost", "does not match pattern"),
    ("/serving/bodyBytes", "8Mi", "got string, want integer"),
    ("/serving/mostRequests", 0, "minimum: got 0, want 1"),
    ("/tls/mode", "cert-manager", "value must be one of 'generated', 'certManager', 'provided'"),
    ("/tls/generated/days", 1, "minimum: got 1, want 2"),
    ("/tls/certManager/duration", "90d", "does not match pattern"),
    ("/tls/certManager/issuerRef", {"name": "company"}, "missing properties 'group', 'kind'"),
    ("/resources/limits/memory", "1 GB", "does not match pattern"),
    ("/resources/limits/nvidia.com~1gpu", "1", "additional properties 'nvidia.com/gpu' not allowed"),
    ("/runAsUser", 0, "minimum: got 0, want 1"),
    ("/tolerations", [{"operator": "Equals"}], "value must be one of 'Exists', 'Equal'"),
    ("/affinity/node", {}, "additional properties 'node' not allowed"),
    ("/nodeSelector/gpu", True, "got boolean, want string"),
    ("/networkPolicy/enabled", "yes", "got string, want boolean"),
    ("/monitoring/podMonitor/interval", 15, "got number, want string"),
    ("/monitoring/prometheusRule/runbook", "git.example", "does not match pattern"),
    ("/dashboard/labels/grafana_dashboard", 1, "got number, want string"),
    ("/serviceAccount", None, "missing property 'serviceAccount'"),
    ("/serving/port", None, "missing property 'port'"),
]


def refusal(values: Json) -> str:
    with pytest.raises(helm.HelmError) as caught:
        charts.chart().render(charts.merged(charts.IMAGES, values), name=charts.RELEASE, namespace=charts.NAMESPACE)
    return str(caught.value)


def holders(place: str, value: object) -> Iterator[str]:
    """The place itself, an item of it, or the object that may not have it, or must."""
    yield f"at '{place}'"
    yield f"at '{place}/0"
    yield f"at '{place.rpartition('/')[0]}'"


@pytest.mark.parametrize(("place", "value", "said"), BAD, ids=[f"{place}={value}" for place, value, _ in BAD])
def test_a_bad_value_is_refused_at_its_place(place: str, value: object, said: str) -> None:
    text = refusal(nested(place, value))
    assert said in text
    assert any(each in text for each in holders(place, value)), text


@pytest.mark.parametrize(
    ("provided", "place"),
    [
        ({"secretName": ""}, "/tls/provided/secretName"),
        ({"secretName": "Own"}, "/tls/provided/secretName"),
        ({"caBundle": ""}, "/tls/provided/caBundle"),
        ({"caBundle": "LS0tLS1CRUdJTi"}, "/tls/provided/caBundle"),
        ({"caBundle": "-----BEGIN PRIVATE KEY-----\n"}, "/tls/provided/caBundle"),
    ],
)
def test_a_provided_certificate_is_whole(provided: Json, place: str) -> None:
    assert f"at '{place}'" in refusal(charts.merged(PROVIDED, {"tls": {"provided": provided}}))


@pytest.mark.parametrize("place", ["/image/repository", "/sidecar/image/repository"])
def test_images_are_to_be_said(place: str) -> None:
    assert f"at '{place}': minLength: got 0, want 1" in refusal(nested(place, ""))


def test_a_certificate_is_renewed_before_it_ends() -> None:
    text = refusal({"tls": {"generated": {"days": 30, "renewDays": 30}}})
    assert "tls.generated.renewDays is 30, wanted less than tls.generated.days, 30" in text


def test_two_ports_are_not_one() -> None:
    text = refusal({"serving": {"opsPort": 8443}})
    assert "serving.opsPort is 8443, wanted another than serving.port" in text


def test_every_object_of_values_is_closed() -> None:
    """But for the affinities, whose fields are Kubernetes', and what a chart around this one has."""
    schema = charts.chart().schema
    assert schema is not None
    open_ones = set(unclosed("", schema))
    assert open_ones == {
        "/properties/global",
        *(f"/properties/affinity/properties/{name}" for name in ("nodeAffinity", "podAffinity", "podAntiAffinity")),
        "/properties/networkPolicy/properties/scrapers/properties/matchExpressions/items",
        "/properties/tls/properties/certManager/properties/issuerRef/anyOf/0",
    }


def unclosed(place: str, schema: object) -> Iterator[str]:
    if isinstance(schema, list):
        for index, each in enumerate(schema):
            yield from unclosed(f"{place}/{index}", each)
    if isinstance(schema, dict):
        if schema.get("type") == "object" and "additionalProperties" not in schema:
            yield place
        for name, each in schema.items():
            yield from unclosed(f"{place}/{name}", each)


def test_every_default_is_in_the_schema() -> None:
    """So a value that is forgotten there cannot be set, and one that is forgotten in values.yaml has no default."""
    schema = charts.chart().schema
    assert schema is not None
    assert schema["properties"].keys() - {"global"} == charts.chart().values.keys()
