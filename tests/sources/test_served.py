"""A served sidecar that loads from a bucket: it keeps secrets and digests, and ends when it is told to."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from slotcar.v1 import adapter_service_pb2 as pb
from slotcar.v1.adapter_pb2 import TIER_HOST

from tests.adapters import MINIMAL_CONFIG, WEIGHTS_FILE, raw_tensors, write_raw_adapter
from tests.faults.raw import CALL_SECONDS, RawEngine
from tests.ports import free_port
from tests.server import SidecarProcess
from tests.sources.bucket import KEY, SECRET, SITE, URI, options_file, upload
from tests.sources.proxy import Answer, Proxy

FORBIDDEN = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"


@dataclass(frozen=True)
class Served:
    """A sidecar that may read the bucket, and a client of it."""

    sidecar: SidecarProcess
    raw: RawEngine
    metrics: str

    def load(self, ref: str) -> pb.LoadAdapterResponse:
        request = pb.LoadAdapterRequest(ref=ref, source=URI, target_tier=TIER_HOST)
        return self.raw.adapters.LoadAdapter(request, timeout=CALL_SECONDS)

    def refusal(self, ref: str) -> str:
        """Everything in the error of a load."""
        with pytest.raises(grpc.RpcError) as caught:
            self.load(ref)
        return f"{caught.value.details()} {caught.value.trailing_metadata()}"

    def said(self) -> str:
        """All that it tells whoever asks: its log, events, metrics and list."""
        events: list[pb.WatchEventsResponse] = []
        watch = self.raw.adapters.WatchEvents(pb.WatchEventsRequest(replay=1000), timeout=CALL_SECONDS)
        while not events or len(events) <= events[0].replayed:
            events.append(next(watch))
        listed = self.raw.adapters.ListAdapters(pb.ListAdaptersRequest(), timeout=CALL_SECONDS)
        with urllib.request.urlopen(self.metrics) as answer:
            metrics = answer.read().decode()
        return f"{self.sidecar.log}\n{events}\n{listed}\n{metrics}"


@pytest.fixture
def served(
    proxy: Proxy, folder: Path, tmp_path: Path, start_sidecar: Callable[..., SidecarProcess]
) -> Iterator[Served]:
    (tmp_path / "options.json").write_text(options_file(proxy.url))
    port = free_port()
    sidecar = start_sidecar(
        folder.parent,
        extra=(
            *("--source", "s3://bucket/prefix", "--source-options", str(tmp_path / "options.json")),
            *("--metrics", f"127.0.0.1:{port}", "--log-format", "json"),
        ),
        environment={"KEY": KEY, "SECRET": SECRET},
    )
    raw = RawEngine(sidecar.target)
    yield Served(sidecar, raw, f"http://127.0.0.1:{port}/metrics")
    raw.close()


def test_secrets_are_said_to_nobody(served: Served, proxy: Proxy) -> None:
    served.load("a")
    forbidden = Answer(403, {"Content-Length": str(len(FORBIDDEN))}, FORBIDDEN)
    proxy.spoil(WEIGHTS_FILE, lambda answer: replace(answer, sent=10, end="reset"), lambda _: forbidden)
    refusal = served.refusal("b")
    assert "SOURCE_UNAVAILABLE" in refusal
    said = served.said() + refusal
    assert 'slotcar_fetch_failures_total{reason="forbidden",scheme="s3"} 1.0' in said
    assert URI in said
    for secret in (SECRET, KEY, "Signature="):
        assert secret not in said


def test_an_adapter_that_is_replaced_between_estimate_and_load_has_another_digest(
    served: Served, proxy: Proxy, folder: Path
) -> None:
    estimate = served.raw.adapters.EstimateAdapter(pb.EstimateAdapterRequest(source=URI), timeout=CALL_SECONDS)
    write_raw_adapter(folder, MINIMAL_CONFIG, raw_tensors(SITE, seed=9))
    upload(proxy.endpoint, folder)
    assert "DIGEST_MISMATCH" in served.refusal(f"a@{estimate.digest}")
    assert served.load("a").adapter.digest != estimate.digest


@pytest.mark.full
def test_a_fetch_that_gets_nothing_does_not_keep_it_from_ending(served: Served, proxy: Proxy) -> None:
    proxy.spoil(WEIGHTS_FILE, *[lambda answer: replace(answer, sent=10, end="silence")] * 20)
    request = pb.LoadAdapterRequest(ref="a", source=URI, target_tier=TIER_HOST)
    load = served.raw.adapters.LoadAdapter.future(request, timeout=CALL_SECONDS)
    assert proxy.silent.wait(CALL_SECONDS)
    assert served.sidecar.stop() == 0
    assert load.code() is not None
    assert len([each for each in proxy.requests if (each.method, each.name) == ("GET", WEIGHTS_FILE)]) == 1
