"""The client's only reading of its surroundings: where the sidecar is, what to show it, and this client's version."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from urllib.parse import quote

from slotcar_client.errors import RequestInvalid

TARGET_VARIABLE = "SLOTCAR_TARGET"
# Where `slotcar serve` listens when nobody says otherwise.
DEFAULT_TARGET = "unix:///run/slotcar/slotcar.sock"
CREDENTIALS = ("tls_ca", "tls_cert", "tls_key", "token_file")
_WANTED = "unix:///path, tcp://host:port or host:port"


@cache
def client_version() -> str:
    """The version of the installed slotcar; empty, which is never compared, when it is not installed."""
    try:
        return metadata.version("slotcar")
    except metadata.PackageNotFoundError:
        return ""


def chosen_target(environ: Mapping[str, str] = os.environ) -> str:
    """The target that the environment names, "" when it names none."""
    return environ.get(TARGET_VARIABLE, "")


def default_files(environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """The files of credentials that the environment names, by the fields of `Credentials`."""
    return {name: environ.get(f"SLOTCAR_{name.upper()}") or None for name in CREDENTIALS}


def default_target(environ: Mapping[str, str] = os.environ) -> str:
    """The target that the environment names, else the one that a sidecar has by default."""
    return chosen_target(environ) or DEFAULT_TARGET


def grpc_target(target: str) -> str:
    """The target as gRPC writes it. Raises RequestInvalid unless it is one of the three forms."""
    path = unix_path(target)
    if path:
        return f"unix:{quote(path)}"
    address = target.removeprefix("tcp://")
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal()) or "/" in address:
        raise RequestInvalid(f"target is {target!r}, wanted {_WANTED}", field="target", found=target, wanted=_WANTED)
    return f"dns:///{address}"


def unix_path(target: str) -> str | None:
    """The path of a target that is a unix socket, else None."""
    return target.removeprefix("unix:").removeprefix("//") if target.startswith("unix:") else None


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Those of the environment that are slotcar's, for integrations that have settings of their own."""
    return {name: text for name, text in environ.items() if name.startswith("SLOTCAR_")}
