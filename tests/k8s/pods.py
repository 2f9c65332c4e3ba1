"""Pods and reviews as API servers send them: what was recorded from one, and more of the same form."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]
UID = "24afd1da-90f1-4e34-812c-86c51183aa36"
POD_KIND = {"group": "", "version": "v1", "kind": "Pod"}
PODS_RESOURCE = {"group": "", "version": "v1", "resource": "pods"}
IMAGE = "registry.example/slotcar:1.2.3"

_TOKEN = "kube-api-access-x7k2p"


def container(name: str = "engine", **fields: Any) -> Json:
    """With the defaults that an API server has put in."""
    return {
        "name": name,
        "image": "registry.example/engine:1",
        "resources": {},
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "imagePullPolicy": "IfNotPresent",
        **fields,
    }


def pod(*containers: Json, annotations: dict[str, str] | None = None, **spec: Any) -> Json:
    """A labelled pod with these containers, or one engine; annotations without slotcar's prefix."""
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "generateName": "engine-",
            "namespace": "default",
            "creationTimestamp": None,
            "labels": {"slotcar.dev/inject": "true"},
            "annotations": {f"slotcar.dev/{name}": text for name, text in (annotations or {}).items()},
        },
        "spec": {
            "containers": list(containers or (container(),)),
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 30,
            "dnsPolicy": "ClusterFirst",
            "securityContext": {},
            "schedulerName": "default-scheduler",
            "enableServiceLinks": True,
            **spec,
        },
        "status": {},
    }


def review(of: Json | None, **request: Any) -> Json:
    """The AdmissionReview of a pod's creation, with other fields of its request."""
    return {
        "kind": "AdmissionReview",
        "apiVersion": "admission.k8s.io/v1",
        "request": {
            "uid": UID,
            "kind": POD_KIND,
            "resource": PODS_RESOURCE,
            "requestKind": POD_KIND,
            "requestResource": PODS_RESOURCE,
            "namespace": "default",
            "operation": "CREATE",
            "userInfo": {"username": "admin", "groups": ["system:masters"]},
            "object": of,
            "oldObject": None,
            "dryRun": False,
            "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
            **request,
        },
    }


def body(value: Any) -> bytes:
    return json.dumps(value).encode()


def _of_deployment() -> Json:
    """As the ReplicaSet's controller makes it, after the service account's admission."""
    token = {"name": _TOKEN, "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": True}
    made = pod(
        container(volumeMounts=[token], ports=[{"containerPort": 8000, "name": "http", "protocol": "TCP"}]),
        annotations={"memory-limit": "4Gi", "sources": "s3://bucket/adapters"},
        serviceAccountName="default",
        volumes=[{"name": _TOKEN, "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}],
    )
    made["metadata"]["labels"]["pod-template-hash"] = "5f9c8d7b6"
    made["metadata"]["ownerReferences"] = [_owner("apps/v1", "ReplicaSet")]
    return made


def _of_job() -> Json:
    made = pod(annotations={"slots": "2"}, restartPolicy="Never")
    made["metadata"]["ownerReferences"] = [_owner("batch/v1", "Job")]
    return made


def _owner(version: str, kind: str) -> Json:
    uid = "8a4e2f60-33a5-4c1f-9d8e-0d6a3f0f7b11"
    return {"apiVersion": version, "kind": kind, "name": "engine-5f9c8d7b6", "uid": uid, "controller": True}


def _bare() -> Json:
    """With nothing that is optional, and nulls where Go writes them."""
    made = pod()
    made["metadata"] = {"name": "bare", "creationTimestamp": None, "labels": {"slotcar.dev/inject": "true"}}
    made["spec"] = {"containers": [{"name": "engine", "image": "x", "resources": {}}], "initContainers": None}
    return made


def _with_everything() -> Json:
    data, model = {"name": "models", "emptyDir": {}}, {"name": "adapters", "emptyDir": {}}
    return pod(
        container("engine", env=[{"name": "A", "value": "$(SLOTCAR_TARGET)"}], resources={"claims": [{"name": "gpu"}]}),
        container("router", ports=[{"containerPort": 9000}]),
        annotations={
            "container": "engine",
            "init-containers": "warm",
            "slots": "32",
            "max-rank": "128",
            "dtype": "bfloat16",
            "planes": "stream, direct",
            "gpu-claim": "gpu/one",
            "host-bytes": "8Gi",
            "disk-bytes": "100Gi",
            "roots": "adapters:/srv/adapters, models/extra:/srv/more",
            "sources": "hf://org/*, s3://bucket/prefix",
            "source-options": "s3-access/options.json",
            "adapters": "wanted",
            "policy": "who",
            "model-spec": "spec/llama.json",
            "base-model": "models/llama:/models/llama",
            "cpu-request": "1500m",
            "cpu-limit": "4",
            "memory-request": "10Gi",
            "memory-limit": "16Gi",
            "metrics-port": "9500",
            "health-port": "9501",
            "status-page": "true",
            "log-level": "debug",
            "log-format": "human",
        },
        initContainers=[container("fetch"), container("warm")],
        volumes=[data, model],
        resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
        terminationGracePeriodSeconds=600,
    )


def _beside() -> Json:
    return pod(annotations={"mode": "container", "memory-limit": "2Gi", "disk-bytes": "10G"})


def _on_host_network() -> Json:
    return pod(container(ports=[{"containerPort": 8000, "hostPort": 8000}]), hostNetwork=True)


def _meshed() -> Json:
    """Another webhook was here before."""
    made = pod(
        container("istio-proxy", ports=[{"containerPort": 15090, "name": "http-envoy-prom"}]),
        container("engine"),
        initContainers=[container("istio-init")],
        securityContext={"fsGroup": 1337, "supplementalGroups": [7]},
    )
    made["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"] = "engine"
    return made


# Every one of these is injected.
GOOD: dict[str, Callable[[], Json]] = {
    "deployment": _of_deployment,
    "job": _of_job,
    "bare": _bare,
    "everything": _with_everything,
    "beside": _beside,
    "host-network": _on_host_network,
    "meshed": _meshed,
}


# The first version that knows what is in them, where it is not the oldest.
SINCE = {"everything": "1.34"}


def good(name: str) -> Json:
    return copy.deepcopy(GOOD[name]())
