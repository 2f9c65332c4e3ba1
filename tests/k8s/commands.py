"""What is wrong with a command of the runbook: an empty list if its program takes it, and all that it names is there.

Words in capitals stand for the reader's own. Everything else, be it a verb, an option, an object, a container, a port,
a file or a label, is looked up: at the real kubectl, at the injector's own parser, in what the repository renders.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import yaml
from slotcar_injector.annotations import ANNOTATIONS
from slotcar_injector.cli import main as injector
from slotcar_injector.places import LABEL, METRICS_LABEL, PREFIX, STATUS
from slotcar_injector.review import inject
from slotcar_injector.settings import Settings

from tests.k8s import charts, checks, kubectl
from tests.k8s.environment import REPOSITORY
from tests.k8s.page import Command
from tests.k8s.pods import IMAGE, pod

Json = dict[str, Any]
NAMESPACES = {"slotcar-system", "slotcar-pool", "slotcar-node", "kube-system", "default", "monitoring"}
# Every one is run by a test, or does nothing that slotcar has a part in.
OTHERS = {"base64", "curl", "make", "openssl", "sleep"}
# Of a reader's own objects, or of Kubernetes'; names are the reader's.
READERS_KINDS = {"pod", "node", "event", "replicaset", "namespace", "job", "resourceclaim", "issuer", "endpointslice"}
SHORT = {
    "po": "pod",
    "no": "node",
    "svc": "service",
    "deploy": "deployment",
    "ds": "daemonset",
    "sts": "statefulset",
    "cm": "configmap",
    "ns": "namespace",
    "pdb": "poddisruptionbudget",
}
READERS_FILES = {"-", "pod.yaml", "values.yaml"}
# What `slotcar-injector certs` makes, and the keys of ConfigMaps and Secrets that annotations name.
MADE_FILES = {"ca.crt", "tls.crt", "tls.key", "adapters.yaml", "policy.yaml", "model-spec.json", "options.json"}
HELM = {
    "install": {"--namespace", "--create-namespace", "--set", "--set-file", "--values", "--wait", "--timeout"},
    "upgrade": {
        *("--namespace", "--install", "--set", "--set-file", "--set-string", "--values", "--wait", "--timeout"),
        *("--reuse-values", "--reset-then-reuse-values"),
    },
    "test": {"--namespace", "--logs", "--timeout"},
    "template": {"--namespace", "--set", "--set-file", "--values", "--kube-version"},
    "uninstall": {"--namespace", "--wait"},
    "rollback": {"--namespace", "--wait"},
    "status": {"--namespace"},
    "history": {"--namespace"},
    "get values": {"--namespace"},
}
HELM_SHORT = {"-n": "--namespace", "-f": "--values", "-i": "--install"}
HELM_SWITCHES = {
    *("--create-namespace", "--wait", "--install", "--logs"),
    *("--reuse-values", "--reset-then-reuse-values"),
}


def is_placeholder(word: str) -> bool:
    return word.replace("-", "").replace("_", "").isupper()


@dataclass(frozen=True)
class World:
    """What a command may name: the repository's objects, an injected pod, and what the page itself creates."""

    objects: tuple[Json, ...]
    created: frozenset[tuple[str, str]] = frozenset()

    @cached_property
    def pod(self) -> Json:
        found, _, _ = inject(pod(), Settings(defaults={"image": IMAGE}))
        return found

    @cached_property
    def names(self) -> frozenset[tuple[str, str]]:
        """Kind, in small letters, and name; cert-manager makes a Secret for each Certificate."""
        certificates = [each["spec"] for each in self.objects if each["kind"] == "Certificate"]
        made = self.created | {("secret", each["secretName"]) for each in certificates}
        return made | {(each["kind"].lower(), each["metadata"]["name"]) for each in self.objects}

    @cached_property
    def containers(self) -> frozenset[str]:
        return frozenset(each["name"] for one in self._pods for _, each in checks.containers(one))

    @cached_property
    def ports(self) -> frozenset[str]:
        """Of pods and services, as numbers and as names."""
        of_pods = (port for one in self._pods for _, each in checks.containers(one) for port in each.get("ports") or ())
        of_services = (port for each in self.objects if each["kind"] == "Service" for port in each["spec"]["ports"])
        ports = (*of_pods, *of_services)
        return frozenset(str(port[key]) for port in ports for key in ("name", "port", "containerPort") if key in port)

    @cached_property
    def labels(self) -> frozenset[tuple[str, str]]:
        every = [self.pod, *self.objects, *self._pods]
        return frozenset(item for each in every for item in (each["metadata"].get("labels") or {}).items())

    @property
    def _pods(self) -> Iterator[Json]:
        yield self.pod
        for each in self.objects:
            if "template" in each.get("spec", {}):
                yield each["spec"]["template"]


