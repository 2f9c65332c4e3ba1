"""A headless Chromium, Debian's, that reaches nothing but this machine and downloads nothing."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions, ChromeService

_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--no-default-browser-check",
    "--force-device-scale-factor=1",
)


@dataclass
class Browser:
    """One window. `driver` is selenium's."""

    driver: Chrome

    def look(self, width: int, height: int, scheme: str) -> None:
        """The size of the page that is seen, and whether it should be "light" or "dark"."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.tell("Emulation.setDeviceMetricsOverride", **metrics)
        self.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        self.driver.get(url)

    def tell(self, command: str, **arguments: Any) -> Any:
        """A command of the protocol of its developer tools."""
        return self.driver.execute_cdp_cmd(command, arguments)

    def ask(self, script: str, *arguments: Any) -> Any:
        """What a script returns in the page."""
        return self.driver.execute_script(script, *arguments)

    def complaints(self) -> list[str]:
        """What the console has since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Where it sent requests to since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def is_installed() -> bool:
    """Whether Debian's packages chromium and chromium-driver are here."""
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


@contextlib.contextmanager
def browser(folder: Path, *, scripts: bool = True) -> Iterator[Browser]:
    """One that keeps its files in `folder`, until the context ends."""
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for argument in (*_ARGUMENTS, f"--user-data-dir={folder / 'chromium'}"):
        options.add_argument(argument)
    if not scripts:
        options.add_experimental_option("prefs", {"profile.managed_default_content_settings.javascript": 2})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # With both paths given, selenium looks for no other, and asks nobody for one.
    driver = Chrome(options=options, service=ChromeService(executable_path=shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
