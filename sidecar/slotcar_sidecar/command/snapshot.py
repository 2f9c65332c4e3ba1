"""`slotcar snapshot`: asks a server for all that helps to find a fault, and puts what came in time into a bundle."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import platform
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import distributions, version
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
from slotcar_client import SlotcarError, aio
from slotcar_client.aio import AsyncClient

from slotcar_sidecar.command import bundle, console
from slotcar_sidecar.command.bundle import Missing, Part
from slotcar_sidecar.command.calls import Seconds, server_options, usage
from slotcar_sidecar.command.doctor import examine
from slotcar_sidecar.command.shown import credentials
from slotcar_sidecar.core.events import MAX_REPLAY

_MAX_METRICS_BYTES = 16 << 20
_MAX_FACT_BYTES = 64 << 10
_PROC = (
    "version",
    "loadavg",
    "meminfo",
    "pressure/cpu",
    "pressure/io",
    "pressure/memory",
    "self/cgroup",
    "self/limits",
)
_CGROUP = (
    *("memory.max", "memory.high", "memory.current", "memory.events", "memory.stat", "memory.pressure"),
    *("cpu.max", "cpu.stat", "cpu.pressure", "pids.max", "pids.current", "cpuset.cpus.effective"),
)
_ABOUT_MACHINE = "machine.json, versions.json and doctor.json are of where this command ran"

Ask = Callable[[AsyncClient], Awaitable[Part]]


@click.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("slotcar-snapshot.tar.gz"),
    show_default=True,
    help="The file to write; one that is there is replaced.",
)
@click.option(
    "--timeout",
    "timeout_seconds",
    type=Seconds(min=0.1, max=600),
    default=10.0,
    show_default=True,
    help="How long to wait for each part, in seconds.",
)
@server_options("Print the manifest as one JSON value.")
def snapshot(target: str | None, as_json: bool, output: Path, timeout_seconds: float) -> None:
    """Write a support bundle: what the server, its adapters, sessions and settings are, without weights or secrets.

    What cannot be had, as the server is away or does not answer in time, is named in the bundle's manifest.
    """
    out = console.Output(as_json)
    with out.working("asking the server"):
        about, parts = asyncio.run(_ask(target, timeout_seconds))
        own = {"doctor.json": lambda: _doctor(target), "versions.json": _versions, "machine.json": _machine}
        parts |= {name: _own_part(make) for name, make in own.items()}
    try:
        manifest = bundle.write(output, parts, about)
    except OSError as error:
        raise click.ClickException(f"{output} cannot be written: {error.strerror}") from error
    if as_json:
        out.json({"file": str(output), **manifest})
        return
    out.line(f"{output}: {len(manifest['parts'])} parts")
    for name, why in manifest["missing"].items():
        out.line(f"  without {name}: {why}")


async def _ask(target: str | None, seconds: float) -> tuple[dict[str, Any], dict[str, Part]]:
    """All parts that a server has, at the same time, so that one which does not answer holds up no other."""
    with usage():
        client = aio.connect(target, timeout_seconds=seconds, credentials=credentials())
    about = {"slotcar": version("slotcar"), "target": client.target, "note": _ABOUT_MACHINE}
    async with client:
        parts = await asyncio.gather(*(_part(client, ask, seconds) for ask in _ASKED.values()))
    return about, dict(zip(_ASKED, parts, strict=True))


async def _part(client: AsyncClient, ask: Ask, seconds: float) -> Part:
    try:
        async with asyncio.timeout(seconds):
            return await ask(client)
    except SlotcarError as error:
        return Missing(f"{error.reason}: {error.message}")
    except TimeoutError:
        return Missing(f"no answer within {seconds:g} s")
    except OSError as error:
        return Missing(error.strerror or str(error))
    except Exception as error:  # a bundle without a part is of more use than none
        return _failed(error)


def _own_part(make: Callable[[], Part]) -> Part:
    try:
        return make()
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> Missing:
    return Missing(f"{type(error).__name__}: {error}")


# What a server is asked for


async def _settings(client: AsyncClient) -> Part:
    return bundle.json_part(dataclasses.asdict(await client.settings()))


async def _capacity(client: AsyncClient) -> Part:
    return bundle.json_part(dataclasses.asdict(await client.capacity()))


async def _layout(client: AsyncClient) -> Part:
    return bundle.json_part(dataclasses.asdict((await client.snapshot()).layout))


async def _adapters(client: AsyncClient) -> Part:
    return bundle.json_part([dataclasses.asdict(adapter) for adapter in await client.list()])


async def _sessions(client: AsyncClient) -> Part:
    return bundle.json_part([dataclasses.asdict(session) for session in await client.sessions()])


async def _desired(client: AsyncClient) -> Part:
    return bundle.json_part(dataclasses.asdict(await client.desired()))


async def _events(client: AsyncClient) -> Part:
    events: list[dict[str, Any]] = []
    async with client.events(MAX_REPLAY) as stream:
        found = 0
        while found < stream.replayed:
            event = await anext(stream)
            found += 1 + event.missed
            events.append(dataclasses.asdict(event))
    return bundle.json_part(events)


async def _metrics(client: AsyncClient) -> Part:
    url = (await client.settings()).metrics_url
    if not url:
        return Missing("the server serves no metrics: --metrics")
    return await _get(*_metrics_at(client.target, url))


_ASKED: Mapping[str, Ask] = {
    "server.json": _settings,
    "capacity.json": _capacity,
    "layout.json": _layout,
    "adapters.json": _adapters,
    "sessions.json": _sessions,
    "events.json": _events,
    "desired.json": _desired,
    "metrics.txt": _metrics,
}


def _metrics_at(target: str, url: str) -> tuple[str, int]:
    """Where a server of this target has its metrics, which it serves at `url` as it sees itself."""
    found = urlsplit(url)
    host, port = found.hostname or "", found.port or 80
    remote = urlsplit(target).hostname if not target.startswith("unix:") else None
    if remote is not None:
        return remote, port
    return ("127.0.0.1" if _is_wildcard(host) else host), port


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


async def _get(host: str, port: int) -> Part:
    """What is at /metrics. Raises OSError."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET /metrics HTTP/1.0\r\nHost: {host}\r\nAccept: text/plain\r\n\r\n".encode())
        data = bytearray()
        while len(data) <= _MAX_METRICS_BYTES and (some := await reader.read(1 << 16)):
            data += some
    finally:
        writer.close()
    head, _, body = data.decode("utf-8", "replace").partition("\r\n\r\n")
    status = head.partition("\r\n")[0]
    if " 200 " not in f"{status} ":
        return Missing(f"{host}:{port} answers {status[:80]!r}")
    return bundle.text_part(body)


# What this machine has


def _doctor(target: str | None) -> Part:
    return bundle.json_part([dataclasses.asdict(check) for check in examine(target)])


def _versions() -> Part:
    found = {each.metadata["Name"]: each.version for each in distributions()}
    return bundle.json_part({"python": platform.python_version(), "packages": dict(sorted(found.items()))})


def _machine() -> Part:
    """The kernel, and what the control group of this command may take."""
    proc = Path("/proc")
    own = next((line[3:] for line in _text(proc / "self/cgroup").splitlines() if line.startswith("0::")), "/")
    group = Path("/sys/fs/cgroup") / own.lstrip("/")
    return bundle.json_part(
        {
            "kernel": " ".join(platform.uname()[0:5:2]),
            "release": platform.release(),
            "cpus": len(os.sched_getaffinity(0)),
            "proc": {name: _text(proc / name) for name in _PROC},
            "cgroup": {name: text for name in _CGROUP if (text := _text(group / name))},
        }
    )


def _text(path: Path) -> str:
    """The beginning of a file, "" where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FACT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
