"""The status page is well-formed, names everything, escapes what others chose, and cannot change anything."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from slotcar_sidecar.ops.page import render
from slotcar_sidecar.ops.page.chart import HEIGHT, WIDTH, timeline
from slotcar_sidecar.ops.page.rendering import age, duration, size
from slotcar_sidecar.ops.state import Load

from tests.unit.ops.states import DIGEST, EMPTY, NOW, full

VOID = {"meta", "link", "br", "rect", "line"}
HOSTILE = "<script>alert(1)</script>'\"&{{ 7*7 }}"
# Turns what follows it around, in browsers and in terminals.
OVERRIDE = "\N{RIGHT-TO-LEFT OVERRIDE}"


class Seen(HTMLParser):
    """Elements with their attributes, and the text outside scripts and styles; every element must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attributes}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attributes}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._open):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, *tags: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.elements if tag in tags]


def seen(state: object) -> Seen:
    return Seen(render(state).text)  # type: ignore[arg-type]


def test_an_empty_server_has_a_page() -> None:
    page = seen(EMPTY)
    for text in ("No name has an adapter yet", "No engine has a session", "follows no file", "Nothing happened yet"):
        assert text in page.text
    assert "Needs a look" not in page.text


def test_everything_is_there_with_its_cause() -> None:
    page = seen(full())
    for text in (
        "1 occupied", "1 pinned", "gen 5", "1 min ago", "0123456789ab", "sql abcdef01 mapping 3", "and 8 more",
        "left its slot", "slot taken by sql", "refused: out of luck", "refused, loaded since: out of luck",
        "1 earlier version", "ba9876543210", "in grace, 12 s left", "1 of 2 ranks joined", "hold 9", "until released",
        "stale", "and 1 more", "SOURCE_UNAVAILABLE", "in 8 s", "adapters[4]", "not in force", "200 ms", "250 ms",
        "9800 more adapters are not shown", "4 more mappings are not shown", "mappings wait",
    ):  # fmt: skip
        assert text in page.text, text


def test_what_needs_a_look_comes_first() -> None:
    text = seen(full()).text
    first = text[text.index("Needs a look") : text.index("What is in each slot")]
    for cause in (
        "2 mappings wait for slots",
        "/etc/adapters.yaml is not in force as it is",
        "sql is declared, and failed: SOURCE_UNAVAILABLE",
        "adapters[4] is declared, and invalid",
        "broken was refused: out of luck",
        "sql did not come back from the journal",
        "sql abcdef01 has 1 stale mappings",
    ):
        assert cause in first
    assert "mended was refused" not in text


def test_the_summary_is_one_line_for_those_who_hear_it() -> None:
    (status,) = [attributes for attributes in seen(full()).all("p") if attributes.get("role") == "status"]
    assert status["aria-live"] == "polite"
    waits = replace(EMPTY, server=replace(EMPTY.server, readiness="waits for a ModelSpec"))
    assert "waits for a ModelSpec" in seen(waits).text
    later = replace(EMPTY, time=NOW + 60, server=replace(EMPTY.server, generation=8, uptime_seconds=150.0))
    assert later.summary == EMPTY.summary, "nobody wants to hear that time passes"


@pytest.mark.parametrize(
    "text", [HOSTILE, "x" * 200, "a" + OVERRIDE + "b", "\x00\x1b[31m", "\ud800", "--><svg/onload=x>"]
)
def test_what_others_chose_is_text(text: str) -> None:
    page = render(full(text, text)).text
    page.encode()
    tags = [tag for tag, _ in Seen(page).elements]
    assert tags == [tag for tag, _ in seen(full()).elements], "no element more, none less"
    for attributes in (attributes for _, attributes in Seen(page).elements):
        assert not [name for name in attributes if name.startswith("on")]
    assert OVERRIDE not in page
    assert ("\\u202e" in page) == (OVERRIDE in text)
    assert len([tag for tag in tags if tag == "script"]) == 1
    if text.isprintable():
        assert text in Seen(page).text
        assert html.escape(text, quote=False).replace('"', "&#34;").replace("'", "&#39;") in page


