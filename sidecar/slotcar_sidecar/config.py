"""What a server is told at its start: one frozen object, validated at once, from flags or SLOTCAR_* variables.

Each field of Config is a flag (`max_rank` is `--max-rank`) and a variable (`SLOTCAR_MAX_RANK`); its metadata has the
help text that the command line and the documentation show.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slotcar.shm.handshake import SUFFIX
from slotcar.shm.region import MAX_ARENA_BYTES

from slotcar_sidecar.core.model import DTYPES
from slotcar_sidecar.core.policy import Eviction

ENVIRONMENT_PREFIX = "SLOTCAR_"
_OF_CLIENTS = {"SLOTCAR_TARGET", "SLOTCAR_TLS_CA", "SLOTCAR_TOKEN_FILE"}
PLANES = ("stream", "ring", "direct")
MAX_SOCKET_PATH_BYTES = 107
_MAX_MESSAGE_BYTES = 511 << 20
_MAX_THREADS = 1024
# Not that of another metric of ours.
_LORA_INFO = re.compile(r"slotcar_lora_requests_info|(?!slotcar_)[a-zA-Z_:][a-zA-Z0-9_:]*")
_MODE = re.compile(r"0?6[0-7][0-7]")
_SIZE = re.compile(r"(\d+)\s*(|B|KiB|MiB|GiB|TiB)", re.IGNORECASE)
_NAMED_UNITS = (("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40))
_UNITS = {"": 1} | {name.lower(): unit for name, unit in _NAMED_UNITS}


class ConfigError(Exception):
    """A setting that cannot be used; the message names it, what it is and what is wanted."""

    def __init__(self, setting: str, found: object, wanted: str) -> None:
        super().__init__(f"--{setting.replace('_', '-')} is {found}: wanted {wanted}")


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A unix socket."""

    path: Path

    def __str__(self) -> str:
        return f"unix://{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP port; port 0 asks for any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{self.authority}"

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


Address = UnixAddress | TcpAddress


def parse_address(setting: str, text: str) -> Address:
    """unix:///path or tcp://host:port."""
    wanted = "unix:///path or tcp://host:port"
    try:
        if text.startswith("unix:///"):
            path = text.removeprefix("unix://")
            if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES or not path.isprintable():
                raise ConfigError(setting, text, f"a printable path of at most {MAX_SOCKET_PATH_BYTES} bytes")
            return UnixAddress(Path(path))
        url = urlsplit(text)
        if url.scheme == "tcp" and url.hostname and url.port is not None and not url.path:
            return TcpAddress(url.hostname, url.port)
    except ValueError:
        pass
    raise ConfigError(setting, text, wanted)


def parse_size(setting: str, text: str | int) -> int:
    """A number of bytes: 1048576, 512MiB, 4GiB."""
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise ConfigError(setting, text, "a size such as 512MiB or 4GiB")
    return int(match[1]) * _UNITS[match[2].lower()]


def size_text(count: int) -> str:
    """The shortest text that `parse_size` reads as `count`: 4294967296 → "4GiB"."""
    name, unit = next((name, unit) for name, unit in reversed(_NAMED_UNITS) if count % unit == 0)
    return f"{count // unit}{name}"


