"""A bucket on moto's server, in a process of its own, on a free port."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters import MINIMAL_CONFIG, raw_tensors, write_raw_adapter
from tests.sources.bucket import SITE, upload
from tests.sources.proxy import Proxy


@pytest.fixture(scope="package")
def endpoint() -> Iterator[str]:
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        found = next(found for line in server.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        threading.Thread(target=lambda: list(server.stderr or ()), daemon=True).start()
        yield found[0]
        server.terminate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The adapter `a`, of this machine."""
    write_raw_adapter(tmp_path / "root" / "a", MINIMAL_CONFIG, raw_tensors(SITE))
    return tmp_path / "root" / "a"


@pytest.fixture
def proxy(endpoint: str, folder: Path) -> Iterator[Proxy]:
    """A proxy before the bucket, which has the adapter at s3://bucket/prefix/a."""
    upload(endpoint, folder)
    with Proxy(endpoint) as started:
        yield started
