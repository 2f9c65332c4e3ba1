"""The part of an API server that calls webhooks: reviews sent over TLS to a real process, patches applied."""

from __future__ import annotations

import base64
import http.client
import json
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonpatch
import trustme

from tests.k8s.pods import IMAGE, UID, body, review

Json = dict[str, Any]
HOST = "slotcar-injector.slotcar-system.svc"
START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Admission:
    """What an API server does with a response: the pod that goes on, or the refusal."""

    allowed: bool
    pod: Json
    operations: tuple[Json, ...] = ()
    warnings: tuple[str, ...] = ()
    message: str = ""
    code: int | None = None


@dataclass
class Webhook:
    """A real `slotcar-injector serve`; `folder` has its certificate, key and log."""

    folder: Path
    authority: trustme.CA
    process: subprocess.Popen[bytes] | None = None
    port: int = 0
    ops_port: int = 0
    trust: ssl.SSLContext = field(init=False)

    def __post_init__(self) -> None:
        self.trust = trusting(self.authority)

    def command(self, *options: str) -> list[str]:
        files = [f"--certificate={self.folder / 'tls.crt'}", f"--key={self.folder / 'tls.key'}"]
        fixed = ["--host=127.0.0.1", "--port=0", "--ops-port=0", f"--default=image={IMAGE}", "--poll-seconds=0.02"]
        given = {option.partition("=")[0] for option in options}
        drain = [] if "--drain-seconds" in given else ["--drain-seconds=0"]
        return [sys.executable, "-m", "slotcar_injector", "serve", *files, *fixed, *drain, *options]

    def start(self, *options: str) -> None:
        """Returns when it serves."""
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self.command(*options), stderr=log)
        started = self.wait_for("serving")
        self.port, self.ops_port = started["port"], started["ops_port"]

    def wait_for(self, event: str, count: int = 1) -> Json:
        """The log line of the `count`th event of this name."""
        assert self.process is not None
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            found = [line for line in self.whole_lines() if line["event"] == event]
            if len(found) >= count:
                return found[count - 1]
            assert self.process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.01)
        raise AssertionError(f"no {event} in {(self.folder / 'log').read_text()}")

    def whole_lines(self) -> list[Json]:
        """Of the log; the last may be half there."""
        text = (self.folder / "log").read_bytes()
        return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]

    def end(self) -> int:
        """Its exit code after SIGTERM."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(START_SECONDS)
        finally:
            self.process.kill()

    def connect(self, timeout: float = 30.0) -> http.client.HTTPSConnection:
        connection = _Pinned(self.port, self.trust, timeout)
        connection.connect()
        return connection

    def post(self, data: bytes, path: str = "/inject", **headers: str) -> tuple[int, bytes]:
        connection = self.connect()
        try:
            connection.request("POST", path, data, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, str]:
        """From the port without TLS."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ops_port, timeout=30)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def admit(self, pod: Json, **request: Any) -> Admission:
        status, answer = self.post(body(review(pod, **request)))
        assert status == 200, answer
        return admission(answer, pod)

    def count(self, result: str, reason: str) -> float:
        """Of slotcar_injector_admissions_total."""
        _, text = self.get("/metrics")
        wanted = f'slotcar_injector_admissions_total{{reason="{reason}",result="{result}"}} '
        return sum(float(line.removeprefix(wanted)) for line in text.splitlines() if line.startswith(wanted))


class _Pinned(http.client.HTTPSConnection):
    """To 127.0.0.1, by the name that an API server uses."""

    def __init__(self, port: int, trust: ssl.SSLContext, timeout: float) -> None:
        super().__init__("127.0.0.1", port, timeout=timeout, context=trust)
        self._trust = trust

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._trust.wrap_socket(self.sock, server_hostname=HOST)


def admission(answer: bytes, pod: Json) -> Admission:
    """Reads the response as strictly as an API server, and applies its patch."""
    found = json.loads(answer)
    assert (found["apiVersion"], found["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    response = found["response"]
    assert response["uid"] == UID
    known = {"uid", "allowed", "status", "patch", "patchType", "warnings", "auditAnnotations"}
    assert set(response) <= known
    operations = ()
    if "patch" in response:
        assert response["patchType"] == "JSONPatch"
        operations = tuple(json.loads(base64.b64decode(response["patch"], validate=True)))
    status = response.get("status", {})
    return Admission(
        response["allowed"],
        jsonpatch.apply_patch(pod, list(operations)),
        operations,
        tuple(response.get("warnings", ())),
        status.get("message", ""),
        status.get("code"),
    )


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def write_pair(folder: Path, authority: trustme.CA, names: Sequence[str] = (HOST,)) -> None:
    """A fresh pair of the authority's, as a Secret."""
    pair = authority.issue_cert(*names)
    chain = b"".join(blob.bytes() for blob in pair.cert_chain_pems)
    write_files(folder, {"tls.crt": chain, "tls.key": pair.private_key_pem.bytes()})


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """As a kubelet writes a Secret: all files in a new folder, and one link that changes."""
    new = folder / f"pair-{len(list(folder.glob('pair-*')))}"
    new.mkdir()
    for name, content in files.items():
        (new / name).write_bytes(content)
    link = folder / "..data.new"
    link.symlink_to(new)
    link.replace(folder / "..data")
    for name in files:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Webhook]:
    """A webhook that serves, with an authority of its own; ended at the end."""
    webhook = Webhook(folder, trustme.CA())
    write_pair(folder, webhook.authority)
    webhook.start(*options)
    try:
        yield webhook
    finally:
        webhook.end()
