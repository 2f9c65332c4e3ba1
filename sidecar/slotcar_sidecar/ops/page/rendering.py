"""From a state to the text of the page, and to the policy under which browsers may run it.

Whatever stands in names and messages is text: templates escape all that they show, and what would not be visible, or
would turn the order of the characters around it, is spelled out.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from slotcar_sidecar.ops.page.chart import timeline
from slotcar_sidecar.ops.state import State

_UNITS = ("B", "KiB", "MiB", "GiB")
_SECONDS = ((60.0, "s", 1.0), (3600.0, "min", 60.0), (86400.0, "h", 3600.0))


@dataclass(frozen=True, slots=True)
class Page:
    """The document, and its Content-Security-Policy."""

    text: str
    policy: str


def render(state: State) -> Page:
    """The page of a state."""
    style, script = _asset("page.css"), _asset("page.js")
    text = _template().render(state=state, timeline=timeline(state), style=Markup(style), script=Markup(script))  # noqa: S704
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(text, policy)


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader(__package__, "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = {"age": age, "size": size, "duration": duration, "clock": clock, "moment": moment, "key": key, "bare": bare}
    environment.filters |= shown
    return environment.get_template("page.html")


@cache
def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _visible(value: object) -> object:
    """Characters that have no shape of their own, such as those that reverse a line, as their escapes."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in value)


# How values are written


def age(seconds: float | None) -> str:
    """90 → "1 min"; None is "never"."""
    if seconds is None:
        return "never"
    for most, unit, per in _SECONDS:
        if seconds < most:
            return f"{int(seconds / per)} {unit}"
    return f"{int(seconds / 86400)} d"


def duration(seconds: float) -> str:
    """Three digits: 0.0123 → "12.3 ms"."""
    for unit, per in (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if seconds < 999.5 * per:
            return f"{seconds / per:.0f} {unit}" if unit == "µs" else f"{seconds / per:.3g} {unit}"
    return age(seconds)


def size(count: int) -> str:
    """1536 → "1.5 KiB"."""
    value = float(count)
    for unit in _UNITS:
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def clock(time: float) -> str:
    """The time of day in UTC."""
    return datetime.fromtimestamp(time, UTC).strftime("%H:%M:%S")


def moment(time: float) -> str:
    """The time as machines read it."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")


def key(text: str) -> str:
    """An identifier of an element for any text."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]


def bare(digest: str) -> str:
    """A digest without the name of its hash."""
    return digest.removeprefix("sha256:")
