"""LoadAdapterStream: adapters that come with the call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from slotcar.v1 import adapter_service_pb2 as pb
from slotcar.v1.adapter_pb2 import TIER_DEVICE, TIER_HOST, TIER_SOURCE

from tests.adapters import CONFIG_FILE, WEIGHTS_FILE
from tests.conformance.calls import parts, refusal_of
from tests.conformance.items import delta, forward, item, tensor
from tests.conformance.refusals import Refusal, refused
from tests.conformance.target import ABSENT_DIGEST, PATIENCE_SECONDS, Target
from tests.tolerances import assert_close
from tests.waiting import eventually

Part = pb.LoadAdapterStreamRequest
MOST_AT_A_TIME = 4


def upload(target: Target, sent: list[Part]) -> pb.LoadAdapterStreamResponse:
    return target.adapters.LoadAdapterStream(iter(sent), timeout=PATIENCE_SECONDS)


def of(target: Target, name: str, /, **header: Any) -> list[Part]:
    """All parts of the sound adapter of that name, which becomes its ref."""
    return parts(target.folder(name), name, **header)


@pytest.mark.parametrize("chunk_bytes", [97, 1 << 20])
def test_an_upload_is_an_adapter_like_any_other(target: Target, chunk_bytes: int) -> None:
    answer = upload(target, parts(target.folder("sql"), "sql", chunk_bytes))
    assert (answer.adapter.tier, answer.adapter.source, answer.already_resident) == (TIER_DEVICE, "", False)
    assert [site.name for site in answer.report.sites_matched] == [target.site.name]
    estimate = pb.EstimateAdapterRequest(source=str(target.folder("sql")))
    assert target.adapters.EstimateAdapter(estimate, timeout=PATIENCE_SECONDS).digest == answer.adapter.digest
    with target.session() as session:
        one = item(target, 2)
        request = forward(session, session.set_mapping("sql").generation, [2], one)
        output = target.engine.Forward(request, timeout=PATIENCE_SECONDS).outputs[0]
    assert_close(tensor(output), delta(target, "sql", tensor(one.x)))


def test_an_evicted_upload_comes_back_from_memory(target: Target) -> None:
    digest = upload(target, of(target, "sent")).adapter.digest
    target.fill_slots()
    with target.session() as session:
        assert session.set_mapping("sent", load=True).entries[0].digest == digest
    target.fill_slots()
    again = target.load("sent", source="")
    assert (again.adapter.digest, again.adapter.tier, again.already_resident) == (digest, TIER_DEVICE, False)


def test_an_upload_does_what_its_header_says(target: Target) -> None:
    answer = upload(target, of(target, "sql", target_tier=TIER_HOST))
    assert (answer.adapter.tier, answer.adapter.keep) == (TIER_HOST, False)
    digest = answer.adapter.digest
    answer = upload(target, parts(target.folder("sql"), f"sql@{digest}", keep=True))
    assert (answer.adapter.tier, answer.adapter.keep, answer.adapter.digest) == (TIER_DEVICE, True, digest)
    replaced = upload(target, parts(target.folder("chat"), "sql", on_conflict=pb.ON_CONFLICT_REPLACE))
    assert replaced.adapter.digest != digest
    assert [(adapter.name, adapter.keep) for adapter in target.state().adapters] == [("sql", True)]


def test_an_upload_may_be_refused_like_a_load(target: Target) -> None:
    found = upload(target, of(target, "sql")).adapter.digest
    sent = parts(target.folder("chat"), "sql")
    refusal = refusal_of(target, *sent)
    assert (refusal.reason, refusal.metadata["found"]) == ("ADAPTER_CONFLICT", found)
    sent = parts(target.folder("sql"), f"sql@{ABSENT_DIGEST}")
    refusal = refusal_of(target, *sent)
    assert (refusal.reason, refusal.metadata["found"], refusal.fields) == ("DIGEST_MISMATCH", found, ())
    target.adapters.KeepAdapter(pb.KeepAdapterRequest(ref="sql"), timeout=PATIENCE_SECONDS)
    sent = parts(target.folder("chat"), "sql", on_conflict=pb.ON_CONFLICT_REPLACE, target_tier=TIER_HOST)
    assert refusal_of(target, *sent).fields == ("header.target_tier",)
    target.unload_all()
    names = target.fill_slots()
    with target.session() as session:
        session.set_mapping(*names)
        refusal = refusal_of(target, *of(target, "new"))
        assert refusal.reason == "SLOTS_EXHAUSTED"
        assert refusal.retry_seconds


def header(**fields: Any) -> Callable[[Target], list[Part]]:
    return lambda target: of(target, "new", **fields)


def order(*indexes: int) -> Callable[[Target], list[Part]]:
    """Parts by their place in (header, config, weights)."""

    def make(target: Target) -> list[Part]:
        sent = parts(target.folder("new"), "new", 1 << 20)
        assert len(sent) == 3
        return [sent[index] for index in indexes]

    return make


def then(*more: Part) -> Callable[[Target], list[Part]]:
    return lambda target: [*of(target, "new"), *more]


INVALID, EXCEEDED = "REQUEST_INVALID", "CAPACITY_EXCEEDED"
MALFORMED: dict[str, tuple[Callable[[Target], list[Part]], str, str | None]] = {
    "nothing-said": (lambda _: [Part()], INVALID, "part"),
    "no-header": (order(1, 2), INVALID, "part"),
    "weights-for-a-header": (order(2), INVALID, "part"),
    "header-alone": (order(0), INVALID, "config"),
    "no-config": (order(0, 2), INVALID, "config"),
    "no-weights": (order(0, 1), INVALID, "weights"),
    "half-the-config": (lambda target: parts(target.folder("new"), "new", 10)[:2], INVALID, "config"),
    "half-the-weights": (lambda target: of(target, "new")[:-1], INVALID, "weights"),
    "two-headers": (order(0, 0, 1, 2), INVALID, "part"),
    "header-in-the-middle": (order(0, 1, 0, 2), INVALID, "part"),
    "header-at-the-end": (order(0, 1, 2, 0), INVALID, "part"),
    "weights-first": (order(0, 2, 1), INVALID, "config"),
    "config-twice": (order(0, 1, 1, 2), INVALID, "config"),
    "config-after-weights": (order(0, 1, 2, 1), INVALID, "config"),
    "weights-twice": (order(0, 1, 2, 2), INVALID, "weights"),
    "empty-part": (then(Part()), INVALID, "part"),
    "one-byte-more": (then(Part(weights=b"\0")), INVALID, "weights"),
    "no-config-size": (header(config_bytes=0), INVALID, "header.config_bytes"),
    "no-weights-size": (header(weights_bytes=0), INVALID, "header.weights_bytes"),
    "small-config": (header(config_bytes=1), INVALID, "config"),
    "small-weights": (header(weights_bytes=1), INVALID, "weights"),
    "large-config": (header(config_bytes=1000), INVALID, "config"),
    "large-weights": (header(weights_bytes=100_000), INVALID, "weights"),
    "huge-config": (header(config_bytes=2**64 - 1), EXCEEDED, None),
    "huge-weights": (header(weights_bytes=2**64 - 1), EXCEEDED, None),
    "no-ref": (header(ref=""), INVALID, "header.ref"),
    "bad-ref": (header(ref="../new"), INVALID, "header.ref"),
    "bad-digest": (header(ref="new@sha256:0"), INVALID, "header.ref"),
    "on-conflict": (header(on_conflict=99), INVALID, "header.on_conflict"),
    "tier-unknown": (header(target_tier=99), INVALID, "header.target_tier"),
    "tier-source": (header(target_tier=TIER_SOURCE), INVALID, "header.target_tier"),
    "keep-in-memory": (header(keep=True, target_tier=TIER_HOST), INVALID, "header.target_tier"),
}


@pytest.mark.parametrize(("make", "reason", "field"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_upload_is_refused(
    target: Target, make: Callable[[Target], list[Part]], reason: str, field: str | None
) -> None:
    """And when that is because of what came too early or too often, the server has not read on."""
    refusal = refusal_of(target, *make(target))
    assert (refusal.reason, refusal.fields) == (reason, (field,) if field else ())
    assert "found" in refusal.metadata
    assert refusal.metadata["wanted"]


def test_an_upload_of_nothing_is_refused(target: Target) -> None:
    with target.unchanged():
        refusal = refused(upload, target, [])
    assert (refusal.reason, refusal.fields, refusal.metadata["found"]) == (INVALID, ("part",), "nothing")


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
def test_bytes_that_are_no_adapter_are_refused_by_their_file(target: Target, file: str) -> None:
    sent = parts(target.folder("new"), "new", 1 << 20)
    spoiled = sent[1:2] if file == CONFIG_FILE else sent[2:3]
    for part in spoiled:
        data = part.config or part.weights
        setattr(part, str(part.WhichOneof("part")), b"\xff" * len(data))
    refusal = refusal_of(target, *sent)
    assert (refusal.reason, refusal.metadata["file"], refusal.subjects) == ("ADAPTER_INVALID", file, (file,))


# Streams that stop


class Open:
    """An upload that has sent some parts and goes on only when it is told to."""

    def __init__(self, target: Target, sent: list[Part]) -> None:
        self._sent = sent
        self._go_on = threading.Event()
        self.call = target.adapters.LoadAdapterStream.future(self._feed(), timeout=PATIENCE_SECONDS)

    def cancel(self) -> None:
        self.call.cancel()
        self._go_on.set()

    def half_close(self) -> Refusal:
        """Ends the sending side."""
        self._go_on.set()
        return refused(self.call.result)

    def _feed(self) -> Iterator[Part]:
        yield from self._sent
        self._go_on.wait(PATIENCE_SECONDS)


def test_an_upload_that_stops_half_way_has_no_effect(target: Target) -> None:
    """Cancelled as often as one likes, the next one finds its room."""
    target.load("sql")
    sent = of(target, "new")
    with target.unchanged():
        for count in range(1, len(sent) + 1):
            Open(target, sent[:count]).cancel()
        for count in range(1, len(sent)):
            refusal = Open(target, sent[:count]).half_close()
            assert refusal.reason in (INVALID, EXCEEDED)
    eventually(lambda: not is_full(target))
    assert upload(target, sent).adapter.tier == TIER_DEVICE


def is_full(target: Target) -> bool:
    """Whether an upload, which would be refused in any case, is refused for others that are under way."""
    return refused(upload, target, of(target, "new")[:-1]).reason == EXCEEDED


def test_so_many_uploads_at_a_time_and_no_more(target: Target) -> None:
    uploads = [Open(target, of(target, f"slow-{number}")[:-1]) for number in range(MOST_AT_A_TIME)]
    eventually(lambda: is_full(target))
    refusal = refusal_of(target, *of(target, "new"))
    facts = {"found": str(MOST_AT_A_TIME), "wanted": str(MOST_AT_A_TIME)}
    assert (refusal.reason, refusal.metadata, refusal.fields) == (EXCEEDED, facts, ())
    # A load from a folder is none of them.
    target.load("sql")
    for under_way in uploads:
        assert under_way.half_close().fields == ("weights",)
    assert upload(target, of(target, "new")).adapter.name == "new"


def test_a_caller_that_goes_away_ends_its_upload(target: Target) -> None:
    uploads = [Open(target, of(target, "new")[:2]) for _ in range(MOST_AT_A_TIME)]
    eventually(lambda: is_full(target))
    for under_way in uploads:
        under_way.cancel()
    eventually(lambda: not is_full(target))
    assert {under_way.call.code() for under_way in uploads} == {grpc.StatusCode.CANCELLED}
    assert list(target.state().adapters) == []
