"""What the injector starts a sidecar with is what `slotcar serve` takes, and what its probes ask is what it answers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from slotcar_client.config import TARGET_VARIABLE
from slotcar_injector import places
from slotcar_injector.review import inject
from slotcar_injector.settings import Settings
from slotcar_sidecar import cli

from tests.k8s.pods import GOOD, IMAGE, Json, good

START_SECONDS = 60


def sidecar_of(name: str) -> Json:
    injected, _, _ = inject(good(name), Settings(defaults={"image": IMAGE}))
    spec = injected["spec"]
    (found,) = [
        each for kind in ("initContainers", "containers") for each in spec.get(kind) or () if each["name"] == "slotcar"
    ]
    return dict(found)


@pytest.mark.parametrize("name", GOOD)
def test_every_flag_is_one_of_serve_s_and_its_value_fits(name: str) -> None:
    sidecar = sidecar_of(name)
    assert sidecar["command"] == ["slotcar"]
    command, *flags = sidecar["args"]
    assert cli.main.commands[command] is cli.serve
    with cli.serve.make_context(command, list(flags)) as context:
        # Folders are the pod's.
        config = cli._make_config(context.params | {"root": ()})
    assert config.listen == (places.TARGET,)


def test_an_unknown_flag_would_be_found() -> None:
    with pytest.raises(click.NoSuchOption):
        cli.serve.make_context("serve", ["--no-such-flag=1"])


def test_the_client_reads_the_variable_that_the_engine_gets() -> None:
    assert places.TARGET_VARIABLE == TARGET_VARIABLE


@contextmanager
def started(sidecar: Json, folder: Path) -> Iterator[dict[str, int]]:
    """The container's command with its volumes beneath `folder`, and free ports; which of its ports is which."""
    with ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in sidecar["ports"]]
    here = {"0.0.0.0": "127.0.0.1"}
    here |= {f":{port['containerPort']}": f":{new}" for port, new in zip(sidecar["ports"], free, strict=True)}
    here |= {mount["mountPath"]: str(folder / mount["name"]) for mount in sidecar["volumeMounts"]}
    for mount in sidecar["volumeMounts"]:
        (folder / mount["name"]).mkdir()
    text = re.sub("|".join(map(re.escape, here)), lambda found: here[found[0]], "\n".join(sidecar["args"]))
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-m", "slotcar_sidecar", *text.splitlines()]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        yield dict(zip([port["name"] for port in sidecar["ports"]], free, strict=True))
        process.terminate()
        assert process.wait(START_SECONDS) == 0, (folder / "log").read_text()
    finally:
        process.kill()
        process.wait()


def test_a_sidecar_started_so_answers_each_probe(tmp_path: Path) -> None:
    sidecar = sidecar_of("beside")
    with started(sidecar, tmp_path) as ports, grpc.insecure_channel(f"127.0.0.1:{ports['slotcar-health']}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = sidecar[probe]["grpc"]
            assert asked["port"] == next(p["containerPort"] for p in sidecar["ports"] if p["name"] == "slotcar-health")
            request = health_pb2.HealthCheckRequest(service=asked["service"])
            watch = health.Watch(request, wait_for_ready=True, timeout=START_SECONDS)
            wanted = health_pb2.HealthCheckResponse.SERVING
            assert any(answer.status == wanted for answer in watch), probe
            watch.cancel()
    assert (tmp_path / places.DISK_VOLUME / "tier").is_dir()
