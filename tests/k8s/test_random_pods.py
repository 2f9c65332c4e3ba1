"""Random pods and annotations: whatever comes, the answer keeps its promises, and the hard cases are really reached."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import jsonpatch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from slotcar_injector.denial import Reason, Result
from slotcar_injector.places import TARGET, TARGET_VARIABLE
from slotcar_injector.review import admit
from slotcar_injector.settings import Settings

from tests.k8s import checks
from tests.k8s.pods import IMAGE, Json, container, pod, review

NAMES = st.sampled_from([*["engine"] * 8, "router", "a", "istio-proxy", "slotcar"])
VOLUMES = st.sampled_from([*["data", "models", "b"] * 4, "slotcar-run", "slotcar-tmp"])
PORTS = st.sampled_from([*[80, 8000] * 4, 9464, 9465, 9500])
RARELY = st.sampled_from([*[False] * 9, True])


def annotations() -> st.SearchStrategy[dict[str, str]]:
    values = {
        "container": ["engine", "engine", "router", "none"],
        "init-containers": ["fetch", "fetch", "fetch,warm", "none"],
        "mode": ["container", "native", "container", "auto", "both"],
        "slots": ["1", "32", "0"],
        "planes": ["stream", "stream,ring", "ring"],
        "gpu-claim": ["gpu", "gpu/one", "other"],
        "disk-bytes": ["1Gi", "10G", "-1"],
        "roots": ["data:/srv", "data/x:/srv,models:/more", "none:/srv", "data:/tmp"],
        "base-model": ["models:/model", "models:/srv"],
        "sources": ["hf://org/*", "s3://b/p,hf://o/m", "x"],
        "adapters": ["set", "set/a.yaml"],
        "model-spec": ["spec"],
        "source-options": ["access"],
        "memory-limit": ["2Gi", "64Gi", "1Mi"],
        "memory-request": ["1Gi", "3Gi"],
        "cpu-limit": ["1", "10m"],
        "metrics-port": ["9464", "9500", "8000"],
        "log-level": ["debug"],
        "inject": ["true", "false"],
        "sloots": ["1"],
    }
    chosen = {name: st.sampled_from(texts) for name, texts in values.items()}
    few = st.sets(st.sampled_from(sorted(values)), max_size=5)
    return few.flatmap(lambda names: st.fixed_dictionaries({name: chosen[name] for name in sorted(names)}))


def containers(names: st.SearchStrategy[str]) -> st.SearchStrategy[Json]:
    mounts = st.lists(VOLUMES.map(lambda name: {"name": name, "mountPath": f"/mnt/{name}"}), max_size=2)
    at_ours = RARELY.map(lambda is_so: [{"name": "data", "mountPath": "/run/slotcar"}] if is_so else [])
    env = st.lists(
        st.sampled_from([*[("A", "1"), (TARGET_VARIABLE, TARGET)] * 4, (TARGET_VARIABLE, "x")]),
        max_size=1,
    ).map(lambda pairs: [{"name": name, "value": value} for name, value in pairs])
    ports = st.lists(PORTS, max_size=1).map(lambda numbers: [{"containerPort": number} for number in numbers])
    optional: dict[str, Any] = {"env": st.none() | env, "ports": ports}
    return st.builds(
        lambda name, more, fields: container(name, volumeMounts=_unique([*more[0], *more[1]], "mountPath"), **fields),
        names,
        st.tuples(mounts, at_ours),
        st.fixed_dictionaries({}, optional=optional),
    )


@st.composite
def pods(draw: st.DrawFn) -> Json:
    many = _unique(draw(st.lists(containers(NAMES), min_size=1, max_size=3)), "name")
    names = [each["name"] for each in many]
    first = _unique(
        draw(st.lists(containers(st.sampled_from([*["fetch", "warm"] * 4, "slotcar"])), max_size=2)), "name"
    )
    volumes = draw(st.lists(VOLUMES, unique=True))
    mounted = {mount["name"] for each in [*many, *first] for mount in each["volumeMounts"]}
    made = pod(
        *many,
        annotations=draw(annotations()),
        initContainers=draw(st.sampled_from([None, [each for each in first if each["name"] not in names]])),
        volumes=[{"name": name, "emptyDir": {}} for name in sorted({*volumes, *mounted})],
        resourceClaims=draw(st.sampled_from([None, [{"name": "gpu", "resourceClaimName": "one"}]])),
        securityContext=draw(st.sampled_from([None, {}, {"fsGroup": 5, "supplementalGroups": [65532]}])),
        restartPolicy=draw(st.sampled_from(["Always", "Never"])),
        terminationGracePeriodSeconds=draw(st.sampled_from([None, 0, 30, 3600])),
        hostNetwork=draw(st.booleans()),
    )
    if draw(RARELY):
        made["spec"]["os"] = {"name": "windows"}
    return made


def _unique(every: list[Json], by: str) -> list[Json]:
    return list({each[by]: each for each in every}.values())


VERSIONS = st.sampled_from([None, (1, 28), (1, 29), (1, 37)])
seen: Counter[Reason] = Counter()
kinds: set[str] = set()


@given(pods(), VERSIONS)
@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def check_promises(of: Json, version: tuple[int, int] | None) -> None:
    options = Settings(defaults={"image": IMAGE}, kube_version=version)
    before = copy.deepcopy(of)
    outcome = admit(review(of)["request"], options)
    assert of == before, "a review changes nothing that it is given"
    seen[outcome.reason] += 1
    event(outcome.reason)
    if outcome.result is Result.DENIED:
        assert outcome.message.startswith("slotcar: ")
        assert outcome.operations == ()
        return
    injected = jsonpatch.apply_patch(of, list(outcome.operations))
    if outcome.result is Result.SKIPPED:
        assert injected == of
        return
    check_whole(of, injected)
    again = admit(review(injected)["request"], options)
    assert (again.reason, again.operations) == (Reason.COMPLETE, ())


def check_whole(of: Json, injected: Json) -> None:
    # 1.34 is the first that knows all of what is drawn.
    checks.check_schemas(injected, ("1.34", "1.37"))
    assert set(checks.faults(injected)) <= set(checks.faults(of))
    _, sidecar = checks.named(injected, "slotcar")
    assert checks.unrestricted(injected, sidecar) == []
    kinds.add(checks.named(injected, "slotcar")[0])
    for kind, each in checks.containers(of):
        assert any(other["name"] == each["name"] for other in injected["spec"][kind]), "nothing is lost"


def test_random_pods() -> None:
    check_promises()
    hard = {
        *(Reason.NEW, Reason.OPTED_OUT, Reason.ANNOTATION_UNKNOWN, Reason.ANNOTATION_INVALID, Reason.WINDOWS),
        *(Reason.CONTAINER_AMBIGUOUS, Reason.CONTAINER_NOT_FOUND, Reason.CLAIM_NOT_FOUND, Reason.VOLUME_NOT_FOUND),
        *(Reason.NAME_TAKEN, Reason.PORT_TAKEN, Reason.MEMORY_TOO_SMALL, Reason.MODE_UNFIT, Reason.VERSION_TOO_OLD),
    }
    assert hard - set(seen) == set(), f"never reached; reached were {dict(seen)}"
    assert seen[Reason.NEW] > 30
    assert kinds == {"initContainers", "containers"}


@given(
    st.data(), st.lists(st.sampled_from(["image", "mount", "env", "volume", "container", "slots", "mode"]), max_size=4)
)
@settings(max_examples=100, deadline=None)
def test_random_changes_between_passes_end_whole(data: st.DataObject, changes: list[str]) -> None:
    options = Settings(defaults={"image": IMAGE})
    of = pod(annotations={"disk-bytes": "1Gi"}, initContainers=[container("fetch")])
    for change in [*changes, "nothing"]:
        outcome = admit(review(of)["request"], options)
        of = jsonpatch.apply_patch(of, list(outcome.operations))
        assert checks.faults(of) == []
        checks.named(of, "slotcar")
        if change != "nothing":
            disturb(of, change, data)
    again = admit(review(of)["request"], options)
    assert (again.reason, again.operations) == (Reason.COMPLETE, ())


def disturb(of: Json, change: str, data: st.DataObject) -> None:
    kind, sidecar = checks.named(of, "slotcar")
    engine = checks.named(of, "engine")[1]
    annotations_ = of["metadata"]["annotations"]
    if change == "image":
        sidecar["image"] = "mirror.example/other"
    elif change == "mount":
        engine["volumeMounts"] = []
    elif change == "env":
        engine["env"] = None
    elif change == "volume":
        volumes = of["spec"]["volumes"]
        del volumes[data.draw(st.integers(0, len(volumes) - 1))]
    elif change == "container":
        of["spec"][kind] = [each for each in of["spec"][kind] if each["name"] != "slotcar"]
    else:
        annotations_["slotcar.dev/" + change] = data.draw(
            st.sampled_from({"slots": ["1", "2"]}.get(change, ["native", "container"]))
        )
