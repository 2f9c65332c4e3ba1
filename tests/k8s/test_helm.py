"""The chart in every mode: Helm's own lint and rendering, Kubernetes' schemas, and that its parts fit each other."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml
from click import Context
from slotcar_injector.annotations import ANNOTATIONS
from slotcar_injector.cli import serve
from slotcar_injector.review import inject
from slotcar_injector.settings import SYSTEM_NAMESPACES, Settings

from tests.k8s import charts, checks, custom
from tests.k8s.environment import REPOSITORY
from tests.k8s.pods import good

Json = dict[str, Any]
# The chart's oldest, the oldest with native sidecars, and the newest.
VERSIONS = ("1.27", "1.29", checks.VERSIONS[-1])


@pytest.fixture(params=charts.CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def objects(case: str) -> list[Json]:
    return charts.rendered(charts.values_of(case))


def parsed(objects: list[Json]) -> Context:
    """The injector's arguments, read by its own command line. Raises UsageError for one that it does not know."""
    command, *args = charts.args_of(objects)
    assert command == serve.name
    return serve.make_context("serve", list(args))


def is_beneath(labels: Json, selected: Json) -> bool:
    return labels.items() <= selected.items()


def test_helm_finds_no_fault(case: str) -> None:
    report = helm.lint(charts.CHART, charts.values_of(case), strict=True)
    assert report["errors"] == []
    assert [each["error"] for each in report["messages"]] == ["icon is recommended"]


def test_every_object_is_one_of_kubernetes(objects: list[Json]) -> None:
    for each in objects:
        if custom.is_custom(each):
            custom.check(each)
        else:
            checks.check_schemas(each, VERSIONS)


def test_a_rendering_is_as_it_was_accepted(case: str) -> None:
    assert charts.golden_text(case) == (charts.GOLDEN / f"{case}.yaml").read_text(encoding="utf-8")


def test_no_accepted_rendering_is_left_over() -> None:
    assert {path.stem for path in charts.GOLDEN.iterdir()} == set(charts.CASES)


def test_no_object_is_there_twice(objects: list[Json]) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)
    spaces = {each["metadata"].get("namespace") for each in objects}
    assert spaces == {charts.NAMESPACE, None}
    clusterwide = [each["kind"] for each in objects if "namespace" not in each["metadata"]]
    assert clusterwide == ["MutatingWebhookConfiguration"]


