"""What is wrong with a command of the runbook: an empty list if its program takes it, and all that it names is there.

Words in capitals stand for the reader's own. Everything else, be it a verb, an option, an object, a container, a port,
a file or a label, is looked up: at the real kubectl, at the injector's own parser, in what the repository renders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import click
import yaml
from slotcar_injector.annotations import ANNOTATIONS
from slotcar_injector.cli import main as injector
from slotcar_injector.places import LABEL, METRICS_LABEL, PREFIX, STATUS
from slotcar_injector.review import inject
from slotcar_injector.settings import Settings

from tests.k8s import charts, checks, kubectl, kustomize
from tests.k8s.environment import REPOSITORY
from tests.k8s.page import Command
from tests.k8s.pods import IMAGE, pod

Json = dict[str, Any]
NAMESPACES = {"slotcar-system", "slotcar-pool", "slotcar-node"}
# Programs of any machine, by all that the page says to them.
OTHERS = {("base64", "-w0", "pki/ca.crt"), ("curl", "http://localhost:9464/metrics")}
# What `slotcar-injector certs` makes in its folder.
CERTIFICATE_FILES = ("ca.crt", "tls.crt", "tls.key")
# Of a reader's own objects, or of Kubernetes'; names are the reader's.
READERS_KINDS = {"pod", "node"}
# Those of an authority that the reader has are in the folders of who gets them.
READERS_FILES = {"-", "pod.yaml"} | {f"{who}/{name}" for who in ("member", "envoy") for name in CERTIFICATE_FILES}
HELM = {
    "install": {"--namespace", "--create-namespace", "--set"},
    # Not --reuse-values, with which a value that is new in the chart is missing, and its schema refuses that.
    "upgrade": {"--namespace", "--reset-then-reuse-values", "--set", "--set-file", "--set-string"},
    "test": {"--namespace"},
    "uninstall": {"--namespace"},
    "rollback": {"--namespace"},
}
HELM_SWITCHES = {"--create-namespace", "--reset-then-reuse-values"}


def is_placeholder(word: str) -> bool:
    return word.replace("-", "").replace("_", "").isupper()


@dataclass(frozen=True)
class World:
    """What a command may name: the repository's objects, an injected pod, and what the page itself makes."""

    objects: tuple[Json, ...]
    created: frozenset[tuple[str, str]]
    files: frozenset[str]

    @cached_property
    def pod(self) -> Json:
        found, _, _ = inject(pod(), Settings(defaults={"image": IMAGE}))
        return found

    @cached_property
    def names(self) -> frozenset[tuple[str, str]]:
        """Kind, in small letters, and name; cert-manager makes a Secret for each Certificate."""
        specs = [each["spec"] for each in self.objects if each["kind"] == "Certificate"]
        made = self.created | {("secret", each["secretName"]) for each in specs}
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

    @cached_property
    def node_labels(self) -> frozenset[str]:
        """Those that a node needs for one of the pods."""
        return frozenset(key for each in self._pods for key in each.get("spec", {}).get("nodeSelector") or ())

    @property
    def _pods(self) -> Iterator[Json]:
        yield self.pod
        for each in self.objects:
            if "template" in each.get("spec", {}):
                yield each["spec"]["template"]


def of_kustomize() -> Iterator[Json]:
    """What the real kubectl renders of every overlay."""
    for overlay in kustomize.OVERLAYS:
        yield from kustomize.built(overlay)


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


def certificates(commands: Sequence[Command]) -> frozenset[str]:
    """The files that the page's own `slotcar-injector certs FOLDER` makes."""
    folders = [command.words[2] for command in commands if command.words[:2] == ("slotcar-injector", "certs")]
    return frozenset(f"{folder}/{name}" for folder in folders for name in CERTIFICATE_FILES)


def faults(command: Command, world: World) -> list[str]:
    """What a reader would stumble over."""
    program, *words = command.words
    if program == "kubectl":
        return list(_of_kubectl(words, world))
    if program == "helm":
        return list(_of_helm(words, world))
    if program == "slotcar-injector":
        return list(_of_injector(words))
    if command.words in OTHERS:
        return []
    return [f"no test knows {' '.join(command.words)}"]


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
        yield from _of_file(path.rpartition("=")[2], world)
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
            yield from _of_keys(keys, world)
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
    return kind[:-1] if kind.endswith("s") and not kind.endswith("ss") else kind


def _of_selector(selector: str, world: World) -> Iterator[str]:
    for term in selector.split(","):
        key, _, value = term.partition("=")
        values = {found for name, found in world.labels if name == key}
        if not values or (value and value not in values and not is_placeholder(value)):
            yield f"nothing has the label {term}"


def _of_keys(words: Sequence[str], world: World) -> Iterator[str]:
    known = {PREFIX + each.name for each in ANNOTATIONS} | {LABEL, METRICS_LABEL, STATUS} | world.node_labels
    for word in words:
        key = word.removesuffix("-").partition("=")[0]
        if key.startswith(PREFIX) and key not in known:
            yield f"slotcar knows no {key}"


def _is_there(path: str) -> bool:
    return path in READERS_FILES or is_placeholder(path) or (REPOSITORY / path).exists()


def _of_file(path: str, world: World) -> Iterator[str]:
    if path not in world.files and not _is_there(path):
        yield f"nothing makes {path}"


def _of_helm(words: Sequence[str], world: World) -> Iterator[str]:
    verb = "".join(words[:1])
    if verb not in HELM:
        yield f"no test knows helm {verb}"
        return
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-"):
            if "/" in word and not (REPOSITORY / word / "Chart.yaml").exists():
                yield f"{word} is no chart"
            continue
        name, equals, value = word.partition("=")
        if name not in HELM[verb]:
            yield f"helm {verb} has no option {name} that a test knows"
        elif name not in HELM_SWITCHES:
            yield from _of_helm_option(name, value if equals else next(rest, ""), world)


def _of_helm_option(name: str, value: str, world: World) -> Iterator[str]:
    if name in ("--set", "--set-file", "--set-string"):
        values = yaml.safe_load(
            (REPOSITORY / "deploy" / "helm" / "slotcar" / "values.yaml").read_text(encoding="utf-8")
        )
        for term in value.split(","):
            path, _, given = term.partition("=")
            yield from _of_value(path, values)
            if name == "--set-file":
                yield from _of_file(given, world)
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
