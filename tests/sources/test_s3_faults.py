"""The S3 source through a proxy that spoils answers: what is overcome, what is refused, and after how many requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from slotcar_sidecar.core.errors import AdapterInvalid, ShuttingDown, SourceUnavailable
from slotcar_sidecar.store.sources import s3
from slotcar_sidecar.store.sources.fetch import MAX_TRIES

from tests.adapters import CONFIG_FILE, MINIMAL_CONFIG, WEIGHTS_FILE, raw_tensors, write_raw_adapter
from tests.sources.bucket import SECRET, SITE, URI, Clock, Counts, sources, upload
from tests.sources.proxy import Answer, Fault, Proxy


class Bench:
    """Sources that read through the proxy, with time of their own."""

    def __init__(self, proxy: Proxy, folder: Path) -> None:
        self.clock, self.counts, self.proxy = Clock(), Counts(), proxy
        self.sources = sources(proxy.url, folder.parent, self.clock, self.counts)
        self.folder = folder

    def digest(self) -> str:
        return str(self.sources.read(URI).adapter.digest)

    def wanted(self) -> str:
        return str(self.sources.read(str(self.folder)).adapter.digest)

    def asked(self, name: str = WEIGHTS_FILE, method: str = "GET") -> list[str]:
        """The ranges that were asked for."""
        return [each.range for each in self.proxy.requests if (each.method, each.name) == (method, name)]


@pytest.fixture
def bench(proxy: Proxy, folder: Path) -> Bench:
    return Bench(proxy, folder)


def status(number: int, code: str) -> Fault:
    body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    headers = {"Content-Type": "application/xml", "Content-Length": str(len(body))}
    return lambda _: Answer(number, headers, body)


def half(answer: Answer) -> Answer:
    return replace(answer, sent=len(answer.body) // 2)


def reset_midway(answer: Answer) -> Answer:
    return replace(answer, sent=len(answer.body) // 2, end="reset")


def other_etag(answer: Answer) -> Answer:
    return answer.with_header("ETag", '"0"')


def other_range(answer: Answer) -> Answer:
    return answer.with_header("Content-Range", f"bytes 1-{len(answer.body)}/{len(answer.body)}")


SLOW_DOWN = status(503, "SlowDown")


@pytest.mark.parametrize(
    ("faults", "retried"),
    [
        ((SLOW_DOWN,) * (MAX_TRIES - 1), ["throttled"] * (MAX_TRIES - 1)),
        ((status(500, "InternalError"), status(429, "TooManyRequests")), ["server", "throttled"]),
        ((half, SLOW_DOWN), ["truncated", "throttled"]),
        ((other_etag,), ["changed"]),
        ((other_range,), ["changed"]),
        ((status(412, "PreconditionFailed"),), ["changed"]),
    ],
)
def test_what_passes_is_overcome(bench: Bench, faults: tuple[Fault, ...], retried: list[str]) -> None:
    bench.proxy.spoil(WEIGHTS_FILE, *faults)
    assert bench.digest() == bench.wanted()
    assert bench.counts.retried == retried
    assert not bench.proxy.faults


def test_a_cut_body_goes_on_where_it_stopped(bench: Bench) -> None:
    bench.proxy.spoil(WEIGHTS_FILE, half, half)
    assert bench.digest() == bench.wanted()
    size = (bench.folder / WEIGHTS_FILE).stat().st_size
    starts = [0, size // 2, size // 2 + (size - size // 2) // 2]
    assert bench.asked() == [f"bytes={start}-" for start in starts]
    (etag,) = {each.if_match for each in bench.proxy.requests if (each.method, each.name) == ("GET", WEIGHTS_FILE)}
    assert etag.startswith('"')
    assert bench.counts.bytes == size + (bench.folder / CONFIG_FILE).stat().st_size


def test_a_reset_in_a_body_is_overcome(bench: Bench) -> None:
    bench.proxy.spoil(WEIGHTS_FILE, reset_midway)
    assert bench.digest() == bench.wanted()
    assert bench.counts.retried == ["connection"]


def test_resets_of_connections_are_overcome(bench: Bench) -> None:
    bench.proxy.resets = MAX_TRIES - 1
    assert bench.digest() == bench.wanted()
    assert bench.counts.retried == ["connection"] * (MAX_TRIES - 1)


@pytest.mark.parametrize(
    ("fault", "found", "asked"),
    [
        (SLOW_DOWN, "throttled", MAX_TRIES),
        (status(403, "AccessDenied"), "forbidden", 1),
        (status(400, "InvalidArgument"), "refused", 1),
        (status(404, "NoSuchBucket"), "missing", 1),
        (lambda answer: replace(answer, sent=0), "truncated", MAX_TRIES),
        (other_etag, "changed", 2),
        (other_range, "changed", 2),
    ],
)
def test_what_stays_is_refused(bench: Bench, fault: Fault, found: str, asked: int) -> None:
    bench.proxy.spoil(WEIGHTS_FILE, *[fault] * 20)
    with pytest.raises(SourceUnavailable) as caught:
        bench.digest()
    assert caught.value.facts["found"] == found
    assert len(bench.asked()) == asked
    assert bench.counts.failed[-1] == found
    assert SECRET not in caught.value.message + str(caught.value.facts)


def test_resets_without_end_are_refused(bench: Bench) -> None:
    bench.proxy.resets = 100
    with pytest.raises(SourceUnavailable, match=f"at {MAX_TRIES} tries"):
        bench.digest()
    assert bench.proxy.resets == 100 - MAX_TRIES


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (status(403, "AccessDenied"), "forbidden"),
        (lambda answer: replace(answer, headers={"Content-Length": "9"}), "failed"),
        (lambda answer: answer.with_header("Content-Length", "many"), "failed"),
    ],
)
def test_answers_to_a_look_that_are_no_use_are_refused(bench: Bench, fault: Fault, found: str) -> None:
    bench.proxy.spoil(CONFIG_FILE, fault, method="HEAD")
    with pytest.raises(SourceUnavailable) as caught:
        bench.sources.version(URI)
    assert caught.value.facts["found"] == found


def test_a_file_that_is_not_there_is_the_adapters_fault(bench: Bench) -> None:
    bench.proxy.spoil(CONFIG_FILE, status(404, "NoSuchKey"), method="HEAD")
    with pytest.raises(AdapterInvalid, match=r"has no adapter_config\.json"):
        bench.digest()
    assert bench.counts.retried == []


def test_a_file_that_goes_before_it_is_read_is_tried_as_a_change(bench: Bench) -> None:
    bench.proxy.spoil(WEIGHTS_FILE, status(404, "NoSuchKey"))
    assert bench.digest() == bench.wanted()
    assert bench.counts.retried == ["changed"]


def test_a_slow_body_ends_with_the_time_of_the_fetch(bench: Bench) -> None:
    def slow(answer: Answer) -> Answer:
        bench.clock.wait(61.0)
        return answer

    bench.proxy.spoil(WEIGHTS_FILE, slow)
    with pytest.raises(SourceUnavailable, match="--fetch-seconds 60") as caught:
        bench.digest()
    assert caught.value.facts["found"] == "timeout"


def test_shut_down_does_not_wait_for_the_rest_of_a_body(bench: Bench) -> None:
    """What came is seen as it comes: the proxy would never send the rest."""
    bench.proxy.spoil(WEIGHTS_FILE, lambda answer: replace(answer, sent=100, end="silence"))
    fetched = bench.counts.fetched

    def stop(scheme: str, count: int) -> None:
        fetched(scheme, count)
        if bench.proxy.silent.is_set():
            bench.clock.stopped.set()

    bench.counts.fetched = stop  # type: ignore[method-assign]
    with pytest.raises(ShuttingDown):
        bench.digest()


def test_a_silent_connection_is_broken(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "_SILENT_SECONDS", 0.5)
    bench.proxy.spoil(WEIGHTS_FILE, lambda answer: replace(answer, sent=100, end="silence"))
    assert bench.digest() == bench.wanted()
    assert bench.counts.retried == ["connection"]
    assert bench.asked() == ["bytes=0-", "bytes=100-"]


def rewritten(bench: Bench) -> Callable[[Answer], Answer]:
    """The bucket has other bytes from this answer on."""

    def fault(answer: Answer) -> Answer:
        write_raw_adapter(bench.folder, MINIMAL_CONFIG, raw_tensors(SITE, seed=9))
        upload(bench.proxy.endpoint, bench.folder)
        return answer

    return fault


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_an_adapter_that_is_replaced_meanwhile_is_read_as_it_is_then(bench: Bench, name: str) -> None:
    before = bench.wanted()
    bench.proxy.spoil(name, rewritten(bench))
    assert bench.digest() == bench.wanted() != before
    assert bench.counts.retried == ["changed"]


def test_an_adapter_that_is_replaced_after_a_look_is_read_as_it_is_then(bench: Bench) -> None:
    estimated, version = bench.digest(), bench.sources.version(URI)
    write_raw_adapter(bench.folder, MINIMAL_CONFIG, raw_tensors(SITE, seed=9))
    upload(bench.proxy.endpoint, bench.folder)
    assert bench.sources.version(URI) != version
    assert bench.digest() == bench.wanted() != estimated
