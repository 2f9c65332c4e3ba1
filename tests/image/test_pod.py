"""An injected pod really run: its engine computes by every plane, and it lives through what clusters do to pods."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from tests.faults.oracle import Library
from tests.image.conftest import NAMES
from tests.image.container import START_SECONDS, USER, inspected, podman, told
from tests.image.pod import GRACE_SECONDS, PLANES, Pod, documents, running
from tests.waiting import eventually

pytestmark = [pytest.mark.image, pytest.mark.timeout(600)]

Play = Callable[..., Pod]
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


@pytest.fixture
def play(folder: Path, library: Library, image: str, injector_image: str) -> Iterator[Play]:
    """Runs the pod; away="wait" for an engine that waits for a sidecar that is away, else it ends then."""
    with ExitStack() as stack:

        def one(**wish: str) -> Pod:
            return stack.enter_context(running(folder, documents(library, image, **wish), image, injector_image))

        yield one


def metrics(pod: Pod) -> dict[tuple[str, str], float]:
    """What Prometheus finds at the pod's address: values by name and owner, for series without other labels."""
    with urllib.request.urlopen(f"http://{pod.address}:{pod.port('slotcar-metrics')}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(one.name, one.labels.get("owner", "")): one.value for one in samples if set(one.labels) <= {"owner"}}


def process(pid: int) -> dict[str, str]:
    """What the kernel says of a process."""
    lines = (line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines())
    return {name: value.strip() for name, value in lines}


def mounted(pid: int, path: str) -> list[str]:
    """The options of what is mounted at a path of a process."""
    lines = (line.split() for line in Path(f"/proc/{pid}/mounts").read_text(encoding="utf-8").splitlines())
    return next(line[3] for line in lines if line[1] == path).split(",")


@pytest.mark.parametrize("mode", ["native", "container"])
def test_an_engine_computes_by_each_plane(play: Play, library: Library, mode: str) -> None:
    """Descriptors of shared memory cross from one container to the other, for a user that is not the sidecar's.

    In mode `container` the engine is started first, and waits.
    """
    pod = play(mode=mode)
    pod.computes()
    (began,) = pod.said("began")
    assert (began["uid"], "slotcar_client" in began["packages"]) == (1000, True)
    assert "slotcar_sidecar" not in began["packages"]
    first, second = library.parts
    for plane in PLANES:
        (mapped,) = pod.said("mapped", plane=plane)
        assert (mapped["transport"], mapped["digests"]) == (plane, [first, "", second])


def test_no_container_has_rights(play: Play) -> None:
    pod = play()
    pod.computes()
    for name, user in (("slotcar", USER), ("engine", 1000)):
        pid = pod.pid(name)
        status = process(pid)
        assert status["Uid"].split() == [str(user)] * 4
        assert str(USER) in status["Groups"].split(), "by which the engine reaches the socket"
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        assert "ro" in mounted(pid, "/")
    assert "rw" in mounted(pod.pid("slotcar"), "/run/slotcar")
    assert "ro" in mounted(pod.pid("engine"), "/run/slotcar")
    assert inspected("container", pod.container("slotcar"))["HostConfig"]["Memory"] == 2 << 30


def test_probes_and_metrics_are_at_the_pods_address(play: Play) -> None:
    """Each probe as the injector wrote it; the port that has them has nothing else."""
    pod = play()
    pod.computes()
    with grpc.insecure_channel(f"{pod.address}:{pod.port('slotcar-health')}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for probe in PROBES:
            asked = pod.sidecar[probe]["grpc"]
            assert asked["port"] == pod.port("slotcar-health")
            answer = health.Check(health_pb2.HealthCheckRequest(service=asked["service"]), timeout=30)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, probe
        other: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/slotcar.v1.AdapterService/ListAdapters"
        )
        with pytest.raises(grpc.RpcError) as refused:
            other(b"", timeout=30)
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    found = metrics(pod)
    assert found["slotcar_sessions", ""] == len(PLANES)
    assert found["slotcar_pins", "mapping"] == len(PLANES) * len(NAMES)


def test_sigterm_under_load(play: Play) -> None:
    """As at a pod's end: what was asked is answered right to the end, then the engine is told, and all is in time."""
    pod = play()
    pod.computes()
    before = {plane: len(pod.said("answered", plane=plane)) for plane in PLANES}
    told("stop", "--time", str(GRACE_SECONDS), pod.container("slotcar"))
    state = pod.state("slotcar")
    assert (state["Status"], state["ExitCode"]) == ("exited", 0), pod.log("slotcar")
    eventually(lambda: len(pod.said("ended")) == len(PLANES), "an end by each plane", START_SECONDS)
    for plane in PLANES:
        (ended,) = pod.said("ended", plane=plane)
        assert ended["code"] == "UNAVAILABLE"
        assert ended["reason"] in ("SHUTTING_DOWN", "UNAVAILABLE")
        assert len(pod.said("answered", plane=plane)) > before[plane], "it served while it shut down"
    assert pod.said("wrong") == []
    assert "stopped" in pod.log("slotcar")
    assert "Traceback" not in pod.log("slotcar")


def test_a_sidecar_that_is_killed_comes_back_and_the_engine_goes_on(play: Play) -> None:
    """Its container is restarted; names come from the journal, mappings by digest, and no row is wrong."""
    pod = play(away="wait")
    pod.computes()
    journal = Path(told("volume", "inspect", "slotcar-disk", "--format", "{{.Mountpoint}}").strip(), "journal")
    eventually(lambda: journal.exists() and NAMES[1].encode() in journal.read_bytes(), "the journal")
    old = {line["epoch"] for line in pod.said("answered")}
    assert len(old) == 1
    os.kill(pod.pid("slotcar"), signal.SIGKILL)

    def goes_on() -> bool:
        assert pod.said("ended") == pod.said("wrong") == [], pod.log("slotcar")
        new = [line for line in pod.said("answered") if line["epoch"] not in old and line["recoveries"]]
        return {line["plane"] for line in new} == set(PLANES)

    eventually(goes_on, "answers of another epoch by each plane", START_SECONDS)
    assert pod.restarts("slotcar") == 1
    assert pod.restarts("engine") == 0


def test_an_engine_that_is_killed_leaves_no_pin(play: Play) -> None:
    """Its container is restarted, and has what it had before; nothing is kept for the one that died."""
    pod = play()
    pod.computes()
    os.kill(pod.pid("engine"), signal.SIGKILL)
    eventually(lambda: pod.restarts("engine") == 1, "another engine", START_SECONDS)
    eventually(
        lambda: all(len(pod.said("mapped", plane=plane)) == 2 for plane in PLANES), "its mappings", START_SECONDS
    )
    pinned = {("slotcar_sessions", ""): len(PLANES), ("slotcar_pins", "mapping"): len(PLANES) * len(NAMES)}
    eventually(lambda: pinned.items() <= metrics(pod).items(), "the end of the dead one's sessions", START_SECONDS)
    assert pod.restarts("slotcar") == 0
    assert pod.said("wrong") == []


def test_nothing_is_left_of_a_pod(folder: Path, library: Library, image: str, injector_image: str) -> None:
    def volumes() -> set[str]:
        return set(told("volume", "ls", "--quiet").split())

    before = volumes()
    with running(folder, documents(library, image), image, injector_image) as pod:
        pod.computes()
        names = ("slotcar", "engine")
        pids = [pod.pid(name) for name in names]
        assert "slotcar-run" in volumes() - before
    assert podman("pod", "exists", pod.name).returncode == 1
    assert [name for name in names if podman("container", "exists", pod.container(name)).returncode == 0] == []
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert volumes() - before == set()
