"""The configuration of Envoy that deploy/kustomize/overlays/pool ships, and what a run here puts in its place.

Invariant: what routes, balances, checks and retries is the file's own; `here` changes addresses and paths, and adds
listeners to compare with.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]
OVERLAY = Path(__file__).resolve().parents[2] / "deploy" / "kustomize" / "overlays" / "pool"
FILES = ("envoy.yaml", "identity.yaml", "authority.yaml")
IN_THE_POD = "/etc/envoy"
LOOPBACK = "127.0.0.1"
POOL = "slotcars"


@dataclass(frozen=True, slots=True)
class Ports:
    """Of this machine. `engines` and `ops` are the overlay's; `unretried` is `engines` without Envoy's retries, and
    `spread` gives each connection whole to the next member in turn, as a Service does."""

    engines: int
    ops: int
    admin: int
    unretried: int
    spread: int


def shipped() -> Json:
    """The configuration as it is in the overlay."""
    return _read(OVERLAY / "envoy.yaml")


def listener(config: Json, name: str) -> Json:
    return _named(config["static_resources"]["listeners"], name)


def cluster(config: Json, name: str = POOL) -> Json:
    return _named(config["static_resources"]["clusters"], name)


def connections(listener: Json) -> Json:
    """The http_connection_manager of a listener."""
    (chain,) = listener["filter_chains"]
    (manager,) = chain["filters"]
    found: Json = manager["typed_config"]
    return found


def routes(listener: Json) -> list[Json]:
    (host,) = connections(listener)["route_config"]["virtual_hosts"]
    found: list[Json] = host["routes"]
    return found


def members(cluster: Json) -> list[Json]:
    (locality,) = cluster["load_assignment"]["endpoints"]
    found: list[Json] = locality["lb_endpoints"]
    return found


def write(folder: Path, ports: Ports, member_ports: Sequence[int]) -> Path:
    """The overlay's files in folder/config, for this machine; certificates are in folder/tls. Returns Envoy's."""
    (folder / "config").mkdir()
    for name in FILES:
        text = (OVERLAY / name).read_text(encoding="utf-8").replace(IN_THE_POD, str(folder))
        (folder / "config" / name).write_text(text, encoding="utf-8")
    path = folder / "config" / "envoy.yaml"
    config = here(_read(path), ports, member_ports)
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def here(config: Json, ports: Ports, member_ports: Sequence[int]) -> Json:
    """The configuration with addresses of this machine, and two listeners more."""
    config = copy.deepcopy(config)
    _place(config["admin"]["address"], ports.admin)
    (admin,) = members(cluster(config, "admin"))
    _place(admin["endpoint"]["address"], ports.admin)
    for each, port in zip(members(cluster(config)), member_ports, strict=True):
        _place(each["endpoint"]["address"], port)
    engines = listener(config, "engines")
    _place(engines["address"], ports.engines)
    _place(listener(config, "ops")["address"], ports.ops)
    static = config["static_resources"]
    static["listeners"] += [_unretried(engines, ports.unretried), _spread(ports.spread)]
    static["clusters"].append(_in_turn(cluster(config)))
    return config


def _unretried(engines: Json, port: int) -> Json:
    other = copy.deepcopy(engines)
    other["name"] = "unretried"
    _place(other["address"], port)
    del routes(other)[0]["route"]["retry_policy"]
    return other


def _spread(port: int) -> Json:
    proxy = "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy"
    tcp = {"@type": proxy, "stat_prefix": "spread", "cluster": "in-turn"}
    filters = [{"name": "envoy.filters.network.tcp_proxy", "typed_config": tcp}]
    address: Json = {"socket_address": {"address": LOOPBACK, "port_value": port}}
    return {"name": "spread", "address": address, "filter_chains": [{"filters": filters}]}


def _in_turn(pool: Json) -> Json:
    """The same members without TLS of Envoy's own, as connections come to them with their engines'."""
    return {
        "name": "in-turn",
        "type": "STATIC",
        "connect_timeout": pool["connect_timeout"],
        "lb_policy": "ROUND_ROBIN",
        "load_assignment": copy.deepcopy(pool["load_assignment"]) | {"cluster_name": "in-turn"},
    }


def _place(address: Json, port: int) -> None:
    address["socket_address"] |= {"address": LOOPBACK, "port_value": port}


def _named(of: list[Json], name: str) -> Json:
    (found,) = [each for each in of if each["name"] == name]
    return found


def _read(path: Path) -> Json:
    found: Json = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found
