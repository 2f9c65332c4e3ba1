"""A pod with an engine that slotcar was injected into, run by podman as a kubelet would run it.

What podman 4.3 lacks is made up for here and nowhere else. It knows no init containers that go on: `beside` moves the
sidecar among the containers, as the first of them. It bounds annotations as if they were labels: the status, which
nobody in the pod reads, is left out. It knows no probes by gRPC: tests ask as a kubelet does.
"""

from __future__ import annotations

import copy
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import Template
from typing import Any

import pytest
import torch
import yaml

from tests.faults.oracle import Library, spec_file
from tests.image.conftest import NAMES, SITE
from tests.image.container import LOCKED, PODMAN, START_SECONDS, inspected, podman, told
from tests.tolerances import TOLERANCES
from tests.waiting import eventually

Json = dict[str, Any]
HERE = Path(__file__).parent
MANIFEST = HERE / "pod_engine.yaml"
PROGRAM = HERE / "pod_engine.py"
PLANES = ("stream", "ring", "direct")
GRACE_SECONDS = 8
# Of all containers, as `podman kube play` has no option for them; and its own programs, which start others.
CONFIGURATION = """
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
"""


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in made]


def documents(library: Library, image: str, away: str = "fail", mode: str = "native") -> list[Json]:
    """The owner's manifest, for this library: ConfigMaps, and the pod of an engine whose sessions have this `away`."""
    metrics_port, health_port = free_ports(2)
    words = ["--adapters", "/srv/adapters", "--names", *NAMES, "--site", SITE, "--away", away]
    texts = {
        "image": image,
        "mode": mode,
        "adapters": str(library.root),
        "model": spec_file(library.root, library.sites).read_text(encoding="utf-8"),
        "program": PROGRAM.read_text(encoding="utf-8"),
        "arguments": [*words, "--tolerance", *map(str, TOLERANCES[torch.float32])],
    }
    filled = {name: json.dumps(value) for name, value in texts.items()}
    filled |= {"metrics_port": str(metrics_port), "health_port": str(health_port)}
    return list(yaml.safe_load_all(Template(MANIFEST.read_text(encoding="utf-8")).substitute(filled)))


def injected(pod: Json, image: str, injector_image: str) -> Json:
    """What the injector's image makes of the pod."""
    command = [*PODMAN, "run", "--rm", "--interactive", *LOCKED, injector_image, "inject", f"--default=image={image}"]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, input=json.dumps(pod), timeout=START_SECONDS
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def beside(pod: Json) -> Json:
    """The pod with a native sidecar as the first of its containers, and without the annotation of its status."""
    moved = copy.deepcopy(pod)
    for sidecar in moved["spec"].pop("initContainers", ()):
        assert sidecar.pop("restartPolicy") == "Always"
        moved["spec"]["containers"].insert(0, sidecar)
    del moved["metadata"]["annotations"]["slotcar.dev/status"]
    return moved


@dataclass(frozen=True)
class Pod:
    """A pod that runs; `spec` is what the injector wrote, before it was moved."""

    spec: Json
    file: Path

    @property
    def name(self) -> str:
        return str(self.spec["metadata"]["name"])

    def container(self, name: str) -> str:
        """podman's name for a container of the pod."""
        return f"{self.name}-{name}"

    @cached_property
    def address(self) -> str:
        """Where a kubelet and Prometheus reach it."""
        infra = told("pod", "inspect", self.name, "--format", "{{.InfraContainerID}}").strip()
        (network,) = inspected("container", infra)["NetworkSettings"]["Networks"].values()
        return str(network["IPAddress"])

    @cached_property
    def _said(self) -> Path:
        """The file of the engine's output: a line begins with its time, its stream and whether it is whole."""
        return Path(inspected("container", self.container("engine"))["HostConfig"]["LogConfig"]["Path"])

    @property
    def sidecar(self) -> Json:
        """The sidecar's container as the injector wrote it."""
        every = [*self.spec["spec"].get("initContainers", ()), *self.spec["spec"]["containers"]]
        return next(dict(each) for each in every if each["name"] == "slotcar")

    def port(self, name: str) -> int:
        return int(next(port["containerPort"] for port in self.sidecar["ports"] if port["name"] == name))

    def state(self, name: str) -> Json:
        return dict(inspected("container", self.container(name))["State"])

    def log(self, name: str) -> str:
        done = podman("logs", self.container(name))
        return done.stdout + done.stderr

    def said(self, event: str, **wanted: object) -> list[Json]:
        """What the engine said of this event."""
        written = self._said.read_text(encoding="utf-8")
        whole = written[: written.rfind("\n") + 1].splitlines()
        texts = [text for _, _, text in (line.partition(" stdout F ") for line in whole) if text]
        lines = [json.loads(text) for text in texts]
        return [line for line in lines if line["event"] == event and wanted.items() <= line.items()]

    def computes(self, beyond: int = 0) -> None:
        """Returns when the engine has said by each plane that it computed, more often than `beyond`; all was right."""

        def each_has() -> bool:
            assert self.said("ended") == self.said("wrong") == [], self.log("slotcar")
            return all(len(self.said("answered", plane=plane)) > beyond for plane in PLANES)

        eventually(each_has, "answers by each plane", START_SECONDS)

    def pid(self, name: str) -> int:
        """Of the container's first process, as this machine sees it."""
        return int(self.state(name)["Pid"])

    def restarts(self, name: str) -> int:
        return int(inspected("container", self.container(name))["RestartCount"])


@contextmanager
def running(folder: Path, documents: list[Json], image: str, injector_image: str) -> Iterator[Pod]:
    """The manifest's pod, injected, moved and played; nothing of it is left at the end."""
    if shutil.which("catatonit") is None:
        pytest.skip("catatonit, which holds a pod together, is missing: `make apt-image` installs it")
    *maps, before = documents
    spec = injected(before, image, injector_image)
    pod = Pod(spec, folder / "pod.yaml")
    pod.file.write_text(yaml.safe_dump_all([*maps, beside(spec)]), encoding="utf-8")
    configuration = folder / "containers.conf"
    configuration.write_text(CONFIGURATION, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", str(configuration))
        try:
            told("kube", "play", "--network", "podman", str(pod.file))
            yield pod
        finally:
            podman("kube", "down", str(pod.file))
            # It leaves the volumes that it made of ConfigMaps, by their names.
            podman("volume", "rm", *(each["metadata"]["name"] for each in maps))
