"""Completion in a shell: the script for it, and the names and sessions that a server knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
import slotcar_client
from click.shell_completion import CompletionItem, get_completion_class
from slotcar_client import Client

SHELLS = ("bash", "zsh", "fish")
# Whoever pressed Tab waits for it.
_TIMEOUT_SECONDS = 1.0
_PROGRAM = "slotcar"


def script(command: click.Command, shell: str) -> str:
    """What a shell runs to complete `command`."""
    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(command, {}, _PROGRAM, f"_{_PROGRAM.upper()}_COMPLETE")
    # Not `source`, which also runs bash to look at its version.
    return made.source_template % made.source_vars()


def adapter_names(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The names that begin with `incomplete`."""
    return _asked(context, incomplete, lambda client: ((a.name, a.tier) for a in client.list()))


def session_ids(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The sessions whose short ids begin with `incomplete`."""
    return _asked(context, incomplete, lambda client: ((s.session, s.client_name) for s in client.sessions()))


def folders(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Folders, as the shell knows them."""
    return [CompletionItem(incomplete, type="dir")]


def _asked(
    context: click.Context, incomplete: str, ask: Callable[[Client], Iterable[tuple[str, str]]]
) -> list[CompletionItem]:
    """What the server answers; nothing when it does not, as a shell has no place for a message."""
    try:
        with slotcar_client.connect(context.params.get("target"), timeout_seconds=_TIMEOUT_SECONDS) as client:
            found = tuple(ask(client))
    except slotcar_client.SlotcarError:
        return []
    return [CompletionItem(word, help=about or None) for word, about in found if word.startswith(incomplete)]
