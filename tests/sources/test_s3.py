"""The S3 source against moto's server: what it reads, and what it takes from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from slotcar_sidecar.core.errors import AdapterInvalid, SourceUnavailable

from tests.adapters import MINIMAL_CONFIG, raw_tensors, write_raw_adapter
from tests.sources.bucket import SECRET, SITE, URI, Clock, Counts, sources, upload


def test_an_adapter_is_read_from_a_bucket(endpoint: str, folder: Path) -> None:
    upload(endpoint, folder)
    remote = sources(endpoint, folder.parent, Clock(), Counts())
    wanted = remote.read(str(folder)).adapter
    assert remote.read(URI).adapter.digest == wanted.digest
    before = remote.version(URI)
    write_raw_adapter(folder, MINIMAL_CONFIG, raw_tensors(SITE, seed=5))
    upload(endpoint, folder)
    assert remote.version(URI) != before
    assert remote.read(URI).adapter.digest != wanted.digest


def test_what_is_not_there_says_so(endpoint: str, folder: Path) -> None:
    upload(endpoint, folder)
    with pytest.raises(AdapterInvalid, match=r"has no adapter_config\.json"):
        sources(endpoint, folder.parent, Clock(), Counts()).read("s3://bucket/prefix/none")
    with pytest.raises(SourceUnavailable) as caught:
        sources("http://127.0.0.1:1", folder.parent, Clock(), Counts()).read(URI)
    assert caught.value.facts["found"] == "connection"
    assert SECRET not in caught.value.message


def test_the_environment_has_no_part_in_it(
    endpoint: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(endpoint, folder)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(f"[default]\nca_bundle = {tmp_path}/none\nretry_mode = nonsense\n")
    nowhere = "http://127.0.0.1:1"
    for name, value in {
        "HOME": str(tmp_path),
        "AWS_PROFILE": "no-such-profile",
        "AWS_CA_BUNDLE": str(tmp_path / "none"),
        "REQUESTS_CA_BUNDLE": str(tmp_path / "none"),
        "AWS_ENDPOINT_URL": nowhere,
        "AWS_USE_FIPS_ENDPOINT": "true",
        "AWS_DATA_PATH": str(tmp_path / "none"),
        "HTTP_PROXY": nowhere,
        "http_proxy": nowhere,
        "NO_PROXY": "",
        "no_proxy": "",
    }.items():
        monkeypatch.setenv(name, value)
    remote = sources(endpoint, folder.parent, Clock(), Counts())
    assert remote.read(URI).adapter.digest == remote.read(str(folder)).adapter.digest


@pytest.mark.parametrize("wrong", ["no-url", "http://", "http://[::1"])
def test_options_that_botocore_cannot_use_are_refused(wrong: str, folder: Path) -> None:
    with pytest.raises(SourceUnavailable) as caught:
        sources(wrong, folder.parent, Clock(), Counts()).read(URI)
    assert caught.value.facts["found"] == "options"
