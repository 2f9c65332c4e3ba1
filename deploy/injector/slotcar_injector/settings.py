"""What the injector is told at its start: two frozen objects, validated at once."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from slotcar_injector.annotations import check_default
from slotcar_injector.denial import Denied

SYSTEM_NAMESPACES = ("kube-system", "kube-node-lease", "kube-public")


class SettingError(Exception):
    """A setting that cannot be used; the message names it, what it is and what is wanted."""

    def __init__(self, setting: str, found: object, wanted: str) -> None:
        super().__init__(f"--{setting} is {found}, wanted {wanted}")


def own_version() -> str:
    """The version of the installed distribution; "unknown" from a checkout that is not installed."""
    try:
        return metadata.version("slotcar")
    except metadata.PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True, slots=True)
class Settings:
    """What every pod gets, and which pods get nothing."""

    defaults: Mapping[str, str] = field(default_factory=dict)
    kube_version: tuple[int, int] | None = None
    namespaces_left_out: frozenset[str] = frozenset(SYSTEM_NAMESPACES)
    user: int = 65532
    group: int = 65532
    bind: str = "0.0.0.0"  # noqa: S104 - the kubelet comes to the pod's address
    version: str = field(default_factory=own_version)

    def __post_init__(self) -> None:
        for name, text in self.defaults.items():
            try:
                check_default(name, text)
            except Denied as error:
                raise SettingError("default", f"{name}={text}", f"a value that fits: {error}") from error
        for setting, number in (("user", self.user), ("group", self.group)):
            if not 1 <= number <= 2**31 - 1:
                raise SettingError(setting, number, "a number from 1 to 2147483647")
        try:
            ipaddress.ip_address(self.bind)
        except ValueError:
            raise SettingError("bind", self.bind, "an IP address, such as 0.0.0.0 or ::") from None


@dataclass(frozen=True, slots=True)
class Serving:
    """Where and within which bounds the webhook serves. The API server's own time-out is 5 s as we install it."""

    host: str
    port: int
    ops_port: int
    certificate: Path
    key: Path
    poll_seconds: float = 10.0
    deadline_seconds: float = 4.0
    # An API server takes no request above 3 MiB, and a review has two objects and more.
    body_bytes: int = 8 << 20
    most_requests: int = 64
    # Until then Endpoints still name a pod that ends.
    drain_seconds: float = 5.0
    # Longer than an API server keeps an idle connection, so that none closes under a request that begins.
    idle_seconds: float = 120.0


def kube_version_of(text: str) -> tuple[int, int] | None:
    """1.31, v1.31.4, 1.31+ → (1, 31); nothing is not known."""
    if not text:
        return None
    match = re.match(r"v?(\d{1,3})\.(\d{1,3})(?!\d)", text, re.ASCII)
    if match is None:
        raise SettingError("kube-version", text, "a version such as 1.31")
    return int(match[1]), int(match[2])