def of_kustomize() -> Iterator[Json]:
    """What the real kubectl renders of every folder of deploy/kustomize."""
    program = Path(sys.executable).with_name("kubectl")
    for file in sorted((REPOSITORY / "deploy" / "kustomize").rglob("kustomization.yaml")):
        done = subprocess.run([program, "kustomize", file.parent], check=True, capture_output=True, text=True)
        yield from (each for each in yaml.safe_load_all(done.stdout) if each and each["kind"] != "Component")


def of_chart() -> Iterator[Json]:
    """What Helm renders of a release with the name that the page has, for each source of certificates."""
    for case in ("generated", "cert-manager", "provided"):
        yield from charts.rendered(charts.values_of(case))


def created(commands: Sequence[Command]) -> frozenset[tuple[str, str]]:
    """What the page's own `kubectl create` makes."""
    found = set()
    for command in commands:
        if command.words[:1] == ("kubectl",) and "create" in command.words:
            said = kubectl.said(command.words[1:])
            kind = (said.verb.split() or [""])[1:2]
            found |= {(each, name) for each in kind for name in said.words}
    return frozenset(found)


def faults(command: Command, world: World) -> list[str]:
    """What a reader would stumble over."""
    program, *words = command.words
    if program == "kubectl":
        return list(_of_kubectl(words, world))
    if program == "helm":
        return list(_of_helm(words))
    if program == "slotcar-injector":
        return list(_of_injector(words))
    if program in OTHERS:
        return []
    return [f"no test knows the program {program}"]


def _of_injector(words: Sequence[str]) -> Iterator[str]:
    if not words or words[0] not in injector.commands:
        yield f"slotcar-injector has no command {' '.join(words[:1])}"
        return
    try:
        with injector.commands[words[0]].make_context(words[0], list(words[1:])):
            pass
    except click.UsageError as error:
        yield error.format_message()


def _of_kubectl(words: Sequence[str], world: World) -> Iterator[str]:
    try:
        said = kubectl.said(words)
    except kubectl.Unknown as error:
        yield str(error)
        return
    namespace = said.option("namespace")
    if namespace and namespace not in NAMESPACES and not is_placeholder(namespace):
        yield f"namespace {namespace} is of nobody"
    container = said.option("container")
    if container and container not in world.containers and not is_placeholder(container):
        yield f"no pod has a container {container}"
    for selector in said.options.get("selector", ()):
        yield from _of_selector(selector, world)
    for option in ("filename", "kustomize"):
        yield from (f"there is no {path}" for path in said.options.get(option, ()) if not _is_there(path))
    for path in said.options.get("from-file", ()):
        if Path(path.rpartition("=")[2]).name not in MADE_FILES and not is_placeholder(path):
            yield f"nothing makes {path}"
    yield from _of_verb(said, world)


def _of_verb(said: kubectl.Said, world: World) -> Iterator[str]:
    if not said.words:
        return
    match said.verb.split():
        case ["exec" | "logs"]:
            yield from _of_pod(said.words[0], world)
            if said.inner and said.inner[0] not in ("slotcar", "slotcar-injector", "cat"):
                yield f"no test runs {said.inner[0]} in a container"
        case ["port-forward"]:
            yield from _of_pod(said.words[0], world)
            remote = {word.rpartition(":")[2] for word in said.words[1:]}
            yield from (f"nothing has a port {port}" for port in sorted(remote - world.ports))
        case ["drain" | "cordon" | "uncordon"]:
            yield from (f"{word} is no node" for word in said.words if not is_placeholder(word))
        case ["label" | "annotate"]:
            keys = [word for word in said.words if "=" in word or word.endswith("-")]
            yield from _of_keys(keys)
            yield from _of_objects([word for word in said.words if word not in keys], world)
        case ["get" | "describe" | "delete" | "wait" | "patch" | "edit"] | ["rollout", _]:
            yield from _of_objects(said.words, world)
        case ["create", *_] | ["apply"]:
            pass
        case _:
            yield f"no test knows kubectl {said.verb}"


