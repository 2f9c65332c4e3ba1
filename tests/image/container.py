"""Containers of slotcar's images, run as a careful cluster does: nothing may be written but what is mounted.

The root file system is read-only, without podman's own folders in memory; there are no capabilities, no new privileges
and no network, and an empty file that nobody may execute lies over each shell.
"""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc

START_SECONDS = 120.0
STOP_SECONDS = 60.0
PODMAN = ("podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs")
# podman's own are more than a root without all capabilities may give.
LIMITS = ("--ulimit", "nofile=20000:20000", "--ulimit", "nproc=4096:4096")
LOCKED = (
    *("--read-only", "--read-only-tmpfs=false", "--cap-drop=all", "--security-opt", "no-new-privileges"),
    *("--pull", "never", "--network", "none", *LIMITS),
)
USER = 65532
SHELLS = ("/usr/bin/dash", "/usr/bin/bash")
PYTHON = "/opt/slotcar/bin/python"


def podman(*words: str, seconds: float = START_SECONDS) -> subprocess.CompletedProcess[str]:
    """What podman said, and its exit code."""
    return subprocess.run([*PODMAN, *words], check=False, capture_output=True, text=True, timeout=seconds)


def told(*words: str, seconds: float = START_SECONDS) -> str:
    """What podman said, which must go well."""
    done = podman(*words, seconds=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def inspected(kind: str, name: str) -> dict[str, Any]:
    """What podman knows of an image or a container."""
    (found,) = json.loads(told(kind, "inspect", name))
    return dict(found)


def owned(path: Path) -> Path:
    """Makes a folder that belongs to the containers' user, as a volume of a pod does."""
    path.mkdir()
    os.chown(path, USER, USER)
    return path


def without_shells(folder: Path) -> list[str]:
    """The options that take the shells away."""
    nothing = folder / "no-shell"
    nothing.touch(mode=0o444)
    return [word for shell in SHELLS for word in ("--volume", f"{nothing}:{shell}:ro")]


def ran(image: str, folder: Path, *words: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Runs the image's program with `words` to its end, with nothing mounted that can be written."""
    return podman("run", "--rm", *LOCKED, *without_shells(folder), *options, image, *words)


def python(image: str, folder: Path, program: str) -> Any:
    """The JSON value that a program prints, run in the image by slotcar's own Python."""
    done = ran(image, folder, "-c", program, options=("--entrypoint", PYTHON))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@dataclass
class SidecarContainer:
    """`slotcar serve` in a container, with `home` as its /run/slotcar; what else it sees is in `options`."""

    image: str
    home: Path
    settings: Sequence[str] = ()
    options: Sequence[str] = ()
    name: str = field(default_factory=lambda: f"slotcar-test-{uuid.uuid4().hex[:12]}")

    @property
    def target(self) -> str:
        return f"unix://{self.home / 'slotcar.sock'}"

    @property
    def log(self) -> str:
        done = podman("logs", self.name)
        return done.stdout + done.stderr

    def run(self) -> None:
        """Starts it, without waiting for anything."""
        volume = ("--volume", f"{self.home}:/run/slotcar")
        shells = without_shells(self.home.parent)
        told("run", "--detach", "--name", self.name, *LOCKED, *volume, *shells, *self.options, self.image, *self._words)

    def start(self) -> Self:
        """Starts it, and returns when it answers."""
        self.run()
        with grpc.insecure_channel(self.target.replace("unix://", "unix:")) as channel:
            ready = grpc.channel_ready_future(channel)
            for _ in range(int(START_SECONDS)):
                try:
                    ready.result(timeout=1)
                except grpc.FutureTimeoutError:
                    assert not self.has_ended(), self.log
                    continue
                return self
        raise AssertionError(f"the sidecar did not answer:\n{self.log}")

    @property
    def _words(self) -> tuple[str, ...]:
        return ("serve", "--shutdown-seconds", "5", *self.settings)

    def has_ended(self) -> bool:
        return str(self.state["Status"]) not in ("created", "running")

    @property
    def state(self) -> dict[str, Any]:
        return dict(inspected("container", self.name)["State"])

    def signal(self, name: str) -> None:
        told("kill", "--signal", name, self.name)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return int(told("wait", self.name, seconds=STOP_SECONDS))

    def python(self, program: str) -> Any:
        """The JSON value that a program prints, run beside the server in its container."""
        return json.loads(told("exec", self.name, PYTHON, "-c", program))

    def remove(self) -> None:
        podman("rm", "--force", "--time", "0", self.name)
