"""A pod that comes again, after others have changed it: healed, left alone, or made anew, by rule."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest
from slotcar_injector.denial import Reason, Result
from slotcar_injector.patch import difference
from slotcar_injector.review import Outcome, admit
from slotcar_injector.settings import Settings

from tests.k8s import checks
from tests.k8s.cluster import jsonpatch
from tests.k8s.pods import GOOD, IMAGE, Json, container, good, pod, review

SETTINGS = Settings(defaults={"image": IMAGE}, version="1.0")
STATUS = "slotcar.dev/status"
EVICTABLE = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"


def passed(of: Json, settings: Settings = SETTINGS) -> tuple[Json, Outcome]:
    outcome = admit(review(of)["request"], settings)
    return jsonpatch.apply_patch(of, list(outcome.operations)), outcome


def injected(name: str = "deployment") -> Json:
    return passed(good(name))[0]


def lose_mount(of: Json) -> None:
    checks.named(of, "engine")[1]["volumeMounts"] = []


def lose_variable(of: Json) -> None:
    del checks.named(of, "engine")[1]["env"]


def lose_container(of: Json) -> None:
    of["spec"]["initContainers"] = None


def lose_volume(of: Json) -> None:
    of["spec"]["volumes"] = [each for each in of["spec"]["volumes"] if each["name"] != "slotcar-tmp"]


def lose_group(of: Json) -> None:
    of["spec"]["securityContext"] = None


def lose_metrics_label(of: Json) -> None:
    del of["metadata"]["labels"]["slotcar.dev/metrics"]


def lose_evictable(of: Json) -> None:
    del of["metadata"]["annotations"][EVICTABLE]


LOSSES = (lose_mount, lose_variable, lose_container, lose_volume, lose_group, lose_metrics_label, lose_evictable)


@pytest.mark.parametrize("lose", LOSSES)
def test_what_another_webhook_took_away_is_put_back(lose: Callable[[Json], None]) -> None:
    """dapr#6350: a second webhook undid the first one's work."""
    whole = injected()
    changed = copy.deepcopy(whole)
    lose(changed)
    healed, outcome = passed(changed)
    assert (outcome.result, outcome.reason) == (Result.INJECTED, Reason.HEALED)
    assert checks.faults(healed) == []
    assert passed(healed)[1].reason is Reason.COMPLETE
    assert checks.named(healed, "slotcar") == checks.named(whole, "slotcar")
    assert healed["metadata"] == whole["metadata"]


def mirror_image(of: Json) -> None:
    checks.named(of, "slotcar")[1]["image"] = "mirror.example/slotcar@sha256:" + "1" * 64


def default_fields(of: Json) -> None:
    sidecar = checks.named(of, "slotcar")[1]
    sidecar |= {"imagePullPolicy": "IfNotPresent", "terminationMessagePath": "/dev/termination-log"}
    sidecar["readinessProbe"] |= {"successThreshold": 1}
    sidecar["resources"]["limits"] = {"memory": "3Gi"}


def put_before(of: Json) -> None:
    of["spec"]["initContainers"].insert(0, container("istio-init"))


def put_beside(of: Json) -> None:
    of["spec"]["containers"].insert(0, container("istio-proxy"))


def turn_label_off(of: Json) -> None:
    of["metadata"]["labels"]["slotcar.dev/metrics"] = "false"


@pytest.mark.parametrize("change", [mirror_image, default_fields, put_before, put_beside, turn_label_off])
def test_what_another_webhook_changed_or_added_is_left_alone(change: Callable[[Json], None]) -> None:
    changed = injected()
    change(changed)
    again, outcome = passed(changed)
    assert (outcome.result, outcome.reason, again) == (Result.UNCHANGED, Reason.COMPLETE, changed)


def test_a_changed_wish_makes_everything_anew() -> None:
    changed = injected("beside")
    changed["metadata"]["annotations"] |= {"slotcar.dev/mode": "native", "slotcar.dev/slots": "3"}
    again, outcome = passed(changed)
    assert outcome.reason is Reason.REPLACED
    wanted = good("beside")
    wanted["metadata"]["annotations"] |= {"slotcar.dev/mode": "native", "slotcar.dev/slots": "3"}
    fresh, _ = passed(wanted)
    assert again["spec"]["initContainers"] == fresh["spec"]["initContainers"]
    assert [each["name"] for each in again["spec"]["containers"]] == ["engine"]
    assert again["metadata"] == fresh["metadata"]
    assert passed(again)[1].reason is Reason.COMPLETE


def test_a_volume_that_is_not_wanted_any_more_goes() -> None:
    changed = injected("beside")
    assert "slotcar-disk" in {each["name"] for each in changed["spec"]["volumes"]}
    del changed["metadata"]["annotations"]["slotcar.dev/disk-bytes"]
    again, _ = passed(changed)
    assert "slotcar-disk" not in {each["name"] for each in again["spec"]["volumes"]}
    assert again["metadata"]["annotations"][EVICTABLE] == "slotcar-run,slotcar-tmp"
    assert checks.faults(again) == []