def _of_pod(word: str, world: World) -> Iterator[str]:
    if "/" in word:
        yield from _of_objects([word], world)
    elif not is_placeholder(word):
        yield f"{word} is no pod"


def _of_objects(words: Sequence[str], world: World) -> Iterator[str]:
    """Of `KIND`, `KIND NAME…`, `KIND,KIND` and `KIND/NAME`."""
    pairs = [word.split("/", 1) for word in words if "/" in word]
    rest = [word for word in words if "/" not in word]
    for kind in rest[:1]:
        pairs += [[each, name] for each in kind.split(",") for name in rest[1:] or [""]]
    known = {kind for kind, _ in world.names} | READERS_KINDS
    for plural, name in pairs:
        kind = _singular(plural)
        if kind not in known:
            yield f"the repository has no {plural}"
        elif name and not is_placeholder(name) and (kind, name) not in world.names:
            yield f"the repository has no {kind} {name}"


def _singular(word: str) -> str:
    kind = word.lower().partition(".")[0]
    kind = SHORT.get(kind, kind)
    return kind[:-1] if kind.endswith("s") and not kind.endswith("ss") else kind


def _of_selector(selector: str, world: World) -> Iterator[str]:
    for term in selector.split(","):
        key, _, value = term.partition("=")
        values = {found for name, found in world.labels if name == key}
        if not values or (value and value not in values and not is_placeholder(value)):
            yield f"nothing has the label {term}"


def _of_keys(words: Sequence[str]) -> Iterator[str]:
    known = {PREFIX + each.name for each in ANNOTATIONS} | {LABEL, METRICS_LABEL, STATUS}
    for word in words:
        key = word.removesuffix("-").partition("=")[0]
        if key.startswith(PREFIX) and key not in known:
            yield f"slotcar knows no {key}"


def _is_there(path: str) -> bool:
    return path in READERS_FILES or is_placeholder(path) or (REPOSITORY / path).exists()


def _of_helm(words: Sequence[str]) -> Iterator[str]:
    verb = " ".join(words[:2]) if words[:1] == ["get"] else "".join(words[:1])
    if verb not in HELM:
        yield f"no test knows helm {verb}"
        return
    rest = iter(words[len(verb.split()) :])
    for word in rest:
        if not word.startswith("-"):
            if "/" in word and not (REPOSITORY / word / "Chart.yaml").exists():
                yield f"{word} is no chart"
            continue
        name, equals, value = word.partition("=")
        long = HELM_SHORT.get(name, name)
        if long not in HELM[verb]:
            yield f"helm {verb} has no option {name} that a test knows"
        elif long not in HELM_SWITCHES:
            yield from _of_helm_option(long, value if equals else next(rest, ""))


def _of_helm_option(name: str, value: str) -> Iterator[str]:
    if name in ("--set", "--set-file", "--set-string"):
        values = yaml.safe_load(
            (REPOSITORY / "deploy" / "helm" / "slotcar" / "values.yaml").read_text(encoding="utf-8")
        )
        for term in value.split(","):
            yield from _of_value(term.partition("=")[0], values)
    elif name == "--values" and not _is_there(value):
        yield f"there is no {value}"
    elif not value:
        yield f"{name} has no value"


def _of_value(path: str, values: Json) -> Iterator[str]:
    """What is not in values.yaml; below an empty object there may be anything that the schema takes."""
    here: Any = values
    for part in path.split("."):
        if here == {}:
            return
        if not isinstance(here, dict) or part not in here:
            yield f"the chart has no value {path}"
            return
        here = here[part]