def test_nothing_may_ask_the_api_server(objects: list[Json]) -> None:
    kinds = {each["kind"] for each in objects}
    assert not kinds & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
    for pod in pods(objects):
        assert pod["spec"]["automountServiceAccountToken"] is False
    for account in charts.of_kind(objects, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def pods(objects: list[Json]) -> list[Json]:
    """The injector's, and that of `helm test`."""
    return [charts.pod_of(charts.one(objects, "Deployment")), charts.one(objects, "Pod")]


def test_pods_are_sound_and_restricted(objects: list[Json]) -> None:
    for pod in pods(objects):
        assert checks.faults(pod) == []
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        for _, container in checks.containers(pod):
            assert checks.unrestricted(pod, container) == []
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["resources"]["requests"].keys() >= {"cpu"}
            assert "memory" in container["resources"]["limits"]


def test_the_injector_s_command_line_knows_every_argument(case: str, objects: list[Json]) -> None:
    values = helm.Chart.merge_values(charts.chart(), charts.values_of(case))
    found = parsed(objects).params
    serving = values["serving"]
    assert (found["host"], found["port"], found["ops_port"]) == (serving["host"], serving["port"], serving["opsPort"])
    assert (found["body_bytes"], found["most_requests"]) == (serving["bodyBytes"], serving["mostRequests"])
    assert (found["drain_seconds"], found["poll_seconds"]) == (serving["drainSeconds"], serving["pollSeconds"])
    image = "registry.example/slotcar:" + (values["sidecar"]["image"]["tag"] or charts.chart().version)
    defaults = {"image": image} | values["sidecar"]["defaults"]
    assert set(found["default"]) == {f"{name}={text}" for name, text in defaults.items()}
    assert (found["user"], found["group"]) == (values["sidecar"]["user"], values["sidecar"]["group"])
    assert (found["bind"], found["kube_version"]) == (values["sidecar"]["bind"], "1.34")


def test_the_chart_s_bounds_are_those_of_the_command_line() -> None:
    """But for what the values or Kubernetes say."""
    found, defaults = parsed(charts.rendered(charts.IMAGES)).params, serve.make_context("serve", []).params
    changed = {name for name in defaults if found[name] != defaults[name]}
    assert changed == {"leave_out", "default", "kube_version"}


def test_without_a_version_the_cluster_s_is_taken() -> None:
    values = charts.merged(charts.IMAGES, {"sidecar": {"kubeVersion": ""}})
    assert parsed(charts.rendered(values)).params["kube_version"].startswith("v1.")


def test_it_answers_before_the_api_server_gives_up(objects: list[Json]) -> None:
    (webhook,) = charts.one(objects, "MutatingWebhookConfiguration")["webhooks"]
    assert parsed(objects).params["deadline_seconds"] < webhook["timeoutSeconds"]


def test_it_is_given_the_time_that_its_stop_takes(objects: list[Json]) -> None:
    from slotcar_injector.server import _STOP_SECONDS

    found = parsed(objects).params
    grace = charts.one(objects, "Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > found["drain_seconds"] + found["deadline_seconds"] + _STOP_SECONDS


def test_the_webhook_is_narrow_and_fails_closed(objects: list[Json]) -> None:
    (webhook,) = charts.one(objects, "MutatingWebhookConfiguration")["webhooks"]
    assert webhook["failurePolicy"] == "Fail"
    assert webhook["objectSelector"] == {"matchLabels": {"slotcar.dev/inject": "true"}}
    assert (webhook["reinvocationPolicy"], webhook["sideEffects"]) == ("IfNeeded", "None")
    (expression,) = webhook["namespaceSelector"]["matchExpressions"]
    left_out = set(expression.pop("values"))
    assert expression == {"key": "kubernetes.io/metadata.name", "operator": "NotIn"}
    assert left_out >= {charts.NAMESPACE, *SYSTEM_NAMESPACES}
    assert left_out == set(parsed(objects).params["leave_out"]), "those that ask all the same get the same"


def test_every_selector_finds_the_injector_s_pods_and_no_others(objects: list[Json]) -> None:
    ours, other = (pod["metadata"]["labels"] for pod in pods(objects))
    deployment = charts.one(objects, "Deployment")["spec"]
    selectors = [deployment["selector"]["matchLabels"], charts.one(objects, "Service")["spec"]["selector"]]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in charts.of_kind(objects, "PodDisruptionBudget")]
    selectors += [each["spec"]["podSelector"]["matchLabels"] for each in charts.of_kind(objects, "NetworkPolicy")]
    spread = deployment["template"]["spec"].get("topologySpreadConstraints", [])
    selectors += [each["labelSelector"]["matchLabels"] for each in spread]
    for selector in selectors:
        assert is_beneath(selector, ours)
        assert not is_beneath(selector, other)


def test_ports_that_are_named_are_there(objects: list[Json]) -> None:
    (container,) = pods(objects)[0]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    found = parsed(objects).params
    assert ports == {"webhook": found["port"], "operations": found["ops_port"]}
    assert {container[probe]["httpGet"]["port"] for probe in container if probe.endswith("Probe")} <= ports.keys()
    (port,) = charts.one(objects, "Service")["spec"]["ports"]
    assert port["targetPort"] == "webhook"
    for policy in charts.of_kind(objects, "NetworkPolicy"):
        assert [rule["ports"][0]["port"] for rule in policy["spec"]["ingress"]] == ["webhook", "operations"]


def test_the_api_server_calls_this_service(objects: list[Json]) -> None:
    (webhook,) = charts.one(objects, "MutatingWebhookConfiguration")["webhooks"]
    service = charts.one(objects, "Service")
    called = webhook["clientConfig"]["service"]
    assert (called["name"], called["namespace"]) == (service["metadata"]["name"], service["metadata"]["namespace"])
    assert called["port"] == service["spec"]["ports"][0]["port"]
    (test,) = charts.one(objects, "Pod")["spec"]["containers"]
    assert test["args"] == ["probe", f"https://{called['name']}.{called['namespace']}.svc:443/inject"]
    for certificate in charts.of_kind(objects, "Certificate"):
        if not certificate["spec"].get("isCA"):
            assert f"{called['name']}.{called['namespace']}.svc" in certificate["spec"]["dnsNames"]


def test_the_certificate_s_secret_is_the_one_that_is_mounted(case: str, objects: list[Json]) -> None:
    pod = pods(objects)[0]["spec"]
    (volume,), (mount,) = pod["volumes"], pod["containers"][0]["volumeMounts"]
    made = {each["metadata"]["name"] for each in charts.of_kind(objects, "Secret")}
    made |= {each["spec"]["secretName"] for each in charts.of_kind(objects, "Certificate")}
    made |= {"own"} if case in ("provided", "least") else set()
    assert volume["secret"]["secretName"] in made
    found = parsed(objects).params
    paths = {f"{mount['mountPath']}/{item['path']}" for item in volume["secret"]["items"]}
    assert paths == {str(found["certificate"]), str(found["key"])}


def test_cert_manager_writes_the_bundle_of_this_certificate() -> None:
    objects = charts.rendered(charts.values_of("cert-manager"))
    configuration = charts.one(objects, "MutatingWebhookConfiguration")
    assert "caBundle" not in configuration["webhooks"][0]["clientConfig"]
    origin = configuration["metadata"]["annotations"]["cert-manager.io/inject-ca-from"]
    serving = [each for each in charts.of_kind(objects, "Certificate") if "dnsNames" in each["spec"]]
    assert origin == f"{charts.NAMESPACE}/{serving[0]['metadata']['name']}"


def test_issuers_are_those_of_the_release() -> None:
    objects = charts.rendered(charts.values_of("cert-manager"))
    issuers = {each["metadata"]["name"] for each in charts.of_kind(objects, "Issuer")}
    certificates = charts.of_kind(objects, "Certificate")
    assert {each["spec"]["issuerRef"]["name"] for each in certificates} == issuers
    (signing,) = [each["spec"]["ca"] for each in charts.of_kind(objects, "Issuer") if "ca" in each["spec"]]
    assert signing["secretName"] in {each["spec"]["secretName"] for each in certificates if each["spec"].get("isCA")}


def test_an_issuer_that_is_there_is_used() -> None:
    objects = charts.rendered(charts.values_of("issuer"))
    assert charts.of_kind(objects, "Issuer") == []
    assert charts.one(objects, "Certificate")["spec"]["issuerRef"] == charts.ISSUER


def test_monitors_find_the_injector_and_the_pods_that_it_injects() -> None:
    objects = charts.rendered(charts.values_of("everything"))
    injector, sidecars = charts.of_kind(objects, "PodMonitor")
    assert is_beneath(injector["spec"]["selector"]["matchLabels"], pods(objects)[0]["metadata"]["labels"])
    pod, *_ = inject(good("deployment"), Settings(defaults={"image": "i"}))
    assert is_beneath(sidecars["spec"]["selector"]["matchLabels"], pod["metadata"]["labels"])
    assert sidecars["spec"]["namespaceSelector"] == {"any": True}
    (endpoint,) = sidecars["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in checks.named(pod, "slotcar")[1]["ports"]}
    assert [each["spec"]["podMetricsEndpoints"][0]["relabelings"] for each in (injector, sidecars)] == [
        [{"targetLabel": "job", "replacement": "slotcar-injector"}],
        [{"targetLabel": "job", "replacement": "slotcar"}],
    ]


def test_rules_and_dashboard_are_those_of_the_repository() -> None:
    objects = charts.rendered(charts.values_of("everything"))
    files = [REPOSITORY / "deploy" / "prometheus" / f"{name}.rules.yaml" for name in ("slotcar", "slotcar-injector")]
    texts = [
        path.read_text(encoding="utf-8").replace("_url: docs/", "_url: https://git.example/slotcar/docs/")
        for path in files
    ]
    assert charts.one(objects, "PrometheusRule")["spec"]["groups"] == [
        group for text in texts for group in yaml.safe_load(text)["groups"]
    ]
    shown = charts.one(objects, "ConfigMap")["data"]["slotcar.json"]
    assert json.loads(shown) == json.loads((REPOSITORY / "deploy" / "grafana" / "slotcar.json").read_text("utf-8"))


def test_copies_are_fresh() -> None:
    for copied, source in charts.COPIES.items():
        assert copied.read_bytes() == source.read_bytes(), f"{copied} is stale: run make golden-k8s"
    assert {*(charts.CHART / "files").iterdir()} == charts.COPIES.keys()
    assert not any(path.is_symlink() for path in charts.CHART.rglob("*")), "Flux leaves links out"


def test_a_package_has_all_that_the_folder_has(tmp_path: Path, case: str) -> None:
    archive = helm.package(charts.CHART, destination=tmp_path)
    with helm.Chart.load_archive(Path(archive).read_bytes()) as packed:
        texts = packed.render(charts.values_of(case), name=charts.RELEASE, namespace=charts.NAMESPACE)
    whole = charts.chart().render(charts.values_of(case), name=charts.RELEASE, namespace=charts.NAMESPACE)
    assert texts.keys() == whole.keys()
    differ = {name for name in texts if texts[name] != whole[name]}
    assert differ <= ({"slotcar/templates/webhook.yaml"} if case == "generated" else set())


def test_versions_are_the_project_s() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = charts.chart().metadata
    assert (metadata["version"], metadata["appVersion"]) == (project["version"], project["version"])


def test_defaults_can_be_every_annotation_s() -> None:
    schema = charts.chart().schema
    assert schema is not None
    named = schema["properties"]["sidecar"]["properties"]["defaults"]["properties"].keys()
    assert named == {each.name for each in ANNOTATIONS} - {"image"}, "image is sidecar.image"


@pytest.mark.parametrize("release", ["a", "x" * 53])
def test_names_are_dns_labels_whatever_the_release_is_called(release: str) -> None:
    values = charts.merged(charts.values_of("everything"), {"name": ""})
    for each in charts.rendered(values, release, "elsewhere"):
        name = each["metadata"]["name"]
        assert len(name) <= 63
        assert not name.startswith("-")
        assert not name.endswith("-")
        if not custom.is_custom(each):
            checks.check_schemas(each, VERSIONS[-1:])
    (ca,) = [each for each in charts.rendered(values, release) if each.get("spec", {}).get("isCA")]
    assert len(ca["spec"]["commonName"]) <= 64


def test_the_notes_say_how_to_go_on(case: str) -> None:
    notes = charts.chart().render(charts.values_of(case), name=charts.RELEASE, namespace=charts.NAMESPACE)
    text = notes["slotcar/templates/NOTES.txt"]
    assert 'slotcar.dev/inject: "true"' in text
    assert "helm -n slotcar-system test slotcar" in text
    assert ("Nothing but an upgrade" in text) == (case == "generated")
