"""Reviews as an API server sends them, over TLS to a real process: what is injected, skipped, denied."""

from __future__ import annotations

import json
from pathlib import Path

import jsonpatch
import jsonpointer
import pytest

from tests.k8s import checks
from tests.k8s.cluster import Webhook, admission
from tests.k8s.pods import GOOD, IMAGE, SINCE, Json, body, container, good, pod, review

RECORDED = Path(__file__).parent / "reviews" / "pod-create.json"


def check_injected(injected: Json, since: str = checks.VERSIONS[0]) -> None:
    checks.check_schemas(injected, checks.VERSIONS[checks.VERSIONS.index(since) :])
    assert checks.faults(injected) == []
    _, sidecar = checks.named(injected, "slotcar")
    assert checks.unrestricted(injected, sidecar) == []


def test_a_recorded_review_is_answered_with_a_patch(webhook: Webhook) -> None:
    status, answer = webhook.post(RECORDED.read_bytes())
    assert status == 200
    before = json.loads(RECORDED.read_bytes())["request"]["object"]
    admitted = admission(answer, before)
    check_injected(admitted.pod)
    kind, sidecar = checks.named(admitted.pod, "slotcar")
    assert (kind, sidecar["restartPolicy"], sidecar["image"]) == ("initContainers", "Always", IMAGE)
    assert admitted.pod["metadata"]["labels"]["slotcar.dev/metrics"] == "true"
    _, engine = checks.named(admitted.pod, "engine")
    assert engine["env"] == [{"name": "SLOTCAR_TARGET", "value": "unix:///run/slotcar/slotcar.sock"}]
    assert engine["volumeMounts"] == [{"name": "slotcar-run", "mountPath": "/run/slotcar", "readOnly": True}]
    assert admitted.pod["spec"]["securityContext"]["supplementalGroups"] == [65532]


@pytest.mark.parametrize("name", GOOD)
def test_each_kind_of_pod_is_injected_and_valid_in_every_version(webhook: Webhook, name: str) -> None:
    before = good(name)
    admitted = webhook.admit(before)
    assert admitted.allowed, admitted.message
    check_injected(admitted.pod, SINCE.get(name, checks.VERSIONS[0]))
    for operation in admitted.operations:
        there = jsonpointer.resolve_pointer(before, operation["path"], None) if operation["op"] != "add" else None
        assert there is None, "it changes what was there"


@pytest.mark.parametrize("name", GOOD)
def test_a_second_pass_gives_no_patch(webhook: Webhook, name: str) -> None:
    once = webhook.admit(good(name)).pod
    again = webhook.admit(once)
    assert (again.allowed, again.operations) == (True, ())


def test_only_the_named_containers_get_the_socket(webhook: Webhook) -> None:
    injected = webhook.admit(good("everything")).pod
    with_socket = {
        each["name"]
        for _, each in checks.containers(injected)
        if any(mount["name"] == "slotcar-run" for mount in each.get("volumeMounts") or ())
    }
    assert with_socket == {"engine", "warm", "slotcar"}
    names = [each["name"] for each in injected["spec"]["initContainers"]]
    assert names == ["slotcar", "fetch", "warm"]


def test_the_engine_s_own_variables_may_refer_to_the_target(webhook: Webhook) -> None:
    _, engine = checks.named(webhook.admit(good("everything")).pod, "engine")
    assert [each["name"] for each in engine["env"]] == ["SLOTCAR_TARGET", "A"]


def test_the_group_is_added_to_those_that_the_pod_has(webhook: Webhook) -> None:
    security = webhook.admit(good("meshed")).pod["spec"]["securityContext"]
    assert security == {"fsGroup": 1337, "supplementalGroups": [7, 65532]}


def test_a_dry_run_gets_the_same_answer(webhook: Webhook) -> None:
    before = good("deployment")
    assert webhook.admit(before, dryRun=True) == webhook.admit(before)


def test_a_pod_without_a_namespace_has_that_of_its_request(webhook: Webhook) -> None:
    before = good("deployment")
    del before["metadata"]["namespace"]
    assert webhook.admit(before).operations
    assert webhook.admit(before, namespace="kube-system").operations == ()


