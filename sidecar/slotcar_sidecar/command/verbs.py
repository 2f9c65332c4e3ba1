"""The verbs of operators: each calls a server and prints what it answers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click
from slotcar_client import Client, SessionNotFound, Unavailable
from slotcar_client.aio import AsyncClient

from slotcar_sidecar.command import console
from slotcar_sidecar.command.calls import absolute, calls_server, follows_server
from slotcar_sidecar.command.completion import adapter_names, folders, session_ids
from slotcar_sidecar.core.events import MAX_REPLAY, EventKind

_TIMEOUT_SECONDS = 60.0
_FOLLOW_REPLAY = 10
_QUIET_SECONDS = 0.2


@click.command()
@click.argument("name", shell_complete=adapter_names)
@click.argument("source", required=False, shell_complete=folders)
@click.option("--upload", is_flag=True, help="SOURCE is a folder of this machine, whose two files are sent.")
@click.option("--tier", type=click.Choice(("disk", "host", "device")), default="device", help="Where it is wanted.")
@click.option("--replace", is_flag=True, help="Move the name from other bytes to these.")
@click.option("--keep", is_flag=True, help="Keep it resident.")
@click.option("--digest", help="Refuse other bytes than these: sha256:…")
@calls_server
def load(client: Client, out: console.Output, name: str, source: str | None, upload: bool, **options: Any) -> None:
    """Make an adapter resident under NAME, from SOURCE: a folder or file:// URI under a root of the server.

    Without SOURCE, an adapter that the server knows comes back from where it was loaded. With --tier host it stops in
    memory, in no slot; with --tier disk in the disk tier.
    """
    if upload and source is None:
        raise click.UsageError("--upload needs a folder to send")
    with out.working(f"{'uploading' if upload else 'loading'} {name}"):
        if upload and source is not None:
            report = client.upload(name, source, **options)
        else:
            report = client.load(name, absolute(source) if source else None, **options)
    out.load_report(report)


@click.command()
@click.argument("name", shell_complete=adapter_names)
@click.option("--force", is_flag=True, help="Free the slot even if it is pinned; its mappings become stale at once.")
@calls_server
def unload(client: Client, out: console.Output, name: str, force: bool) -> None:
    """Take NAME away."""
    out.unload_report(name, client.unload(name, force=force))


@click.command()
@click.argument("name", shell_complete=adapter_names)
@calls_server
def keep(client: Client, out: console.Output, name: str) -> None:
    """Keep NAME resident."""
    out.adapter(client.keep(name))


@click.command()
@click.argument("name", shell_complete=adapter_names)
@calls_server
def release(client: Client, out: console.Output, name: str) -> None:
    """End the keep of NAME."""
    out.adapter(client.release_keep(name))


@click.command("list")
@click.option("--desired", is_flag=True, help="List what the server's file of adapters declares, and how far that is.")
@calls_server
def list_adapters(client: Client, out: console.Output, desired: bool) -> None:
    """List the adapters, and who pins their slots."""
    if desired:
        out.desired(client.desired())
    else:
        out.snapshot(client.snapshot(), client.sessions())


@click.command()
@click.argument("name", shell_complete=adapter_names)
@calls_server
def show(client: Client, out: console.Output, name: str) -> None:
    """Show one adapter with its sites."""
    out.adapter(client.get(name), sites=True)


@click.command()
@click.argument("source", shell_complete=folders)
@calls_server
def estimate(client: Client, out: console.Output, source: str) -> None:
    """Say what a load of SOURCE would take, without loading it."""
    with out.working(f"reading {source}"):
        result = client.estimate(absolute(source))
    out.estimate(result)
    if not result.fits:
        sys.exit(1)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME…", shell_complete=adapter_names)
@click.option(
    "--tier", type=click.Choice(("disk", "host", "device")), default="device", help="How near they are wanted."
)
@calls_server
def prefetch(client: Client, out: console.Output, names: tuple[str, ...], tier: str) -> None:
    """Bring adapters that the server knows nearer, the most wanted first, without taking anything from anybody."""
    with out.working(f"bringing {len(names)} nearer"):
        found = client.prefetch(names, tier=tier)
    out.prefetched(found)
    if any(each.why_not for each in found):
        sys.exit(1)


@click.command()
@calls_server
def capacity(client: Client, out: console.Output) -> None:
    """Say how full the slots and the tiers are."""
    out.capacity(client.capacity())


@click.command()
@calls_server
def sessions(client: Client, out: console.Output) -> None:
    """List the sessions with their mappings and holds, and who pins which slot."""
    out.sessions(client.sessions(), client.snapshot())


@click.command()
@click.argument("session", shell_complete=session_ids)
@calls_server
def end(client: Client, out: console.Output, session: str) -> None:
    """End SESSION and all that it owns: its pins, holds and reserved slots. `slotcar sessions` shows the ids."""
    if not client.end_session(session):
        raise SessionNotFound(f"there is no session {session}: `slotcar sessions` lists them", session=session)
    if out.as_json:
        out.json({"ended": session})
    else:
        out.line(f"{session} ended: what it pinned, held and reserved is released")


@click.command()
@click.option(
    "--replay",
    type=click.IntRange(0, MAX_REPLAY),
    help=f"Begin with up to this many past events.  [default: {MAX_REPLAY}, with --follow {_FOLLOW_REPLAY}]",
)
@click.option("--follow", "-f", is_flag=True, help="Go on with what happens from now on, until Ctrl-C.")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice([kind.value for kind in EventKind]),
    help="Print events of this kind only. Repeatable.",
)
@follows_server(_TIMEOUT_SECONDS)
async def events(
    client: AsyncClient, out: console.Output, replay: int | None, follow: bool, kinds: Sequence[str]
) -> None:
    """Print what happened to adapters, slots and sessions, and why."""
    if replay is None:
        replay = _FOLLOW_REPLAY if follow else MAX_REPLAY
    async with client.events(replay) as stream:
        found = 0
        while follow or found < stream.replayed:
            event = await anext(stream, None)
            if event is None:
                break
            found += 1 + event.missed
            if not kinds or event.kind in kinds:
                out.event(event)
    if follow:
        raise Unavailable("the server ended the stream of events")


COMMANDS = (load, unload, keep, release, list_adapters, show, estimate, prefetch, capacity, sessions, end, events)