def _setting(default: Any, text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": text, **metadata})


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of `slotcar serve`."""

    listen: tuple[str, ...] = _setting(
        ("unix:///run/slotcar/slotcar.sock",), "Where to serve gRPC: unix:///path or tcp://host:port. Repeatable."
    )
    planes: tuple[str, ...] = _setting(
        PLANES, "How tensors may travel, with commas between; stream always may.", choices=PLANES
    )
    insecure: bool = _setting(False, "Allow TCP beyond loopback without TLS.")
    tls_cert: Path | None = _setting(
        None, "PEM file of the certificate, with its chain, that TCP addresses show. Followed while it changes."
    )
    tls_key: Path | None = _setting(None, "PEM file of the certificate's private key.")
    tls_client_ca: Path | None = _setting(
        None, "PEM file of the authorities, one of which must have signed what a client shows."
    )
    policy: Path | None = _setting(
        None, "YAML file that says who may do what. Followed while it changes; without it whoever connects may do all."
    )
    socket_mode: str = _setting("0660", "Mode of the unix sockets, in octal.")
    socket_group: str | None = _setting(None, "Group of the unix sockets, as a name or a number; that of the process.")
    metrics: str | None = _setting(
        None,
        "Where to serve /metrics over HTTP, and the status page as --pages says, as host:port. Not served without it.",
    )
    pages: str = _setting(
        "loopback",
        "Whether the status page and /debug/state.json are at that address too, for whoever reaches it: where it is of "
        "loopback alone, always, or never.",
        choices=("loopback", "always", "never"),
    )
    health: str | None = _setting(
        None, "Where to serve health alone, as host:port, in plaintext, for a kubelet's probes. Not served without it."
    )
    metrics_adapters: int = _setting(
        256, "Most resident adapters that /metrics names, the latest used first; 0 names none.", least=0
    )
    metrics_lora_info: str = _setting(
        "slotcar_lora_requests_info",
        "Name of the gauge that tells routers of resident adapters; vllm:lora_requests_info is what most look for.",
    )
    base_model: Path | None = _setting(
        None,
        "Hugging Face folder of the base model: its sites, and weights for DoRA, trained biases and copies. Without it "
        "the first session's spec counts.",
    )
    model_spec: Path | None = _setting(
        None, "JSON file with the base model's sites, as `slotcar spec` writes it, in place of those of --base-model."
    )
    slots: int = _setting(8, "Number of adapter slots.", most=4096)
    max_rank: int = _setting(64, "Largest LoRA rank at any site.", most=65536)
    dtype: str = _setting("float32", "Element type of the slots.", choices=DTYPES)
    device: str = _setting(
        "cpu",
        "Where the slots are; auto is a GPU where torch and Triton have one, else the CPU.",
        choices=("auto", "cpu", "cuda"),
    )
    root: tuple[Path, ...] = _setting((), "Folder that adapters may be loaded from. Repeatable; none allows no load.")
    source: tuple[str, ...] = _setting(
        (),
        "Remote place that adapters may be loaded from: hf://org/repo, hf://org/*, s3://bucket/prefix, or a prefix of "
        "another scheme of fsspec. Repeatable; none allows no network.",
    )
    source_options: Path | None = _setting(
        None, "JSON file of endpoints, regions and references to credentials, by prefix."
    )
    offline: bool = _setting(False, "Use no network: hf:// from its cache only, no other remote source.")
    hf_cache: Path = _setting(Path("/var/cache/slotcar/hub"), "Folder of the cache of hf://, as huggingface_hub's.")
    fetch_seconds: float = _setting(600.0, "Longest time to fetch one remote adapter, with all retries.")
    fetch_rate: int = _setting(1 << 30, "Most bytes per second that one remote adapter is fetched with.", size=True)
    eviction: str = _setting(
        "lru",
        "Which adapter gives its slot to another: the one used the longest ago, the one asked for the least often, or "
        "the one whose frequency times bytes times seconds of a reload is the least.",
        choices=tuple(kind.value for kind in Eviction),
    )
    host_bytes: int = _setting(4 << 30, "Size of the host tier: verified adapters in memory.", size=True)
    disk: Path | None = _setting(
        None, "Folder of the disk tier, which several servers may share. Made if its parent is there; none without it."
    )
    disk_bytes: int = _setting(64 << 30, "Size of the disk tier, with what other servers have there.", size=True)
    journal: Path | None = _setting(
        None, "File that brings names and residents back after a restart; of this server alone. None without it."
    )
    adapters: Path | None = _setting(
        None, "YAML file of adapters that must be present, kept or absent. Followed while it changes."
    )
    adapters_poll_seconds: float = _setting(
        10.0, "How often to look at the file of --adapters, and at what it declares, without being told of a change."
    )
    device_bytes: int = _setting(64 << 30, "The most memory that all slots together may take.", size=True)
    max_adapter_bytes: int = _setting(2 << 30, "Largest adapter file.", size=True)
    max_message_bytes: int = _setting(64 << 20, "Largest request.", size=True)
    max_response_bytes: int = _setting(256 << 20, "Largest sum of the outputs of one Forward.", size=True)
    ring_bytes: int = _setting(
        256 << 20, "Most shared memory for the tensors of one ring.", size=True, most=MAX_ARENA_BYTES
    )
    max_rings: int = _setting(256, "Most connections to shared memory, one for each rank of a session.")
    max_rows: int = _setting(65536, "Most rows of one Forward.")
    max_entries: int = _setting(4096, "Most entries of one mapping.")
    max_adapters: int = _setting(100_000, "Most names of adapters.")
    max_sessions: int = _setting(256, "Most sessions at a time.")
    max_mappings: int = _setting(64, "Most mappings of one session.")
    max_holds: int = _setting(1024, "Most holds of one session.")
    max_streams: int = _setting(1024, "Most calls at a time over one connection; more of them wait.", most=1 << 20)
    max_watchers: int = _setting(256, "Most streams of events at a time.")
    mapping_idle_seconds: float = _setting(30.0, "An unused mapping loses its pins after this time, not its validity.")
    compute_threads: int = _setting(1, "Forwards that run side by side, one thread each.", most=_MAX_THREADS)
    load_threads: int = _setting(2, "Loads that read or write side by side, one thread each.", most=_MAX_THREADS)
    heartbeat_seconds: float = _setting(10.0, "A session's stream carries a sign of life at least this often.")
    shutdown_seconds: float = _setting(20.0, "After SIGTERM, serve at most this long before closing.")
    log_format: str = _setting("human", "How log lines look.", choices=("human", "json"))
    log_level: str = _setting(
        "info",
        "Least level of the lines of the log; debug has each call, and what loads do.",
        choices=("debug", "info", "warning", "error"),
    )
    log_level_file: Path | None = _setting(
        None, "File with the level as its one word, in place of --log-level. Followed while it changes."
    )
    audit_log: Path | None = _setting(
        None, "File that the audit stream is appended to, as JSON lines. Part of the log without it."
    )
    otlp_endpoint: str | None = _setting(
        None, "Collector of traces by OTLP over gRPC, as http://host:4317 or https://host:4317. None without it."
    )
    trace_sample: float = _setting(
        0.01, "Share of the Forwards that are traced though their caller is not.", least=0, most=1
    )

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            _check_choices(item, value)
            if item.type in ("int", "float") and not (value > 0 or value == item.metadata.get("least")):
                raise ConfigError(item.name, value, "more than 0")
            most = item.metadata.get("most")
            if most is not None and value > most:
                raise ConfigError(item.name, value, f"at most {most}")
        if self.max_message_bytes > _MAX_MESSAGE_BYTES:
            raise ConfigError("max_message_bytes", self.max_message_bytes, f"at most {_MAX_MESSAGE_BYTES}")
        if "stream" not in self.planes:
            raise ConfigError("planes", ",".join(self.planes) or "empty", "stream among them")
        self._check_addresses()
        self._check_security()
        for root in self.root:
            if not root.is_dir():
                raise ConfigError("root", root, "a folder that exists")

    def _check_addresses(self) -> None:
        if not self.addresses:
            raise ConfigError("listen", "empty", "at least one address")
        for address in self.addresses:
            if isinstance(address, TcpAddress) and not (address.is_loopback or self.insecure or self.tls_cert):
                raise ConfigError("listen", address, "a loopback address, --tls-cert, or --insecure")
            if isinstance(address, UnixAddress) and self.shakes_hands:
                most = MAX_SOCKET_PATH_BYTES - len(SUFFIX)
                if len(os.fsencode(address.path)) > most:
                    wanted = f"a path of at most {most} bytes, for a second socket beside it"
                    raise ConfigError("listen", address, wanted)
        for name in ("metrics", "health"):
            self._tcp(name)
        if self.otlp_endpoint is not None and not _is_http_address(self.otlp_endpoint):
            raise ConfigError("otlp_endpoint", self.otlp_endpoint, "http://host:port or https://host:port")
        if not _LORA_INFO.fullmatch(self.metrics_lora_info):
            raise ConfigError("metrics_lora_info", self.metrics_lora_info, "a name such as vllm:lora_requests_info")

    def _check_security(self) -> None:
        names = ("tls_cert", "tls_key", "tls_client_ca")
        given = [name for name in names if getattr(self, name) is not None]
        for name in names:
            if given and name not in given:
                raise ConfigError(name, "not set", "a file, as --tls-cert, --tls-key and --tls-client-ca go together")
        if not _MODE.fullmatch(self.socket_mode):
            raise ConfigError("socket_mode", self.socket_mode, "octal digits such as 0660, the owner's 6")

    @property
    def shakes_hands(self) -> bool:
        """Beside each unix socket there is one for hand-shakes: for shared memory, and for tokens."""
        return len(self.planes) > 1 or self.policy is not None

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(parse_address("listen", text) for text in self.listen)

    @property
    def metrics_address(self) -> TcpAddress | None:
        return self._tcp("metrics")

    @property
    def health_address(self) -> TcpAddress | None:
        return self._tcp("health")

    def _tcp(self, setting: str) -> TcpAddress | None:
        """The address of a setting that is host:port."""
        text = getattr(self, setting)
        if text is None:
            return None
        address = parse_address(setting, f"tcp://{text}")
        assert isinstance(address, TcpAddress)
        return address

    def to_dict(self) -> dict[str, object]:
        """Plain values, as the server prints them at its start."""
        plain: dict[str, object] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, tuple):
                value = [str(part) for part in value]
            plain[item.name] = str(value) if isinstance(value, Path) else value
        return plain


def environment_value(name: str) -> str | None:
    """A variable that a file of --source-options refers to."""
    return os.environ.get(name)


def _is_http_address(text: str) -> bool:
    """http://host:port, or with https, and nothing more."""
    try:
        url = urlsplit(text)
        rest = url.path.strip("/") or url.query or url.fragment or "@" in url.netloc
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port is not None and not rest
    except ValueError:
        return False


def _check_choices(item: dataclasses.Field[Any], value: object) -> None:
    """Raises ConfigError for a value, or one of several, that is none of those that the setting can have."""
    choices = item.metadata.get("choices")
    for each in value if isinstance(value, tuple) else (value,):
        if choices and each not in choices:
            raise ConfigError(item.name, each, " or ".join(choices))


def unknown_variables(names: list[str]) -> list[str]:
    """The SLOTCAR_* variables among `names` that mean nothing, apart from those that Kubernetes makes for a Service."""
    known = {ENVIRONMENT_PREFIX + item.name.upper() for item in dataclasses.fields(Config)} | _OF_CLIENTS
    made_by_kubernetes = re.compile(r"SLOTCAR_(SERVICE_.*|PORT(_.*)?)")
    return sorted(
        name
        for name in names
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known and not made_by_kubernetes.fullmatch(name)
    )