SKIPPED = {
    "update": ("not_a_creation", pod(), {"operation": "UPDATE", "oldObject": pod()}),
    "delete": ("not_a_creation", None, {"operation": "DELETE", "oldObject": pod()}),
    "ephemeral containers": ("not_a_pod", pod(), {"operation": "UPDATE", "subResource": "ephemeralcontainers"}),
    "binding": ("not_a_pod", {"kind": "Binding"}, {"subResource": "binding"}),
    "deployment": (
        "not_a_pod",
        {"kind": "Deployment"},
        {"resource": {"group": "apps", "version": "v1", "resource": "deployments"}},
    ),
    "pod of another group": ("not_a_pod", pod(), {"resource": {"group": "x.io", "version": "v1", "resource": "pods"}}),
    "system namespace": ("namespace_left_out", pod(), {"namespace": "kube-system"}),
    "opted out": ("opted_out", pod(annotations={"inject": "false"}), {}),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_what_is_none_of_its_business_is_allowed_as_it_is(webhook: Webhook, name: str) -> None:
    reason, of, request = SKIPPED[name]
    before = webhook.count("skipped", reason)
    status, answer = webhook.post(body(review(of, **request)))
    response = json.loads(answer)["response"]
    assert (status, response["allowed"], "patch" in response) == (200, True, False)
    assert webhook.count("skipped", reason) == before + 1


@pytest.mark.parametrize("text", [None, "false", "yes", "True"])
def test_a_label_with_another_value_injects_nothing(webhook: Webhook, text: str | None) -> None:
    before = pod()
    before["metadata"]["labels"] = None if text is None else {"slotcar.dev/inject": text}
    admitted = webhook.admit(before)
    assert (admitted.allowed, admitted.operations) == (True, ())
    assert bool(admitted.warnings) == (text in ("yes", "True"))


def test_a_static_pod_s_mirror_is_left_alone(webhook: Webhook) -> None:
    before = pod()
    before["metadata"]["annotations"]["kubernetes.io/config.mirror"] = "0123"
    assert webhook.admit(before).operations == ()


TAKEN_VOLUME = {"name": "slotcar-run", "emptyDir": {}}
ELSEWHERE = [{"name": "SLOTCAR_TARGET", "value": "unix:///elsewhere.sock"}]
DENIED = {
    "windows": (pod(os={"name": "windows"}), "windows", "spec.os.name is windows"),
    "windows nodes": (pod(nodeSelector={"kubernetes.io/os": "windows"}), "windows", "nodeSelector"),
    "two containers": (pod(container("a"), container("b")), "container_ambiguous", "one of a, b"),
    "no such container": (
        pod(annotations={"container": "main"}),
        "container_not_found",
        "slotcar.dev/container is main, wanted one of engine",
    ),
    "a container of our name": (pod(container("slotcar"), container("engine")), "name_taken", "a container slotcar"),
    "an init container of our name": (
        pod(initContainers=[container("slotcar")]),
        "name_taken",
        "spec.initContainers has a container slotcar",
    ),
    "an ephemeral container of our name": (
        pod(ephemeralContainers=[container("slotcar")]),
        "name_taken",
        "spec.ephemeralContainers",
    ),
    "a volume of our name": (pod(volumes=[TAKEN_VOLUME]), "name_taken", "a volume slotcar-run"),
    "a port of our name": (
        pod(container(ports=[{"name": "slotcar-metrics", "containerPort": 1}])),
        "name_taken",
        "container engine has a port slotcar-metrics",
    ),
    "our path": (
        pod(container(volumeMounts=[{"name": "v", "mountPath": "/run/slotcar/"}]), volumes=[{"name": "v"}]),
        "name_taken",
        "has volume v at /run/slotcar",
    ),
    "another target": (pod(container(env=ELSEWHERE)), "name_taken", "SLOTCAR_TARGET unix:///elsewhere.sock"),
    "our port": (pod(container(ports=[{"containerPort": 9464}])), "port_taken", "metrics-port is 9464"),
    "no such init container": (
        pod(annotations={"init-containers": "a"}),
        "container_not_found",
        "the pod has no such containers",
    ),
    "init containers beside": (
        pod(annotations={"init-containers": "a", "mode": "container"}, initContainers=[container("a")]),
        "mode_unfit",
        "needs mode native",
    ),
    "no such volume": (pod(annotations={"roots": "v:/srv"}), "volume_not_found", "has volume v, wanted one of"),
    "no such claim": (pod(annotations={"gpu-claim": "gpu"}), "claim_not_found", "gpu-claim is gpu"),
    "too little memory": (
        pod(annotations={"memory-limit": "1Gi"}),
        "memory_too_small",
        "memory-limit is 1Gi, wanted at least 1808Mi",
    ),
    "unknown annotation": (
        pod(annotations={"slot": "3"}),
        "annotation_unknown",
        "slotcar.dev/slot is unknown; did you mean slotcar.dev/slots?",
    ),
}


@pytest.mark.parametrize("name", DENIED)
def test_what_cannot_be_right_is_denied_with_its_reason(webhook: Webhook, name: str) -> None:
    of, reason, part = DENIED[name]
    before = webhook.count("denied", reason)
    admitted = webhook.admit(of)
    assert (admitted.allowed, admitted.code, admitted.operations) == (False, 422, ())
    assert admitted.message.startswith("slotcar: ")
    assert part in admitted.message
    assert webhook.count("denied", reason) == before + 1


WARNED = {
    "no memory limit": ("bare", "no memory limit"),
    "host network": ("host-network", "hostNetwork: ports 9464 and 9465"),
    "nothing to load from": ("bare", "only uploaded adapters"),
}


@pytest.mark.parametrize("name", WARNED)
def test_what_may_surprise_is_a_warning(webhook: Webhook, name: str) -> None:
    kind, part = WARNED[name]
    assert any(part in warning for warning in webhook.admit(good(kind)).warnings)


def test_a_job_beside_slotcar_is_warned_of_and_a_native_one_is_not(webhook: Webhook) -> None:
    native, beside = good("job"), good("job")
    beside["metadata"]["annotations"]["slotcar.dev/mode"] = "container"
    assert not any("Job never completes" in warning for warning in webhook.admit(native).warnings)
    assert any("Job never completes" in warning for warning in webhook.admit(beside).warnings)


def test_a_gpu_that_the_engine_does_not_use_is_warned_of(webhook: Webhook) -> None:
    claims = [{"name": "gpu", "resourceClaimName": "one"}]
    admitted = webhook.admit(pod(annotations={"gpu-claim": "gpu"}, resourceClaims=claims))
    assert any("engine does not use claim gpu" in warning for warning in admitted.warnings)
    _, sidecar = checks.named(admitted.pod, "slotcar")
    assert sidecar["resources"]["claims"] == [{"name": "gpu"}]
    assert "--device=cuda" in sidecar["args"]
    assert set(sidecar["resources"]) == {"requests", "claims"}, "it asks for no device"


@pytest.mark.parametrize(("grace", "seconds"), [(30, 25), (600, 595), (5, 1), (0, 1), (None, 25)])
def test_the_sidecar_ends_within_the_grace_period(webhook: Webhook, grace: int | None, seconds: int) -> None:
    of = pod(terminationGracePeriodSeconds=grace)
    if grace is None:
        del of["spec"]["terminationGracePeriodSeconds"]
    _, sidecar = checks.named(webhook.admit(of).pod, "slotcar")
    assert f"--shutdown-seconds={seconds}" in sidecar["args"]


def test_there_is_no_prestop_hook_in_any_mode(webhook: Webhook) -> None:
    for name in GOOD:
        _, sidecar = checks.named(webhook.admit(good(name)).pod, "slotcar")
        assert "lifecycle" not in sidecar


def test_a_log_line_says_what_an_admission_came_to(webhook: Webhook) -> None:
    webhook.admit(pod(annotations={"slot": "3"}), namespace="team-a", name="e-1")
    line = [each for each in webhook.whole_lines() if each.get("namespace") == "team-a"][-1]
    assert (line["result"], line["reason"], line["name"]) == ("denied", "annotation_unknown", "e-1")
    assert line["generateName"] == "engine-"
    assert "did you mean" in line["message"]


def test_the_checks_find_what_they_look_for() -> None:
    """Else all of the above would prove nothing."""
    broken = pod(
        container("a", volumeMounts=[{"name": "none", "mountPath": "/x"}, {"name": "v", "mountPath": "/x"}]),
        container("a", ports=[{"containerPort": 1, "name": "UPPER"}, {"containerPort": 1}], restartPolicy="Always"),
        initContainers=[container("once", livenessProbe={"grpc": {"port": 1}})],
        volumes=[{"name": "v"}, {"name": "v"}],
    )
    found = "; ".join(checks.faults(broken))
    for part in ("volume v twice", "container a twice", "no volume", "at /x twice", "port 1 twice", "port name UPPER"):
        assert part in found
    assert "has a livenessProbe, and ends" in found
    assert "has a restartPolicy" in found
    assert len(checks.unrestricted(broken, container())) == 4


def test_the_patch_adds_to_lists_without_replacing_them(webhook: Webhook) -> None:
    operations = webhook.admit(good("deployment")).operations
    paths = [operation["path"] for operation in operations]
    assert "/spec/volumes/1" in paths
    assert "/spec/containers/0/volumeMounts/1" in paths
    assert jsonpatch.JsonPatch(list(operations))
