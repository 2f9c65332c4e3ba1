"""A real Prometheus on loopback, with a folder of its own, that scrapes one sidecar and evaluates slotcar's rules."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.ports import free_port
from tests.waiting import eventually

RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "slotcar.rules.yaml"
_PATIENCE_SECONDS = 30.0
_CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}}
rule_files: [{rules}]
scrape_configs:
  - job_name: slotcar
    static_configs: [{{targets: ["{target}"]}}]
"""

Labels = tuple[tuple[str, str], ...]


class Prometheus:
    """Scrapes `target`, a host and port, from the beginning to the end of the context."""

    def __init__(self, binary: str, folder: Path, target: str, rules: Path = RULES) -> None:
        self._folder = folder
        self._address = f"127.0.0.1:{free_port()}"
        config = folder / "prometheus.yml"
        config.write_text(_CONFIG.format(rules=rules, target=target), encoding="utf-8")
        self._command = [
            *(binary, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"),
            *(f"--web.listen-address={self._address}", "--log.level=warn"),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        eventually(self._is_ready)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(_PATIENCE_SECONDS)

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text(encoding="utf-8")
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=_PATIENCE_SECONDS):
                return True
        except OSError:
            return False

    def ask(self, path: str, **parameters: str) -> Any:
        """What an endpoint of its API answers."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=_PATIENCE_SECONDS) as response:
            return json.load(response)["data"]

    def query(self, expression: str) -> Mapping[Labels, float]:
        """The value of an expression now, by labels other than those of the target and the name."""
        found = self.ask("query", query=expression)["result"]
        return {_labels(each["metric"]): float(each["value"][1]) for each in found}

    def number(self, expression: str) -> float:
        """The value of an expression that has one."""
        (value,) = self.query(expression).values()
        return value

    def catch_up(self) -> None:
        """Returns when it has scraped what was so at the call."""
        now = time.time()
        eventually(lambda: max(self.query("timestamp(slotcar_adapters)").values(), default=0.0) > now)


def _labels(metric: Mapping[str, str]) -> Labels:
    return tuple(sorted((key, value) for key, value in metric.items() if key not in ("__name__", "job", "instance")))
