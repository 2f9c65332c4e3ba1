"""The commands that docs/kubernetes.md gives for the container `slotcar` run there, as the page has them."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from slotcar_sidecar.cli import main

from tests.faults.oracle import Library
from tests.image.conftest import NAMES
from tests.image.container import PODMAN, START_SECONDS
from tests.image.pod import Pod, documents, running
from tests.k8s.page import Command, commands

COMMANDS = sorted(commands(), key=lambda command: command.line)
IN_POD = [inner for command in COMMANDS if (inner := command.in_pod) is not None]
OF_SLOTCAR = [command for command in (*COMMANDS, *IN_POD) if command.program == "slotcar"]


@pytest.mark.parametrize("command", OF_SLOTCAR, ids=str)
def test_slotcar_takes_it(command: Command) -> None:
    _, verb, *words = command.words
    with main.commands[verb].make_context(verb, list(words)):
        pass


def test_a_wrong_one_would_be_found() -> None:
    with pytest.raises(click.UsageError):
        main.commands["list"].make_context("list", ["--no-such-option"])


def executed(pod: Pod, words: Sequence[str]) -> bytes:
    """What a command says in the pod's sidecar, as by `kubectl exec`."""
    command = [*PODMAN, "exec", pod.container("slotcar"), *words]
    done = subprocess.run(command, check=False, capture_output=True, timeout=START_SECONDS)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


@pytest.mark.image
@pytest.mark.timeout(600)
def test_they_run_in_the_pod(folder: Path, library: Library, image: str, injector_image: str) -> None:
    """Without options, without a shell and without a terminal, they find the socket of their container."""
    with running(folder, documents(library, image), image, injector_image) as pod:
        pod.computes()
        said = {command.words: executed(pod, command.words) for command in IN_POD}
    listed = said["slotcar", "list"].decode()
    assert all(name in listed for name in NAMES)
    assert b"pod-direct" in said["slotcar", "sessions"]
    (bundle,) = [text for words, text in said.items() if words[0] == "cat"]
    with tarfile.open(fileobj=io.BytesIO(bundle)) as archive:
        assert any(name.endswith("manifest.json") for name in archive.getnames())
