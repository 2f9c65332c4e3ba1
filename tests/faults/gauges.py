"""What a sidecar says of itself in its metrics, and what the system says of its process."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter
from pathlib import Path

from tests.server import SidecarProcess


class Gauges:
    """The sidecar's metrics."""

    def __init__(self, sidecar: SidecarProcess) -> None:
        # Of its last life.
        self.url = re.findall(r"http://127\.0\.0\.1:\d+/metrics", sidecar.log)[-1]

    def text(self) -> str:
        """All of them."""
        with urllib.request.urlopen(self.url, timeout=10) as response:
            found: str = response.read().decode()
            return found

    def read(self, name: str) -> float:
        text = self.text()
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])


def rss_bytes(sidecar: SidecarProcess) -> int:
    """Its resident memory."""
    assert sidecar.process is not None
    status = Path(f"/proc/{sidecar.process.pid}/status").read_text(encoding="ascii")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def descriptors(sidecar: SidecarProcess) -> Counter[str]:
    """How many descriptors of each kind it has open: "socket", "anon_inode:[eventfd]", or a file's path."""
    assert sidecar.process is not None
    kinds: Counter[str] = Counter()
    for link in Path(f"/proc/{sidecar.process.pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:
            continue
        kinds[re.sub(r":\[\d+\]$", "", target)] += 1
    return kinds
