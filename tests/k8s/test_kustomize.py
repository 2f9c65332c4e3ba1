"""The overlays of deploy/kustomize and the manifests of examples/kubernetes.

They are built by kustomize and validated strictly; they are what the chart and the injector make, where these make the
same; and what one object names, another has.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from slotcar_injector.cli import serve

from tests.k8s import charts, checks, custom, kustomize

Json = dict[str, Any]
# The oldest with native sidecars, and the newest.
VERSIONS = (checks.VERSIONS[0], checks.VERSIONS[-1])
# As docs/kubernetes.md says. 1.29 knows the sleep of the pool's preStop too, but leaves it out unless told otherwise.
OLDEST = {"daemonset": "1.27", "injector": "1.27", "plain-pod": "1.29", "pool": "1.30", "pool-cert-manager": "1.30"}
EXAMPLES = sorted(path.stem for path in kustomize.EXAMPLES.iterdir())
# What each namespace lets in.
STANDARDS = {"slotcar-system": "restricted", "slotcar-pool": "restricted", "slotcar-node": "privileged"}
SECRETS = {
    "slotcar-injector-tls": {"tls.crt", "tls.key"},
    "slotcar-member-tls": {"ca.crt", "tls.crt", "tls.key"},
    "slotcar-envoy-tls": {"ca.crt", "tls.crt", "tls.key"},
}


@pytest.fixture(params=kustomize.OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def objects(overlay: str) -> list[Json]:
    return kustomize.built(overlay)


def test_every_object_is_one_of_kubernetes(overlay: str, objects: list[Json]) -> None:
    for each in objects:
        if custom.is_custom(each):
            custom.check(each)
        else:
            checks.check_schemas(each, (OLDEST[overlay], checks.VERSIONS[-1]))


def test_a_build_is_as_it_was_accepted(overlay: str) -> None:
    assert kustomize.golden_text(overlay) == (kustomize.GOLDEN / f"{overlay}.yaml").read_text(encoding="utf-8")


def test_every_overlay_is_tested_and_no_accepted_build_is_left_over() -> None:
    assert {path.name for path in kustomize.FOLDER.iterdir()} == set(kustomize.OVERLAYS)
    assert {path.stem for path in kustomize.GOLDEN.iterdir()} == set(kustomize.OVERLAYS)


def test_no_object_is_there_twice(objects: list[Json]) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)


def test_pods_are_sound(objects: list[Json]) -> None:
    for pod in kustomize.pods(objects):
        assert checks.faults(pod) == []
        for _, container in checks.containers(pod):
            if container["name"] != "engine":
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
                assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
                assert "memory" in container["resources"]["limits"]


def test_pods_are_what_their_namespace_lets_in(overlay: str, objects: list[Json]) -> None:
    """All but the engines' own containers, which are not ours, are restricted wherever that can be."""
    for pod in kustomize.pods(objects):
        for _, container in checks.containers(pod):
            expected = []
            if (overlay, container["name"]) == ("daemonset", "folder"):
                expected = ["runAsNonRoot", "runAsUser", "capabilities.add", "seccompProfile"]
            if container["name"] != "engine":
                assert checks.unrestricted(pod, container) == expected
    for each in objects:
        if each["kind"] == "Namespace":
            standard = STANDARDS[each["metadata"]["name"]]
            assert each["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == standard


def test_a_folder_of_the_node_is_in_a_namespace_that_lets_it_in() -> None:
    for overlay in kustomize.OVERLAYS:
        objects = kustomize.built(overlay)
        if any("hostPath" in each for each in _volumes(objects)):
            (namespace,) = charts.of_kind(objects, "Namespace")
            assert STANDARDS[namespace["metadata"]["name"]] == "privileged"


def test_what_pods_mount_is_there(objects: list[Json]) -> None:
    maps = {each["metadata"]["name"]: set(each["data"]) for each in charts.of_kind(objects, "ConfigMap")}
    for pod in kustomize.pods(objects):
        mounts = {m["name"]: m["mountPath"] for _, each in checks.containers(pod) for m in each["volumeMounts"]}
        args = [text for _, each in checks.containers(pod) for text in each.get("args", ())]
        for volume in pod["spec"]["volumes"]:
            if "configMap" in volume:
                files = maps[volume["configMap"]["name"]]
            elif "secret" in volume:
                files = SECRETS[volume["secret"]["secretName"]]
            else:
                continue
            path = mounts[volume["name"]]
            named = {text.rpartition("=")[2] for text in args if path in text}
            assert {Path(each).name for each in named} <= files
            assert named or volume["secret"]["secretName"] == "slotcar-envoy-tls"


def test_services_and_policies_choose_pods_and_their_ports(objects: list[Json]) -> None:
    found = list(kustomize.pods(objects))
    for each in objects:
        if each["kind"] == "Service":
            selector, ports = each["spec"]["selector"], [port["targetPort"] for port in each["spec"]["ports"]]
        elif each["kind"] == "NetworkPolicy":
            selector = each["spec"]["podSelector"]["matchLabels"]
            ports = [port["port"] for rule in each["spec"]["ingress"] for port in rule["ports"]]
        elif each["kind"] == "PodDisruptionBudget":
            selector, ports = each["spec"]["selector"]["matchLabels"], []
        else:
            continue
        (pod,) = [pod for pod in found if selector.items() <= pod["metadata"]["labels"].items()]
        named = {port["name"] for _, container in checks.containers(pod) for port in container["ports"]}
        assert set(ports) <= named


# The injector


def test_the_injector_is_the_chart_s() -> None:
    ours = kustomize.built("injector")
    theirs = charts.rendered(charts.values_of("provided"))
    for kind in ("ServiceAccount", "Service", "PodDisruptionBudget", "NetworkPolicy", "MutatingWebhookConfiguration"):
        assert bare(charts.one(ours, kind)) == bare(charts.one(theirs, kind))
    assert bare(charts.one(ours, "Deployment")) == bare(charts.one(theirs, "Deployment"))


def bare(of: Json) -> Json:
    """Without labels, images, what is in variables here and in arguments there, and what belongs to a certificate."""
    text = json.dumps(of).replace('"own"', '"slotcar-injector-tls"')
    found: Json = json.loads(text)
    found["metadata"].pop("labels")
    spec = found.get("spec", {})
    for selector in (spec.get("selector"), spec.get("podSelector")):
        _forget(selector)
    for webhook in found.get("webhooks", ()):
        webhook["clientConfig"].pop("caBundle")
    if "template" in spec:
        template = spec["template"]
        template.pop("metadata")
        for each in template["spec"]["topologySpreadConstraints"]:
            _forget(each["labelSelector"])
        (container,) = template["spec"]["containers"]
        for name in ("image", "args", "envFrom"):
            container.pop(name, None)
    return found


def _forget(selector: Json | None) -> None:
    for labels in filter(None, (selector, (selector or {}).get("matchLabels"))):
        labels.pop("app.kubernetes.io/instance", None)


def test_the_injector_s_command_line_knows_arguments_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = kustomize.built("injector")
    (found,) = charts.of_kind(objects, "ConfigMap")
    for name, text in found["data"].items():
        monkeypatch.setenv(name, text)
    command, *args = charts.args_of(objects)
    ours = serve.make_context(command, args, auto_envvar_prefix="SLOTCAR_INJECTOR_SERVE").params
    monkeypatch.undo()
    _, *args = charts.args_of(charts.rendered(charts.values_of("provided")))
    theirs = serve.make_context(command, args).params
    changed = {name for name in theirs if sorted(map(str, [ours[name]])) != sorted(map(str, [theirs[name]]))}
    assert changed <= {"default", "kube_version", "leave_out"}
    assert set(ours["leave_out"]) == set(theirs["leave_out"])
    assert ours["default"] == ("image=slotcar:0.1.0", "max-rank=32", "dtype=bfloat16", "memory-limit=4Gi")


# A pod by hand

WISHES = {
    "slotcar.dev/slots": "8",
    "slotcar.dev/max-rank": "32",
    "slotcar.dev/dtype": "bfloat16",
    "slotcar.dev/roots": "models/adapters:/srv/adapters",
    "slotcar.dev/adapters": "adapters",
    "slotcar.dev/memory-limit": "4Gi",
}


def test_a_pod_by_hand_is_what_the_injector_makes() -> None:
    by_hand = kustomize.one(kustomize.built("plain-pod"), "Pod", "engine")
    assert injected(without_slotcar(by_hand), "image=slotcar:0.1.0")["spec"] == by_hand["spec"]
    assert by_hand["metadata"]["labels"]["slotcar.dev/metrics"] == "true"


def test_one_beside_the_engine_is_of_the_oldest_kubernetes_too() -> None:
    alone = without_slotcar(kustomize.one(kustomize.built("plain-pod"), "Pod", "engine"))
    alone["metadata"]["annotations"]["slotcar.dev/mode"] = "container"
    checks.check_schemas(injected(alone, "image=slotcar:0.1.0"), ("1.27", checks.VERSIONS[-1]))


def without_slotcar(pod: Json) -> Json:
    """The engine alone, with what it wishes of slotcar as annotations."""
    alone = copy.deepcopy(pod)
    alone["metadata"]["annotations"] = dict(WISHES)
    del alone["metadata"]["labels"]["slotcar.dev/metrics"]
    spec = alone["spec"]
    del spec["initContainers"], spec["securityContext"]["supplementalGroups"]
    spec["volumes"] = [each for each in spec["volumes"] if not each["name"].startswith("slotcar-")]
    (engine,) = spec["containers"]
    del engine["env"], engine["volumeMounts"]
    return alone


def injected(pod: Json, *defaults: str) -> Json:
    """By the command, as in docs/kubernetes.md."""
    options = [word for each in defaults for word in ("--default", each)]
    command = [sys.executable, "-m", "slotcar_injector", "inject", *options]
    done = subprocess.run(command, input=json.dumps(pod), check=True, capture_output=True, text=True, timeout=60)
    found: Json = json.loads(done.stdout)
    return found


# The node's


def test_the_node_s_folder_becomes_slotcar_s_once(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a folder to another user")
    pod = charts.pod_of(kustomize.one(kustomize.built("daemonset"), "DaemonSet", "slotcar"))
    _, container = checks.named(pod, "folder")
    *_, program = container["command"]
    folder = tmp_path / "slotcar"
    folder.mkdir()
    for _ in range(2):
        subprocess.run([sys.executable, "-c", program.replace("/run/slotcar", str(folder))], check=True, timeout=60)
        state = folder.stat()
        assert (state.st_uid, state.st_gid, state.st_mode & 0o777) == (65532, 65532, 0o750)


# The pool


def test_envoy_s_members_are_the_statefulset_s() -> None:
    objects = kustomize.built("pool")
    members = kustomize.one(objects, "StatefulSet", "slotcar")
    name, service = members["metadata"]["name"], members["spec"]["serviceName"]
    port = kustomize.one(objects, "Service", service)["spec"]["ports"][0]["port"]
    (envoy,) = [each for each in charts.of_kind(objects, "ConfigMap") if "envoy.yaml" in each["data"]]
    (pool,) = [
        each
        for each in yaml.safe_load(envoy["data"]["envoy.yaml"])["static_resources"]["clusters"]
        if each["name"] == "slotcars"
    ]
    (locality,) = pool["load_assignment"]["endpoints"]
    addresses = [each["endpoint"]["address"]["socket_address"] for each in locality["lb_endpoints"]]
    domain = f"{service}.{members['metadata']['namespace']}.svc.cluster.local"
    expected = [f"{name}-{number}.{domain}" for number in range(members["spec"]["replicas"])]
    assert [each["address"] for each in addresses] == expected
    assert {each["port_value"] for each in addresses} == {port}


def test_envoy_listens_where_its_pod_says() -> None:
    objects = kustomize.built("pool")
    (envoy,) = [each for each in charts.of_kind(objects, "ConfigMap") if "envoy.yaml" in each["data"]]
    listeners = yaml.safe_load(envoy["data"]["envoy.yaml"])["static_resources"]["listeners"]
    (container,) = kustomize.one(objects, "Deployment", "envoy")["spec"]["template"]["spec"]["containers"]
    ports = {port["containerPort"] for port in container["ports"]}
    assert {each["address"]["socket_address"]["port_value"] for each in listeners} == ports


def test_a_certificate_has_the_name_that_is_checked_and_the_usages_it_needs() -> None:
    objects = kustomize.built("pool-cert-manager")
    found = {each["spec"]["secretName"]: each["spec"] for each in charts.of_kind(objects, "Certificate")}
    signed = {name: each for name, each in found.items() if not each.get("isCA")}
    assert {name: (*each["dnsNames"], *each["usages"][1:]) for name, each in signed.items()} == {
        "slotcar-member-tls": ("slotcar.slotcar-pool.svc", "server auth"),
        "slotcar-envoy-tls": ("envoy.slotcar-pool.svc", "server auth", "client auth"),
        "engine-tls": ("engine.slotcar-pool.svc", "client auth"),
    }
    (engine,) = kustomize.pods(kustomize.example("pool-engine"))
    mounted = {
        each["secret"]["secretName"] for each in [*_volumes(objects), *engine["spec"]["volumes"]] if "secret" in each
    }
    assert mounted == set(signed)
    (authority,) = found.keys() - signed.keys()
    issuer = kustomize.one(objects, "Issuer", "slotcar-authority")
    assert issuer["spec"]["ca"]["secretName"] == authority
    assert {each["issuerRef"]["name"] for each in signed.values()} == {issuer["metadata"]["name"]}


def _volumes(objects: list[Json]) -> list[Json]:
    return [each for pod in kustomize.pods(objects) for each in pod["spec"].get("volumes", ())]


# The examples


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_sound(name: str) -> None:
    objects = kustomize.example(name)
    for each in objects:
        checks.check_schemas(each, VERSIONS)
    for pod in kustomize.pods(objects):
        assert checks.faults(pod) == []
        if pod["metadata"]["labels"].get("slotcar.dev/inject") == "true":
            made = injected(pod | {"metadata": pod["metadata"] | {"name": "pod"}}, "image=slotcar:0.1.0")
            assert checks.faults(made) == []
            checks.check_schemas(made, VERSIONS)


def test_an_engine_of_the_node_s_slotcar_finds_its_socket() -> None:
    (engine,) = kustomize.pods(kustomize.example("node-engine"))
    slotcar = charts.pod_of(kustomize.one(kustomize.built("daemonset"), "DaemonSet", "slotcar"))
    (volume,) = [each for each in engine["spec"]["volumes"] if "hostPath" in each]
    (theirs,) = [each for each in slotcar["spec"]["volumes"] if each["name"] == "run"]
    assert volume["hostPath"]["path"] == theirs["hostPath"]["path"]
    (container,) = engine["spec"]["containers"]
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == volume["name"]]
    assert mount["readOnly"] is True
    (listen,) = [text for text in checks.named(slotcar, "slotcar")[1]["args"] if text.startswith("--listen=")]
    (target,) = [each["value"] for each in container["env"] if each["name"] == "SLOTCAR_TARGET"]
    assert target == listen.removeprefix("--listen=")
    _, sidecar = checks.named(slotcar, "slotcar")
    assert engine["spec"]["securityContext"]["supplementalGroups"] == [sidecar["securityContext"]["runAsGroup"]]


def test_an_engine_of_the_pool_is_let_in() -> None:
    (engine,) = kustomize.pods(kustomize.example("pool-engine"))
    objects = kustomize.built("pool")
    (rule, _) = kustomize.one(objects, "NetworkPolicy", "envoy")["spec"]["ingress"]
    wanted = rule["from"][0]["podSelector"]["matchLabels"]
    assert wanted.items() <= engine["metadata"]["labels"].items()
    service = kustomize.one(objects, "Service", "envoy")
    (container,) = engine["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    port = service["spec"]["ports"][0]["port"]
    assert variables["SLOTCAR_TARGET"] == f"tcp://envoy.{service['metadata']['namespace']}.svc:{port}"
    assert {f"SLOTCAR_TLS_{part}" for part in ("CA", "CERT", "KEY")} <= variables.keys()
