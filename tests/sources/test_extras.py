"""What a sidecar without the packages of an extra does: everything else, and a refusal that names the extra."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = """
import sys, threading
from pathlib import Path

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import slotcar_sidecar.app
from slotcar_sidecar.core.errors import SourceDenied
from slotcar_sidecar.ops.metrics import Metrics
from slotcar_sidecar.store.sources.fetch import Fetching
from slotcar_sidecar.store.sources.local import LocalSource
from slotcar_sidecar.store.sources.remotes import Settings, make_remote
from slotcar_sidecar.store.sources.router import Sources

fetching = Fetching(60.0, 1 << 30, lambda: 0.0, lambda: 0.5, threading.Event(), Metrics())
remote = make_remote(Settings(["s3://bucket", "hf://org/*"], (), Path("cache"), offline=False), fetching)
sources = Sources(LocalSource([Path.cwd()], 1 << 20), remote, 1 << 20)
for call in (sources.version, sources.read):
    try:
        call(sys.argv[2])
    except SourceDenied as error:
        print(error.message, error.facts["wanted"])
"""


@pytest.mark.parametrize(
    ("package", "uri", "extra"),
    [("botocore", "s3://bucket/a", "slotcar[s3]"), ("huggingface_hub", "hf://org/repo@main", "slotcar[hf]")],
)
def test_a_missing_extra_is_named(package: str, uri: str, extra: str) -> None:
    child = [sys.executable, "-c", CHILD, package, uri]
    said = subprocess.run(child, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(said) == 2
    for line in said:
        assert f"pip install '{extra}'" in line
        assert line.endswith(extra)
