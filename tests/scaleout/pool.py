"""Three real sidecars with certificates and one declared set of adapters, and the real Envoy before them."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import trustme
import yaml
from prometheus_client.parser import text_string_to_metric_families
from slotcar_client import Credentials

from tests.faults.oracle import Library, Sites, spec_file
from tests.ports import free_port
from tests.scaleout.configuration import LOOPBACK, OVERLAY, Ports, cluster, members, shipped
from tests.scaleout.proxy import STOP_SECONDS, Proxy, proxy
from tests.server import SidecarProcess
from tests.waiting import eventually

NAME, ENVOY = "slotcar.slotcar-pool.svc", "envoy.slotcar-pool.svc"
SITES: Sites = {"layer.q": (48, 64), "layer.down": (32, 48)}
RANK = 8


@dataclass(frozen=True, slots=True)
class Counts:
    """What a member has counted since it started."""

    hits: float
    misses: float
    forwards: float

    def __sub__(self, before: Counts) -> Counts:
        return Counts(self.hits - before.hits, self.misses - before.misses, self.forwards - before.forwards)

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.hits + other.hits, self.misses + other.misses, self.forwards + other.forwards)


NONE = Counts(0, 0, 0)


@dataclass
class Member:
    """One sidecar of the pool, at its port over TLS; the same ports in each of its lives."""

    sidecar: SidecarProcess
    port: int
    metrics_port: int

    def kill(self) -> None:
        self.sidecar.kill()

    def start_again(self) -> None:
        self.sidecar = self.sidecar.again().start()

    def counts(self) -> Counts:
        url = f"http://{LOOPBACK}:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as response:
            families = text_string_to_metric_families(response.read().decode())
        samples = [sample for family in families for sample in family.samples]

        def total(name: str, **labels: str) -> float:
            return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())

        looked = "slotcar_tier_lookups_total"
        return Counts(
            total(looked, tier="device", result="hit"),
            total(looked, tier="device", result="miss"),
            total("slotcar_forwards_total", reason="OK"),
        )


@dataclass
class Pool:
    """What engines see: Envoy's ports. What tests see: each member, and Envoy's view of it."""

    folder: Path
    library: Library
    digests: dict[str, str]
    members: list[Member]
    proxy: Proxy

    @property
    def ports(self) -> Ports:
        return self.proxy.ports

    @property
    def credentials(self) -> Credentials:
        """An engine's own, from its file at each call."""
        tls = self.folder / "engine"
        return Credentials(tls / "ca.crt", tls / "tls.crt", tls / "tls.key")

    def counts(self) -> list[Counts]:
        return [each.counts() for each in self.members]


@contextmanager
def pool(folder: Path, adapters: int, slots: int) -> Iterator[Pool]:
    """A pool that serves `adapters` adapters, `slots` of them at a time in each of its members."""
    library, digests = _adapters(folder / "adapters", adapters)
    authority = trustme.CA()
    # What comes by `spread` has its engine's certificate, which must be good enough for members too.
    for name, leaf in (("tls", ENVOY), ("member", NAME), ("engine", ENVOY)):
        certificate(folder / name, authority, leaf)
    declared = folder / "adapters.yaml"
    entries = [{"name": name, "source": str(library.root / name)} for name in digests]
    set_of = {"apiVersion": "slotcar.dev/v1", "default": {"state": "present", "tier": "host"}, "adapters": entries}
    declared.write_text(yaml.safe_dump(set_of), encoding="utf-8")
    found = [_member(folder, each, library, slots) for each in range(len(members(cluster(shipped()))))]
    with ExitStack() as stack:
        stack.callback(_end, found)
        for each in found:
            each.sidecar.start()
        for each in found:
            eventually(lambda each=each: _knows(each, len(digests)), "the declared adapters")
        running = stack.enter_context(proxy(folder, [each.port for each in found]))
        running.wait_until_healthy(len(found))
        yield Pool(folder, library, digests, found, running)


def _adapters(root: Path, count: int) -> tuple[Library, dict[str, str]]:
    root.mkdir()
    library = Library(root, SITES)
    return library, {f"a{seed:02}": library.write(f"a{seed:02}", seed, tuple(SITES), RANK) for seed in range(count)}


def _member(folder: Path, number: int, library: Library, slots: int) -> Member:
    own = folder / f"slotcar-{number}"
    own.mkdir()
    port, metrics_port, tls = free_port(), free_port(), folder / "member"
    extra = (
        *("--listen", f"tcp://{LOOPBACK}:{port}", "--planes", "stream"),
        *("--tls-cert", str(tls / "tls.crt"), "--tls-key", str(tls / "tls.key")),
        *("--tls-client-ca", str(tls / "ca.crt"), "--metrics", f"{LOOPBACK}:{metrics_port}"),
        *("--adapters", str(folder / "adapters.yaml"), "--journal", str(own / "journal")),
        *("--policy", str(OVERLAY / "policy.yaml")),
        *("--model-spec", str(spec_file(own, SITES)), "--heartbeat-seconds", "5"),
        # So that what an engine leaves behind when a call of its failed is free again while it is still running.
        *("--mapping-idle-seconds", "2"),
    )
    return Member(SidecarProcess(own, library.root, slots, RANK, extra), port, metrics_port)


def certificate(folder: Path, authority: trustme.CA, name: str) -> None:
    """As a Secret has them: ca.crt, tls.crt and tls.key."""
    folder.mkdir(exist_ok=True)
    leaf = authority.issue_cert(name, LOOPBACK)
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    leaf.private_key_pem.write_to_path(str(folder / "tls.key"))
    (folder / "tls.crt").write_bytes(b"".join(part.bytes() for part in leaf.cert_chain_pems))


def _knows(member: Member, adapters: int) -> bool:
    url = f"http://{LOOPBACK}:{member.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=30) as response:
        return f"slotcar_adapters {float(adapters)}" in response.read().decode()


def _end(members: list[Member]) -> None:
    running = [each.sidecar.process for each in members if each.sidecar.process is not None]
    for process in running:
        process.terminate()
    for process in running:
        process.wait(STOP_SECONDS)
