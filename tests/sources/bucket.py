"""What the suites here put into a bucket, and how sources that read from it are made."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import botocore.session
from slotcar_sidecar.store.sources.fetch import Fetching
from slotcar_sidecar.store.sources.local import LocalSource
from slotcar_sidecar.store.sources.options import parse_options
from slotcar_sidecar.store.sources.remotes import Settings, make_remote
from slotcar_sidecar.store.sources.router import Sources

from tests.adapters import CONFIG_FILE, WEIGHTS_FILE
from tests.fakes.fetching import Clock, Counts

SITE = "model.layers.0.self_attn.q_proj"
KEY, SECRET = "AKIDNOBODYPRINTS", "a-secret-that-nobody-prints"
URI = "s3://bucket/prefix/a"
_CLIENT = {"aws_access_key_id": "other", "aws_secret_access_key": "other", "region_name": "us-east-1"}


def options_file(endpoint: str) -> str:
    """Options whose secrets are in the variables KEY and SECRET."""
    return json.dumps({"s3://bucket": {"endpoint": endpoint, "key": {"env": "KEY"}, "secret": {"env": "SECRET"}}})


def sources(
    endpoint: str, root: Path, clock: Clock, counts: Counts, secrets: Mapping[str, str] | None = None
) -> Sources:
    """Sources of s3://bucket at `endpoint`, with 60 seconds for a fetch."""
    known = parse_options(options_file(endpoint).encode(), (secrets or {"KEY": KEY, "SECRET": SECRET}).get)
    fetching = Fetching(60.0, 1 << 40, clock, lambda: 0.5, clock, counts)
    remote = make_remote(Settings(["s3://bucket"], known, root, offline=False), fetching)
    return Sources(LocalSource([root], 1 << 30), remote, 1 << 30)


def upload(endpoint: str, folder: Path) -> None:
    """Makes s3://bucket/prefix/NAME what the folder NAME is."""
    client = _client(endpoint)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if (folder / name).exists():
            client.put_object(Bucket="bucket", Key=f"prefix/{folder.name}/{name}", Body=(folder / name).read_bytes())


@functools.cache
def _client(endpoint: str) -> Any:
    client = botocore.session.Session().create_client("s3", endpoint_url=endpoint, **_CLIENT)
    client.create_bucket(Bucket="bucket")
    return client
