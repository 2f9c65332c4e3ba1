"""The status page in a real browser: it follows the server in place, for eyes, hands and ears of every kind."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slotcar_client
from selenium.webdriver.common.keys import Keys

from tests.faults.oracle import spec_file
from tests.ops.browser import Browser, browser, is_installed
from tests.ops.scene import SITES, SLOTS, Scene, page_url, staged
from tests.ports import free_port
from tests.server import SidecarProcess
from tests.waiting import eventually

pytestmark = [
    pytest.mark.ops,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not is_installed(), reason="chromium is missing: `make apt` installs it"),
]

AUDITS = (Path(__file__).parent / "audits.js").read_text(encoding="utf-8")
STALE = "slotcar-test-mark"


# Where a row is in the box that scrolls, rounded to a pixel.
HEIGHT = """
    const box = document.querySelector("#events .scroll");
    return document.getElementById(arguments[0]).offsetTop - box.scrollTop;
"""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with staged(tmp_path_factory.mktemp("scene")) as scene:
        yield scene


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def page(scene: Scene, window: Browser) -> Browser:
    window.look(1280, 900, "light")
    window.open(scene.url)
    window.complaints()
    window.requests()
    return window


def text(page: Browser, selector: str = "body") -> str:
    return str(page.ask("return document.querySelector(arguments[0])?.innerText ?? ''", selector))


def refreshed(page: Browser) -> None:
    """Returns when the page has shown something newer, in place."""
    before = text(page, "#summary time")
    eventually(lambda: text(page, "#summary time") not in ("", before))


def test_what_is_open_focused_and_scrolled_stays_so(page: Browser) -> None:
    page.ask(
        """
        document.querySelector("#adapters details").open = true;
        document.querySelector("#sessions details").open = false;
        document.querySelector("#events .scroll").scrollTop = 120;
        document.querySelector("#adapters summary").focus({preventScroll: true});
        window.scrollTo(0, 300);
        document.querySelector("#slot-2").dataset.mark = arguments[0];
        """,
        STALE,
    )
    row = page.ask("return document.querySelectorAll('#events tbody tr')[5].id")
    before = page.ask(HEIGHT, row)
    refreshed(page)
    found = page.ask(
        """
        return [
          document.querySelector("#adapters details").open,
          document.querySelector("#sessions details").open,
          document.querySelector("#events .scroll").scrollTop >= 120,
          document.activeElement === document.querySelector("#adapters summary"),
          window.scrollY,
          document.querySelector("#slot-2").dataset.mark ?? null,
        ]
        """
    )
    assert found == [True, False, True, True, 300, None], "the row is the new one, all else as it was"
    assert abs(page.ask(HEIGHT, row) - before) <= 1, "what is read stays where it is, though newer rows came above it"
    assert page.complaints() == []


def test_a_row_keeps_its_place_when_others_come(page: Browser, scene: Scene) -> None:
    first = page.ask("return document.querySelector('#events tbody tr').id")
    with pytest.raises(slotcar_client.SourceDenied):
        scene.client.load("another", "/etc")
    place = "return document.getElementById(arguments[0]).rowIndex"
    eventually(lambda: "another" in text(page, "#events tbody") and page.ask(place, first) >= 2)


def test_it_can_be_paused(page: Browser) -> None:
    button = page.driver.find_element("id", "pause")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert text(page, "#freshness") == "paused"
    before = text(page, "#summary time")
    page.ask("document.dispatchEvent(new Event('visibilitychange'))")
    assert text(page, "#summary time") == before
    button.click()
    refreshed(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_nobody_stumbles(page: Browser, scheme: str, width: int) -> None:
    """To see it fail: make --muted lighter."""
    page.look(width, 900, scheme)
    page.ask("for (const each of document.querySelectorAll('details')) each.open = true")
    assert page.ask("return matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")
    assert page.ask(AUDITS) == []


def test_light_and_dark_differ(page: Browser) -> None:
    colours = []
    for scheme in ("light", "dark"):
        page.look(1280, 900, scheme)
        colours.append(page.ask("return getComputedStyle(document.body).backgroundColor"))
    assert colours == ["rgb(244, 245, 247)", "rgb(13, 16, 20)"]


@pytest.mark.parametrize("width", [320, 390, 768, 1024])
def test_no_window_is_too_narrow(page: Browser, width: int) -> None:
    page.look(width, 700, "light")
    page.ask("for (const each of document.querySelectorAll('details')) each.open = true")
    assert page.ask("return document.documentElement.scrollWidth") <= width


def test_the_keyboard_reaches_everything_in_the_order_of_the_page(page: Browser) -> None:
    page.ask("document.activeElement.blur()")
    body, places = page.driver.find_element("tag name", "body"), []
    wanted = "a, button, summary, [tabindex='0']"
    for _ in range(page.ask("return document.querySelectorAll(arguments[0]).length", wanted)):
        body.send_keys(Keys.TAB)
        body = page.driver.switch_to.active_element
        script = "return [...document.querySelectorAll(arguments[0])].indexOf(document.activeElement)"
        places.append(page.ask(script, wanted))
        outline = page.ask("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", "where the focus is, is seen"
    assert places == sorted(set(places))
    assert places[0] == 0
    assert page.ask("return document.querySelectorAll(arguments[0])[0].textContent", wanted) == "Skip to the slots"


def test_screen_readers_find_landmarks_and_names(page: Browser) -> None:
    nodes = page.tell("Accessibility.getFullAXTree")["nodes"]
    shown = [(value(node, "role"), value(node, "name")) for node in nodes if not node["ignored"]]
    roles = [role for role, _ in shown]
    assert [roles.count(role) for role in ("banner", "navigation", "main", "contentinfo", "status")] == [1] * 5
    named = ("region", "table", "meter", "image", "button", "link")
    assert [role for role, name in shown if role in named and not name] == []
    assert ("heading", "Needs a look") in shown
    assert [name for role, name in shown if role == "meter"] == ["device tier", "host tier", "disk tier"]


def value(node: dict[str, Any], what: str) -> str:
    return str(node.get(what, {}).get("value", ""))


def test_it_asks_nobody_else_and_complains_of_nothing(page: Browser, scene: Scene) -> None:
    page.open(scene.url)
    refreshed(page)
    asked = [url for url in page.requests() if not url.startswith("data:")]
    assert len(asked) >= 2
    assert {urllib.parse.urlsplit(url).netloc for url in asked} == {urllib.parse.urlsplit(scene.url).netloc}
    assert page.complaints() == []


def test_a_script_that_came_in_would_not_run(page: Browser) -> None:
    """The policy of the page, not only the escaping of names."""
    page.ask("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.bad = 1'}))")
    assert page.ask("return window.bad ?? null") is None
    assert any("Content Security Policy" in message for message in page.complaints())


def test_an_eviction_a_replace_and_an_end_are_seen(page: Browser, scene: Scene) -> None:
    before = {adapter.name for adapter in scene.client.list() if adapter.slot is not None}
    scene.client.load("moderation", tier="device")
    eventually(lambda: "moderation" in text(page, "#slots"))
    (victim,) = before - {adapter.name for adapter in scene.client.list() if adapter.slot is not None}
    assert victim not in text(page, "#slots")
    assert "slot taken by moderation" in text(page, "#adapters")
    scene.client.load("support/de", scene.library.root / "sql-v2", replace=True, tier="host")
    eventually(lambda: "1 earlier version" in text(page, "#adapters"))
    with scene.client.session("short-lived") as session:
        short, full = session.session_id[:8], session.session_id
        eventually(lambda: short in text(page, "#sessions"))
        assert full not in page.driver.page_source
    eventually(lambda: "short-lived" not in text(page, "#sessions"))


def test_without_scripts_it_is_the_same_page(scene: Scene, tmp_path: Path) -> None:
    with browser(tmp_path, scripts=False) as plain:
        plain.open(scene.url)
        source = plain.driver.page_source
        assert source.count('<tr id="slot-') == SLOTS
        assert re.search(r'<button[^>]* id="pause"[^>]* hidden', source)
        eventually(lambda: moment(plain.driver.page_source) != moment(source))


def moment(source: str) -> str:
    """When the page was made."""
    found = re.search(r'<dt>As of</dt><dd><time datetime="([^"]+)"', source)
    return found[1] if found is not None else ""


def test_a_server_that_is_away_and_comes_back(window: Browser, tmp_path: Path, scene: Scene) -> None:
    """It says so while nothing answers, and shows the new life once there is one."""
    home = tmp_path / "server"
    home.mkdir()
    extra = ("--model-spec", str(spec_file(home, SITES)), "--metrics", f"127.0.0.1:{free_port()}")
    with SidecarProcess(home, scene.library.root, extra=extra) as sidecar:
        window.look(1280, 900, "light")
        window.open(page_url(sidecar))
        epoch = text(window, "#epoch")
        assert not window.driver.find_element("id", "away").is_displayed()
        sidecar.kill()
        eventually(lambda: "The server is away" in text(window, "#away"))
        assert text(window, "#epoch") == epoch
        with sidecar.again():
            eventually(lambda: text(window, "#epoch") not in ("", epoch))
            assert not window.driver.find_element("id", "away").is_displayed()
            with slotcar_client.connect(sidecar.target) as client:
                client.load("sql", scene.library.root / "sql")
            eventually(lambda: "sql" in text(window, "#slot-0"))
