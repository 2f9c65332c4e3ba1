"""The chart, rendered by Helm itself in the cases that its tests share, and what is generated for it.

Files that the chart must have inside are copies, as some readers of Git trees leave links out; `make golden-k8s` makes
them anew, and a test compares them.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

from tests.k8s.environment import REPOSITORY

Json = dict[str, Any]
CHART = REPOSITORY / "deploy" / "helm" / "slotcar"
GOLDEN = Path(__file__).parent / "golden" / "helm"
COPIES = {
    CHART / "files" / "slotcar.json": REPOSITORY / "deploy" / "grafana" / "slotcar.json",
    CHART / "files" / "slotcar.rules.yaml": REPOSITORY / "deploy" / "prometheus" / "slotcar.rules.yaml",
    CHART / "files" / "slotcar-injector.rules.yaml": REPOSITORY
    / "deploy"
    / "prometheus"
    / "slotcar-injector.rules.yaml",
}
RELEASE, NAMESPACE = "slotcar", "slotcar-system"
# What has no default.
IMAGES: Json = {
    "image": {"repository": "registry.example/slotcar-injector"},
    "sidecar": {"image": {"repository": "registry.example/slotcar"}, "kubeVersion": "1.34"},
}
AUTHORITY = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
ISSUER = {"group": "cert-manager.io", "kind": "ClusterIssuer", "name": "company"}
EVERYTHING: Json = {
    "name": "webhook",
    "labels": {"team": "inference"},
    "replicas": 3,
    "image": {"tag": "1.2.3", "digest": "sha256:" + "0" * 64, "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "sidecar": {
        "image": {"tag": "1.2.3"},
        "defaults": {"slots": "16", "memory-limit": "6Gi", "log-format": "human"},
        "user": 1000,
        "group": 1001,
        "bind": "::",
    },
    "webhook": {"timeoutSeconds": 10, "leaveOut": ["monitoring"]},
    "serving": {"host": "::", "port": 10250, "opsPort": 9000, "drainSeconds": 30, "mostRequests": 16},
    "tls": {"mode": "certManager"},
    "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "2", "memory": "2Gi"}},
    "priorityClassName": "system-cluster-critical",
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "control", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "DoesNotExist"}]}]
            }
        }
    },
    "podAnnotations": {"example.com/note": "yes"},
    "serviceAccount": {"name": "webhook-account", "annotations": {"example.com/role": "none"}},
    "monitoring": {
        "labels": {"release": "prometheus"},
        "podMonitor": {"enabled": True, "interval": "30s"},
        "prometheusRule": {"enabled": True, "runbook": "https://git.example/slotcar/"},
    },
    "dashboard": {"enabled": True, "annotations": {"grafana_folder": "Inference"}},
}
LEAST: Json = {
    "replicas": 1,
    "tls": {"mode": "provided", "provided": {"secretName": "own", "caBundle": AUTHORITY}},
    "runAsUser": None,
    "spread": [],
    "serviceAccount": {"create": False},
    "podDisruptionBudget": {"enabled": False},
    "networkPolicy": {"enabled": False},
}
CASES: dict[str, Json] = {
    "generated": {},
    "cert-manager": {"tls": {"mode": "certManager"}},
    "issuer": {"tls": {"mode": "certManager", "certManager": {"issuerRef": ISSUER}}},
    "provided": {"tls": LEAST["tls"]},
    "everything": EVERYTHING,
    "least": LEAST,
}
_LONG = {"ConfigMap": "data", "PrometheusRule": "spec"}


@cache
def chart() -> helm.Chart:
    return helm.Chart.load(CHART)


def merged(below: Json, above: Json) -> Json:
    """As Helm lays values over others."""
    found = copy.deepcopy(below)
    for name, value in above.items():
        is_nested = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = merged(found[name], value) if is_nested else copy.deepcopy(value)
    return found


def values_of(case: str) -> Json:
    return merged(IMAGES, CASES[case])


def rendered(values: Json, release: str = RELEASE, namespace: str = NAMESPACE) -> list[Json]:
    """The objects, in the order of the templates' names. Raises helm.HelmError."""
    texts = chart().render(values, name=release, namespace=namespace)
    return [each for name, text in sorted(texts.items()) if name.endswith(".yaml") for each in documents(text)]


def documents(text: str) -> Iterator[Json]:
    return (each for each in yaml.load_all(text, Loader=_Unique) if each)


def of_kind(objects: list[Json], kind: str) -> list[Json]:
    return [each for each in objects if each["kind"] == kind]


def one(objects: list[Json], kind: str) -> Json:
    (found,) = of_kind(objects, kind)
    return found


def pod_of(deployment: Json) -> Json:
    """What its template makes."""
    return {"apiVersion": "v1", "kind": "Pod", **deployment["spec"]["template"]}


def args_of(objects: list[Json]) -> list[str]:
    """Of the injector's container."""
    (container,) = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    args: list[str] = container["args"]
    return args


def ca_bundle(objects: list[Json]) -> str:
    """What API servers trust, in PEM."""
    (webhook,) = one(objects, "MutatingWebhookConfiguration")["webhooks"]
    return base64.b64decode(webhook["clientConfig"]["caBundle"], validate=True).decode()


def golden_text(case: str) -> str:
    """The objects of a case, without what is long and compared elsewhere, and without what each rendering has anew."""
    objects = rendered(values_of(case))
    for each in objects:
        if each["kind"] in _LONG:
            each[_LONG[each["kind"]]] = "…"
        if each["kind"] == "Secret":
            each["data"] = dict.fromkeys(each["data"], "…")
            each["metadata"]["annotations"]["slotcar.dev/renew-after"] = "…"
        if each["kind"] == "MutatingWebhookConfiguration" and case == "generated":
            each["webhooks"][0]["clientConfig"]["caBundle"] = "…"
    return str(yaml.safe_dump_all(objects, sort_keys=False, width=120, allow_unicode=True))


def write() -> None:
    """The chart's copies and the accepted renderings."""
    for copied, source in COPIES.items():
        copied.write_bytes(source.read_bytes())
    chart.cache_clear()
    for case in CASES:
        (GOLDEN / f"{case}.yaml").write_text(golden_text(case), encoding="utf-8")


class _Unique(yaml.SafeLoader):
    """Refuses a key that is there twice, as an API server does."""


def _mapping(loader: _Unique, node: yaml.MappingNode) -> Json:
    keys = [key.value for key, _ in node.value]
    assert len(keys) == len(set(keys)), f"a key twice: {keys} at {node.start_mark}"
    loader.flatten_mapping(node)
    found: Json = loader.construct_mapping(node, deep=True)
    return found


_Unique.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