def test_the_autoscaler_may_take_what_is_slotcars_and_what_the_author_named() -> None:
    of = pod(annotations={"disk-bytes": "1Gi"})
    of["metadata"]["annotations"][EVICTABLE] = "scratch,slotcar-tmp"
    again, _ = passed(of)
    assert again["metadata"]["annotations"][EVICTABLE] == "scratch,slotcar-tmp,slotcar-run,slotcar-disk"
    del again["metadata"]["annotations"]["slotcar.dev/disk-bytes"]
    fewer, outcome = passed(again)
    assert outcome.reason is Reason.REPLACED
    assert fewer["metadata"]["annotations"][EVICTABLE] == "scratch,slotcar-run,slotcar-tmp"
    assert passed(fewer)[1].reason is Reason.COMPLETE


def test_a_sidecar_that_was_moved_comes_back_to_its_place() -> None:
    changed = injected()
    changed["spec"]["containers"].append(changed["spec"]["initContainers"].pop(0))
    again, outcome = passed(changed)
    assert outcome.reason is Reason.REPLACED
    assert checks.named(again, "slotcar")[0] == "initContainers"


def test_an_init_container_that_needs_the_socket_comes_after_it() -> None:
    changed = injected("everything")
    changed["spec"]["initContainers"].sort(key=lambda each: each["name"] != "warm")
    again, outcome = passed(changed)
    assert outcome.reason is Reason.HEALED
    assert [each["name"] for each in again["spec"]["initContainers"]] == ["slotcar", "warm", "fetch"]


def test_another_version_of_the_injector_leaves_the_same_pieces_alone() -> None:
    newer = Settings(defaults={"image": IMAGE}, version="2.0")
    once = injected()
    again, outcome = passed(once, newer)
    assert (outcome.reason, again) == (Reason.COMPLETE, once)


def test_other_defaults_of_the_injector_make_everything_anew() -> None:
    newer = Settings(defaults={"image": IMAGE + "-new"}, version="2.0")
    again, outcome = passed(injected(), newer)
    assert outcome.reason is Reason.REPLACED
    assert checks.named(again, "slotcar")[1]["image"] == IMAGE + "-new"
    assert json.loads(again["metadata"]["annotations"][STATUS])["version"] == "2.0"


def test_the_status_says_what_was_injected() -> None:
    status = json.loads(injected()["metadata"]["annotations"][STATUS])
    assert set(status) == {"version", "digest", "mode", "container"}
    assert (status["version"], status["mode"], status["container"]) == ("1.0", "native", "engine")
    assert len(status["digest"]) == 16


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"digest":1}', "[" * 100_000, '"\\ud800"'])
def test_a_status_of_nobody_is_replaced(text: str) -> None:
    of = pod()
    of["metadata"]["annotations"][STATUS] = text
    again, outcome = passed(of)
    assert outcome.reason is Reason.REPLACED
    assert passed(again)[1].reason is Reason.COMPLETE


def test_a_target_that_was_changed_in_between_is_denied() -> None:
    changed = injected()
    checks.named(changed, "engine")[1]["env"][0]["value"] = "unix:///elsewhere"
    assert passed(changed)[1].reason is Reason.NAME_TAKEN


@pytest.mark.parametrize(
    ("version", "mode", "kind"),
    [
        (None, "auto", "initContainers"),
        ((1, 29), "auto", "initContainers"),
        ((1, 28), "auto", "containers"),
        ((1, 28), "container", "containers"),
        ((1, 37), "container", "containers"),
    ],
)
def test_the_mode_follows_the_cluster_s_version(version: tuple[int, int] | None, mode: str, kind: str) -> None:
    settings = Settings(defaults={"image": IMAGE}, kube_version=version)
    of, _ = passed(pod(annotations={"mode": mode}), settings)
    found, sidecar = checks.named(of, "slotcar")
    assert found == kind
    assert ("restartPolicy" in sidecar) == (kind == "initContainers")


@pytest.mark.parametrize(("annotation", "version"), [({"mode": "native"}, (1, 28)), ({"gpu-claim": "gpu"}, (1, 33))])
def test_what_the_cluster_is_too_old_for_is_denied(annotation: dict[str, str], version: tuple[int, int]) -> None:
    settings = Settings(defaults={"image": IMAGE}, kube_version=version)
    _, outcome = passed(pod(annotations=annotation), settings)
    assert outcome.reason is Reason.VERSION_TOO_OLD
    assert f"Kubernetes is 1.{version[1]}, wanted 1.{version[1] + 1}" in outcome.message


@pytest.mark.parametrize("name", GOOD)
def test_every_pass_is_the_same_for_the_same_pod(name: str) -> None:
    assert passed(good(name)) == passed(good(name))


LISTS = [
    ([], [1]),
    ([1, 2], [0, 1, 3, 2]),
    ([1, 1], [1, 1, 1]),
    ([{"name": "a", "v": 1}], [{"name": "b"}, {"name": "a", "v": 2}]),
    ([1, 2], [2, 1]),
    ([1, 2], [1]),
    ([{"name": "a"}], [{"name": "b"}]),
]


@pytest.mark.parametrize(("before", "after"), LISTS)
def test_a_patch_makes_one_of_the_other(before: list[object], after: list[object]) -> None:
    patch = list(difference({"x": before}, {"x": after}))
    assert jsonpatch.apply_patch({"x": before}, patch) == {"x": after}


def test_a_patch_names_keys_as_json_pointers_do() -> None:
    before, after = {"a/b": 1, "c~d": {"": 1}}, {"a/b": 2, "c~d": {"": 2, "new/": 3}}
    assert jsonpatch.apply_patch(before, list(difference(before, after))) == after