def test_nothing_changes_anything_and_nothing_comes_from_elsewhere() -> None:
    page = seen(full())
    assert not page.all("form", "input", "iframe", "object", "embed", "img", "base", "video", "audio")
    assert {a["href"] for a in page.all("a")} <= {
        "#main", "#slots", "#tiers", "#loads", "#adapters", "#sessions", "#declared", "#events",
        "debug/state.json", "metrics",
    }  # fmt: skip
    assert [link["href"] for link in page.all("link")] == ["data:,"]
    assert not [a for _, a in page.elements if "src" in a or "style" in a]
    assert [button["type"] for button in page.all("button")] == ["button"]


def test_the_policy_lets_only_our_script_and_style_run() -> None:
    page = render(full())
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in page.policy
    assert page.policy.startswith("default-src 'none'; ")
    assert "unsafe" not in page.policy
    for directive in ("base-uri", "form-action", "frame-ancestors"):
        assert f"{directive} 'none'" in page.policy


def test_it_can_be_read_aloud_and_used_without_a_mouse() -> None:
    page = seen(full())
    tags = [tag for tag, _ in page.elements]
    for landmark in ("header", "nav", "main", "footer", "h1"):
        assert tags.count(landmark) == 1
    assert tags.count("table") == tags.count("caption") == tags.count("thead") >= 5
    assert all(th["scope"] in ("col", "row") for th in page.all("th"))
    regions = [a for _, a in page.elements if a.get("role") == "region"]
    assert all(a["tabindex"] == "0" and (a.get("aria-label") or a.get("aria-labelledby")) for a in regions)
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    assert {a["aria-labelledby"] for _, a in page.elements if "aria-labelledby" in a} <= set(ids)
    meters = [a for _, a in page.elements if a.get("role") == "meter"]
    assert [(m["aria-valuenow"], m["aria-valuemax"]) for m in meters] == [("100", "200"), ("0", "1000")]
    assert all(m["aria-valuetext"] and m["aria-label"] for m in meters)
    (chart,) = [a for a in page.all("svg") if a.get("role") == "img"]
    assert "2 loads" in chart["aria-label"]
    assert page.elements[0] == ("html", {"lang": "en"})


def test_without_scripts_it_refreshes_too() -> None:
    assert '<noscript><meta http-equiv="refresh" content="5"></noscript>' in render(EMPTY).text


def test_the_same_as_data() -> None:
    plain = json.loads(json.dumps(full().plain()))
    assert plain["slots"][0]["pins"] == [
        {"session": "abcdef01", "client_name": "sql", "owner": "mapping", "owner_id": 3}
    ]
    assert plain["left_out"]["adapters"] == 9800
    assert plain["summary"].startswith("Ready: 1 of 2 slots in use, 1 session, 3 adapters.")
    assert len(plain["attention"]) == 7
    assert plain["events"][0]["kind"] == "evicted"


# The chart


def test_the_axis_of_loads_begins_with_the_first_of_them() -> None:
    chart = timeline(full())
    assert (chart.start, chart.end, chart.most_seconds) == (NOW - 60, NOW, 2.0)
    assert all(0 <= bar.x <= WIDTH and bar.y >= 0 and bar.y + bar.height <= HEIGHT + 0.1 for bar in chart.bars)
    assert [bar.stage for bar in chart.bars] == ["read", "wait", "fill", "read"]
    assert [mark.kind for mark in chart.marks] == ["evicted", "refused"]
    old = replace(EMPTY, loads=(Load("", DIGEST, NOW - 600, (("read", 0.0),)),))
    assert timeline(old).start == NOW - 600
    assert [bar.x for bar in timeline(old).bars] == [0.0]


def test_longer_loads_are_higher() -> None:
    short, long = (sum(bar.height for bar in timeline(full()).bars if bar.x == x) for x in (866.7, 166.7))
    assert 0 < short < long == HEIGHT


# How values are written


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "never"), (0.4, "0 s"), (59.9, "59 s"), (60, "1 min"), (3599, "59 min"), (7200, "2 h"), (90000, "1 d")],
)
def test_ages(seconds: float | None, text: str) -> None:
    assert age(seconds) == text


def test_durations_and_sizes() -> None:
    assert [duration(s) for s in (0.00012, 0.0123, 0.9999, 12.34, 1200)] == [
        "120 µs", "12.3 ms", "1 s", "12.3 s", "20 min",
    ]  # fmt: skip
    assert [size(n) for n in (0, 1023, 1536, 5 << 30, 1 << 45)] == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB", "32.0 TiB"]
