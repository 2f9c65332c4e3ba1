"""The `slotcar-injector` command. Exit codes: 0 done, 1 the pod is denied or a port is taken, 2 wrong usage."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from slotcar_injector import certs, tls
from slotcar_injector.denial import BadReview, Denied
from slotcar_injector.logs import say, write_to_stderr
from slotcar_injector.settings import (
    SYSTEM_NAMESPACES,
    Serving,
    SettingError,
    Settings,
    kube_version_of,
    own_version,
)

# With the subcommand's name behind it: Kubernetes makes SLOTCAR_INJECTOR_PORT, and more, for a Service of that name.
ENVIRONMENT_PREFIX = "SLOTCAR_INJECTOR"
Command = Callable[..., Any]


@click.group(
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
        "auto_envvar_prefix": ENVIRONMENT_PREFIX,
        "show_default": True,
    }
)
@click.version_option(own_version())
def main() -> None:
    """Put slotcar beside the engines of labelled pods: a mutating admission webhook of Kubernetes.

    Each option can be set in the environment: --kube-version of serve is SLOTCAR_INJECTOR_SERVE_KUBE_VERSION.
    """


def _pod_options(command: Command) -> Command:
    options = (
        click.option(
            "--default",
            multiple=True,
            metavar="NAME=VALUE",
            help="What counts where a pod has no annotation slotcar.dev/NAME. Repeatable.",
        ),
        click.option("--kube-version", default="", help="The cluster's version, for mode auto; native without it."),
        click.option("--user", default=65532, help="User of the sidecar."),
        click.option("--group", default=65532, help="Its group, which the pod's containers get, for the socket."),
        click.option("--bind", default="0.0.0.0", help="Address of the sidecar's ports; :: for IPv6."),  # noqa: S104
    )
    for option in reversed(options):
        command = option(command)
    return command


def _settings(given: dict[str, Any], namespaces: tuple[str, ...] = SYSTEM_NAMESPACES) -> Settings:
    defaults: dict[str, str] = {}
    for text in given["default"]:
        name, equals, value = text.partition("=")
        if not equals or name in defaults:
            raise click.UsageError(f"--default is {text}, wanted NAME=VALUE, each NAME once")
        defaults[name] = value
    try:
        return Settings(
            defaults=defaults,
            kube_version=kube_version_of(given["kube_version"]),
            namespaces_left_out=frozenset(namespaces),
            user=given["user"],
            group=given["group"],
            bind=given["bind"],
        )
    except SettingError as error:
        raise click.UsageError(str(error)) from error


@main.command()
@click.option("--host", default="0.0.0.0", help="Address to serve at; :: for IPv6.")  # noqa: S104
@click.option("--port", default=8443, help="Port of the webhook, over TLS: POST /inject.")
@click.option("--ops-port", default=8080, help="Port of /metrics, /healthz and /readyz, without TLS.")
@click.option("--certificate", default="/etc/slotcar-injector/tls/tls.crt", type=click.Path(path_type=Path))
@click.option("--key", default="/etc/slotcar-injector/tls/tls.key", type=click.Path(path_type=Path))
@click.option(
    "--poll-seconds", default=10.0, type=click.FloatRange(min=0.01), help="How often to look at these two files."
)
@click.option(
    "--deadline-seconds",
    default=4.0,
    type=click.FloatRange(min=0.1),
    help="Within this a review is answered; less than the webhook's timeoutSeconds.",
)
@click.option(
    "--drain-seconds", default=5.0, type=click.FloatRange(min=0), help="After SIGTERM, go on so long, not ready."
)
@click.option("--body-bytes", default=8 << 20, type=click.IntRange(min=1024), help="Largest review.")
@click.option("--most-requests", default=64, type=click.IntRange(min=1), help="Reviews that are read at a time.")
@click.option(
    "--idle-seconds",
    default=120.0,
    type=click.FloatRange(min=0.1),
    help="A connection without a request is closed; more than the 90 s after which an API server does so.",
)
@click.option(
    "--leave-out",
    multiple=True,
    default=SYSTEM_NAMESPACES,
    metavar="NAMESPACE",
    help="Namespace whose pods get nothing, beside those where the webhook is not asked. Repeatable.",
)
@_pod_options
def serve(leave_out: tuple[str, ...], **given: Any) -> None:
    """Serve until SIGTERM."""
    from slotcar_injector.server import serve as serve_until_stopped

    settings = _settings(given, leave_out)
    names = Serving.__dataclass_fields__
    serving = Serving(**{name: value for name, value in given.items() if name in names})
    write_to_stderr()
    try:
        asyncio.run(serve_until_stopped(settings, serving))
    except OSError as error:
        say("start_failed", logging.ERROR, error=str(error))
        sys.exit(1)


@main.command(name="inject")
@_pod_options
def inject_one(**given: Any) -> None:
    """Read a pod as JSON, write it with slotcar in it, as the webhook would; warnings go to standard error.

    The label is not asked for. kubectl makes JSON of YAML without a cluster:
    `kubectl label --local -f pod.yaml -o json slotcar.dev/inject=true | slotcar-injector inject`.
    """
    import json

    from slotcar_injector.review import inject, read_json
    from slotcar_injector.shape import check_pod

    settings = _settings(given)
    try:
        pod = check_pod(read_json(sys.stdin.buffer.read()))
        if pod.get("kind") != "Pod":
            raise BadReview(f"kind is {pod.get('kind')}, wanted Pod")
        injected, _, warnings = inject(pod, settings)
    except (BadReview, Denied) as error:
        raise click.ClickException(str(error)) from error
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(json.dumps(injected, indent=2))


@main.command(name="probe")
@click.argument("url")
@click.option("--authority", required=True, metavar="PEM", help="Certificates to trust, as in the webhook's caBundle.")
@click.option("--seconds", default=10.0, type=click.FloatRange(min=0.1), help="How long to wait for each step.")
def ask_webhook(url: str, authority: str, seconds: float) -> None:
    """Ask the webhook at URL about a labelled pod, as an API server would; nothing is created.

    URL is such as https://slotcar-injector.slotcar-system.svc/inject. Exits with 1 unless it answers.
    """
    from slotcar_injector.probe import ProbeFailed, ask

    try:
        click.echo(ask(url, authority, seconds))
    except ProbeFailed as error:
        raise click.ClickException(str(error)) from error


@main.command(name="certs")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--service", default="slotcar-injector", help="Service that the API server calls.")
@click.option("--namespace", default="slotcar-system", help="Its namespace.")
@click.option("--days", default=365, type=click.IntRange(1, 3650), help="How long the certificate lasts.")
@click.option("--renew-days", default=30, type=click.IntRange(0, 3650), help="Make a new one when less is left.")
def make_certificates(folder: Path, service: str, namespace: str, days: int, renew_days: int) -> None:
    """Make ca.crt, tls.crt and tls.key in FOLDER, unless those that are there still last.

    It needs no cluster: what is to be done with the files is up to who calls. ca.crt is for the webhook's caBundle, and
    has the authority of before too: give it to the cluster before tls.crt.
    """
    now, names = tls.now(), certs.names_of_service(service, namespace)
    if certs.is_good(folder, names, now + timedelta(days=renew_days)):
        click.echo(f"kept: {folder}")
        return
    certs.make(folder, names, days, now)
    click.echo(f"made: {folder}")
