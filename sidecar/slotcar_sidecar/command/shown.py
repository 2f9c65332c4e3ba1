"""What the command line shows of itself to a server: options before the command, which count for each command."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click
from slotcar_client import Credentials

Command = Callable[..., Any]

_FILES = {
    "tls_ca": "PEM file of the authorities that a server's certificate is checked by: TCP is TLS then.",
    "tls_cert": "PEM file of the certificate to show over TLS.",
    "tls_key": "PEM file of that certificate's key.",
    "token_file": "File with the token to send.",
}


def credential_options(command: Command) -> Command:
    """--tls-ca and its like, of the whole command line: what each of its commands shows to a server."""

    @functools.wraps(command)
    def wrapper(**files: str | None) -> None:
        click.get_current_context().obj = Credentials(**files)
        command()

    for name, about in reversed(_FILES.items()):
        option = f"--{name.replace('_', '-')}"
        variable = f"SLOTCAR_{name.upper()}"
        wrapper = click.option(option, envvar=variable, metavar="FILE", help=f"{about} [env var: {variable}]")(wrapper)
    return wrapper


def credentials() -> Credentials | None:
    """What the command line, or the environment, names; None where nobody read a command line."""
    context = click.get_current_context(silent=True)
    found = context.find_root().obj if context is not None else None
    return found if isinstance(found, Credentials) else None
