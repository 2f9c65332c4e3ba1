"""The `slotcar` command. Exit codes: 0 done, 1 refused by the server or failed, 2 wrong usage."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from slotcar_client import SlotcarError

from slotcar_sidecar.command import completion as shells
from slotcar_sidecar.command import console, life, snapshot, top, verbs, watch
from slotcar_sidecar.command.shown import credential_options
from slotcar_sidecar.config import ENVIRONMENT_PREFIX, Config, ConfigError, parse_size, size_text, unknown_variables
from slotcar_sidecar.core.errors import RequestInvalid

Command = Callable[..., Any]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="slotcar")
@credential_options
def main() -> None:
    """Own LoRA adapter slots beside an inference engine; never compute a row with another adapter's weights."""


for _command in (*verbs.COMMANDS, *life.COMMANDS, watch.watch, top.top, snapshot.snapshot):
    main.add_command(_command)


def _shown_default(item: dataclasses.Field[Any]) -> str | bool:
    if item.metadata.get("size"):
        return size_text(int(str(item.default)))
    return item.default not in ((), None, False)


def _serve_options(command: Command) -> Command:
    """One option per field of Config, with its variable; sizes take a unit."""
    for item in reversed(dataclasses.fields(Config)):
        metadata = item.metadata
        repeatable = isinstance(item.default, tuple)
        kind: Any = None
        if item.type in ("int", "float") and not metadata.get("size"):
            kind = int if item.type == "int" else float
        elif metadata.get("size"):
            kind = str
        elif "choices" in metadata and not repeatable:
            kind = click.Choice(metadata["choices"])
        command = click.option(
            f"--{item.name.replace('_', '-')}",
            item.name,
            type=kind,
            is_flag=item.type == "bool",
            multiple=repeatable,
            default=item.default,
            show_default=_shown_default(item),
            envvar=ENVIRONMENT_PREFIX + item.name.upper(),
            show_envvar=True,
            help=metadata["help"],
        )(command)
    return command


@main.command()
@_serve_options
def serve(**settings: Any) -> None:
    """Run the sidecar until SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGINT):  # until there is something to shut down
        signal.signal(number, lambda *_: os._exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to reload
    # gRPC's core writes to standard error by itself: what is no line of the log, and waits for whoever reads it.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        config = _make_config(settings)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    for name in unknown_variables(list(os.environ)):
        click.echo(f"warning: the variable {name} means nothing to slotcar", err=True)

    from slotcar_sidecar import app  # tensor libraries take a second to import

    try:
        asyncio.run(app.run(config, app.announce(config)))
    except app.StartError as error:
        raise click.ClickException(str(error)) from error


def _make_config(settings: dict[str, Any]) -> Config:
    values = dict(settings)
    for item in dataclasses.fields(Config):
        value = values[item.name]
        if item.metadata.get("size"):
            values[item.name] = parse_size(item.name, value)
        elif isinstance(value, tuple) and "choices" in item.metadata:
            values[item.name] = tuple(name for text in value for name in text.split(",") if name)
        elif "Path" in str(item.type) and value is not None:
            path = partial(_path, item.name)
            values[item.name] = tuple(map(path, value)) if isinstance(value, tuple) else path(value)
    return Config(**values)


def _path(name: str, text: str) -> Path:
    """An empty text, as a template may leave it, is not the folder that the process is in."""
    if not text:
        raise ConfigError(name, "an empty text", "a path")
    return Path(text)


@main.command()
@click.option(
    "--from",
    "folder",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Hugging Face folder of the base model; only shapes are read.",
)
@click.option("--embeddings", is_flag=True, help="With the input embedding.")
@click.option("--tied-head", is_flag=True, help="With a head that shares its weight with the embedding.")
@click.option("--experts", is_flag=True, help="With the experts of a mixture, and their routers.")
def spec(folder: Path, **wanted: bool) -> None:
    """Print the ModelSpec of a Hugging Face folder as JSON, for `serve --model-spec`.

    Its sites are the linear layers, and what few adapters target only if it is asked for: slots have room for every
    site.
    """
    from slotcar_sidecar.store.model import Wanted, model_spec_from_folder

    try:
        model = model_spec_from_folder(folder, Wanted(**wanted))
    except (RequestInvalid, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(model.to_dict(), indent=1))


@main.command()
@click.option("--target", help="Address of a sidecar to try. [env var: SLOTCAR_TARGET]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def doctor(target: str | None, as_json: bool) -> None:
    """Say what this machine can do and what is missing."""
    from slotcar_sidecar.command.doctor import examine

    checks = examine(target)
    console.Output(as_json).checks(checks)
    if any(check.state == "missing" for check in checks):
        sys.exit(1)


@main.command()
@click.option("--cache", type=click.Path(path_type=Path), help="Where the converted model is kept.")
@click.option("--tiny", is_flag=True, help="Run on a tiny random model even if SmolLM2 is installed.")
def demo(cache: Path | None, tiny: bool) -> None:
    """Three adapters side by side on a real model, an eviction and a forced unload while others decode."""
    from slotcar_sidecar.demo import stage, story

    folder = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slotcar"
    try:
        story.run(Console(), folder, tiny=tiny)
    except (stage.StageError, SlotcarError) as error:
        raise click.ClickException(str(error)) from error


@main.command()
@click.argument("shell", type=click.Choice(shells.SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes commands, options, adapters' names and sessions in SHELL.

    For bash: eval "$(slotcar completion bash)"
    """
    click.echo(shells.script(context.find_root().command, shell))
