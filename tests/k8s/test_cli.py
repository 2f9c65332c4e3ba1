"""The command's other parts: a pod from standard input, settings that cannot be used, options in the environment."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from slotcar_injector.cli import main
from slotcar_injector.settings import kube_version_of

from tests.k8s import checks
from tests.k8s.pods import IMAGE, good, pod

DEFAULT = f"--default=image={IMAGE}"


def test_a_pod_is_injected_without_a_cluster() -> None:
    done = CliRunner().invoke(main, ["inject", DEFAULT], input=json.dumps(good("deployment")))
    assert done.exit_code == 0
    assert checks.named(json.loads(done.stdout), "slotcar")


def test_a_pod_needs_no_metadata_there() -> None:
    of = {"kind": "Pod", "spec": {"containers": [{"name": "engine"}]}}
    done = CliRunner().invoke(main, ["inject", DEFAULT], input=json.dumps(of))
    assert done.exit_code == 0
    assert "slotcar.dev/status" in json.loads(done.stdout)["metadata"]["annotations"]


def test_warnings_go_to_standard_error() -> None:
    done = CliRunner().invoke(main, ["inject", DEFAULT], input=json.dumps(good("bare")))
    assert "warning: slotcar has no memory limit" in done.stderr
    assert json.loads(done.stdout)


@pytest.mark.parametrize("text", ["{", "[]", json.dumps(pod(annotations={"slot": "1"})), '{"kind": "Deployment"}'])
def test_what_cannot_be_injected_exits_with_1(text: str) -> None:
    done = CliRunner().invoke(main, ["inject", DEFAULT], input=text)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: ")


@pytest.mark.parametrize(
    ("option", "part"),
    [
        ("--default=image", "wanted NAME=VALUE"),
        ("--default=slot=1", "did you mean slotcar.dev/slots?"),
        ("--default=slots=0", "wanted a number from 1 to 4096"),
        ("--kube-version=new", "--kube-version is new, wanted a version such as 1.31"),
        ("--user=0", "--user is 0, wanted a number from 1"),
        ("--group=-1", "--group is -1"),
        ("--bind=localhost", "--bind is localhost, wanted an IP address"),
    ],
)
@pytest.mark.parametrize("command", ["inject", "serve"])
def test_settings_that_cannot_be_used_exit_with_2(command: str, option: str, part: str) -> None:
    done = CliRunner().invoke(main, [command, option], input="{}")
    assert done.exit_code == 2
    assert part in done.stderr


def test_ipv6_has_brackets() -> None:
    done = CliRunner().invoke(main, ["inject", DEFAULT, "--bind=::"], input=json.dumps(good("bare")))
    _, sidecar = checks.named(json.loads(done.stdout), "slotcar")
    assert "--metrics=[::]:9464" in sidecar["args"]


def test_an_option_can_be_a_variable() -> None:
    variables = {"SLOTCAR_INJECTOR_INJECT_DEFAULT": f"image={IMAGE} slots=3", "SLOTCAR_INJECTOR_INJECT_GROUP": "7"}
    done = CliRunner().invoke(main, ["inject"], input=json.dumps(good("bare")), env=variables)
    injected = json.loads(done.stdout)
    assert "--slots=3" in checks.named(injected, "slotcar")[1]["args"]
    assert injected["spec"]["securityContext"]["supplementalGroups"] == [7]


@pytest.mark.parametrize(
    ("text", "version"),
    [("", None), ("1.31", (1, 31)), ("v1.31.4", (1, 31)), ("1.29+", (1, 29)), ("v1.30.2-gke.1", (1, 30))],
)
def test_versions_as_clusters_write_them(text: str, version: tuple[int, int] | None) -> None:
    assert kube_version_of(text) == version
