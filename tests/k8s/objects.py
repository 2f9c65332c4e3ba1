"""The part of an API server that Helm talks to: discovery, and objects that are made, read, changed and deleted.

Objects are kept as they were sent, so that an upgrade's `lookup` finds what an install made. There are neither schemas,
nor defaults, nor admission: other tests validate what Helm sends.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

Json = dict[str, Any]
# Group and version, resource, kind, whether it has a namespace.
KINDS = (
    ("v1", "namespaces", "Namespace", False),
    ("v1", "configmaps", "ConfigMap", True),
    ("v1", "pods", "Pod", True),
    ("v1", "secrets", "Secret", True),
    ("v1", "serviceaccounts", "ServiceAccount", True),
    ("v1", "services", "Service", True),
    ("apps/v1", "deployments", "Deployment", True),
    ("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget", True),
    ("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy", True),
    ("admissionregistration.k8s.io/v1", "mutatingwebhookconfigurations", "MutatingWebhookConfiguration", False),
    ("cert-manager.io/v1", "certificates", "Certificate", True),
    ("cert-manager.io/v1", "issuers", "Issuer", True),
)
_VERBS = ["create", "delete", "get", "list", "patch", "update"]


class Objects(ThreadingHTTPServer):
    """`kept` is by path; `said` has every request, in order."""

    daemon_threads = True

    def __init__(self, version: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.version = version
        self.kept: dict[str, Json] = {}
        self.said: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def of_kind(self, kind: str) -> list[Json]:
        return [each for each in self.kept.values() if each["kind"] == kind]

    def discovery(self, path: str) -> Json | None:
        groups = sorted({version for version, *_ in KINDS if "/" in version})
        if path == "/version":
            major, minor = self.version.split(".")
            return {"major": major, "minor": minor, "gitVersion": f"v{self.version}.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(each) for each in groups]}
        if path == "/openapi/v3":
            roots = {_root(version): {"serverRelativeURL": f"/openapi/v3/{_root(version)}"} for version, *_ in KINDS}
            return {"paths": roots}
        is_schema = path.startswith("/openapi/v3/")
        version = re.sub(r"^(/openapi/v3)?/apis?/", "", path)
        found = [each for each in KINDS if each[0] == version]
        if not found:
            return None
        if is_schema:
            return {"openapi": "3.0.0", "info": {"title": "", "version": ""}, "paths": dict(map(_operation, found))}
        resources = [
            {"name": name, "singularName": "", "namespaced": spaced, "kind": kind, "verbs": _VERBS}
            for _, name, kind, spaced in found
        ]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


def _group(version: str) -> Json:
    one = {"groupVersion": version, "version": version.partition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [one], "preferredVersion": one}


def _root(version: str) -> str:
    return f"{'apis' if '/' in version else 'api'}/{version}"


def _operation(kind: tuple[str, str, str, bool]) -> tuple[str, Json]:
    """That fields are validated here, so that Helm does not want the schemas."""
    version, resource, name, _ = kind
    group, _, rest = version.rpartition("/")
    patch = {
        "x-kubernetes-group-version-kind": {"group": group, "version": rest, "kind": name},
        "parameters": [{"name": "fieldValidation", "in": "query"}],
    }
    return f"/{_root(version)}/{resource}/{{name}}", {"patch": patch}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Objects

    def log_message(self, *_: object) -> None:
        """Nothing: `said` has it."""

    def do_GET(self) -> None:
        path = self._path()
        found = self.server.discovery(path) or self.server.kept.get(path)
        self._answer(found)

    def do_POST(self) -> None:
        path, made = self._path(), self._body()
        self._keep(f"{path}/{made['metadata']['name']}", made)

    def do_PUT(self) -> None:
        self._keep(self._path(), self._body())

    def do_PATCH(self) -> None:
        """Server-side apply by a single owner: what is sent is what there is."""
        assert self.headers["Content-Type"] == "application/apply-patch+yaml"
        self._keep(self._path(), self._body())

    def do_DELETE(self) -> None:
        path = self._path()
        self._body()
        self._answer(self.server.kept.pop(path, None))

    def _path(self) -> str:
        self.server.said.append(f"{self.command} {self.path}")
        return self.path.partition("?")[0]

    def _body(self) -> Json:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found: Json = yaml.safe_load(data) or {}
        return found

    def _keep(self, path: str, made: Json) -> None:
        if "dryRun" not in self.path:
            self.server.kept[path] = made
        self._answer(made)

    def _answer(self, found: Json | None) -> None:
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        data = json.dumps(found or missing).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(version: str = "1.31") -> Iterator[Objects]:
    """An API server of this version without any object."""
    server = Objects(version)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
