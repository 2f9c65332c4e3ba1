"""Requests that are malformed are refused by the field at fault, whatever is in it, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf import duration_pb2
from slotcar.v1 import adapter_service_pb2 as adapters
from slotcar.v1 import engine_service_pb2 as engine
from slotcar.v1 import model_pb2

from tests.conformance.items import forward, item
from tests.conformance.refusals import Refusal, has_field, read_value, refused
from tests.conformance.target import ABSENT_DIGEST, PATIENCE_SECONDS, Session, Target, entry

SITE = model_pb2.Site(name="q", in_features=8, out_features=8)


class Open(NamedTuple):
    """A server with an adapter that a session has mapped and pinned."""

    target: Target
    session: Session


@pytest.fixture(scope="module")
def opened(server: Target) -> Iterator[Open]:
    server.unload_all()
    server.load("sql")
    with server.session() as session:
        session.set_mapping("sql", None)
        yield Open(server, session)


def call(target: Target, request: Any) -> Refusal:
    """The refusal of the call that takes such a request; the state is the same before and after."""
    method = type(request).__name__.removesuffix("Request")
    stub = target.engine if hasattr(target.engine, method) else target.adapters
    rpc = getattr(stub, method)
    if method in ("OpenSession", "WatchEvents"):
        rpc = _first_of(rpc)
    with target.unchanged():
        return refused(rpc, request, timeout=PATIENCE_SECONDS)


def _first_of(stream: Callable[..., Any]) -> Callable[..., Any]:
    return lambda request, timeout: next(stream(request, timeout=timeout))


def with_ref(target: Target, ref: str) -> list[Any]:
    """One request for each call that takes a ref."""
    return [
        adapters.LoadAdapterRequest(ref=ref, source=str(target.folder("other"))),
        adapters.UnloadAdapterRequest(ref=ref, force=True),
        adapters.KeepAdapterRequest(ref=ref),
        adapters.ReleaseKeepRequest(ref=ref),
        adapters.GetAdapterRequest(ref=ref),
    ]


def mapping(session: str, *entries: engine.MappingEntry) -> engine.SetMappingRequest:
    return engine.SetMappingRequest(session=session, mapping_id=1, entries=entries)


BAD_REFS = {
    "empty": "",
    "parent": "../x",
    "inner-parent": "a/../b",
    "dot": "a/./b",
    "absolute": "/a",
    "two-slashes": "a//b",
    "last-slash": "a/",
    "300": "x" * 300,
    "201": "x" * 201,
    "dash-first": "-rf",
    "blank": "a b",
    "newline": "a\n",
    "nul": "a\0b",
    "escape": "\x1b[31mred",
    "letters": "überadapter",
    "direction": "a\u202eb",
    "short-digest": "sql@sha256:abc",
    "upper-digest": "sql@sha256:" + "A" * 64,
    "no-digest": "sql@",
    "md5": "sql@md5:" + "0" * 32,
    "two-digests": f"sql@{ABSENT_DIGEST}@{ABSENT_DIGEST}",
}


@pytest.mark.parametrize("ref", BAD_REFS.values(), ids=BAD_REFS.keys())
def test_a_malformed_ref_is_refused_by_every_call(opened: Open, ref: str) -> None:
    target, session = opened
    requests = [*with_ref(target, ref), mapping(session.id, entry("sql"), entry(ref))]
    for refusal in (call(target, request) for request in requests):
        assert refusal.reason == "REQUEST_INVALID"
        assert len(refusal.fields) == 1
        assert refusal.metadata["wanted"]
        assert "found" in refusal.metadata


@pytest.mark.parametrize("ref", ["a//b", "sql@sha256:abc"])
def test_a_malformed_ref_is_named_as_the_field_that_it_is(opened: Open, ref: str) -> None:
    """Not as the part of it that is wrong, and with the number of the entry."""
    target, session = opened
    for request in with_ref(target, ref):
        assert call(target, request).fields == ("ref",)
    assert call(target, mapping(session.id, entry("sql"), entry(ref))).fields == ("entries[1].ref",)


@pytest.mark.parametrize("ref", ["nobody", f"sql@{ABSENT_DIGEST}", f"nobody@{ABSENT_DIGEST}"])
def test_an_unknown_ref_is_not_found_by_every_call(opened: Open, ref: str) -> None:
    target, session = opened
    load, *others = with_ref(target, ref)
    load.source = ""
    for refusal in (call(target, request) for request in (load, *others, mapping(session.id, entry(None), entry(ref)))):
        assert refusal.reason == "ADAPTER_NOT_FOUND"
        assert refusal.metadata == {"adapters": ref}
        assert refusal.fields == ()


def test_every_unknown_entry_is_listed_once(opened: Open) -> None:
    target, session = opened
    refs = ["nobody", None, "sql", "none", "nobody"]
    refusal = call(target, mapping(session.id, *map(entry, refs)))
    assert refusal.reason == "ADAPTER_NOT_FOUND"
    assert refusal.metadata == {"adapters": "nobody, none"}


@pytest.mark.parametrize("bad", [engine.MappingEntry(), engine.MappingEntry(base=False)], ids=["neither", "not-base"])
def test_an_entry_without_a_target_is_refused_by_its_index(opened: Open, bad: engine.MappingEntry) -> None:
    refusal = call(opened.target, mapping(opened.session.id, entry("sql"), entry(None), bad))
    assert refusal.reason == "REQUEST_INVALID"
    assert refusal.fields == ("entries[2]",)


def test_repeated_entries_and_none_at_all_are_mappings(opened: Open) -> None:
    session = opened.session
    answer = session.set_mapping("sql", "sql", None, None, "sql", mapping_id=2)
    assert [found.digest != "" for found in answer.entries] == [True, True, False, False, True]
    assert len({found.slot for found in answer.entries if found.digest}) == 1
    assert list(session.set_mapping(mapping_id=2).entries) == []
    session.release_mapping(2)


SESSION_REQUESTS = [
    mapping("", entry("sql")),
    engine.ReleaseMappingRequest(mapping_id=1),
    engine.ForwardRequest(mapping_id=1, generation=1, row_counts=[1]),
]


def test_entries_may_be_said_in_short(opened: Open) -> None:
    """Each target once and an index per entry: the same mapping, with an answer for each target."""
    session, digest = opened.session, opened.target.load("sql").adapter.digest
    short = engine.SetMappingRequest(
        session=session.id, mapping_id=3, targets=[entry("sql"), entry(None)], indices=[0, 1, 0, 0]
    )
    answer = opened.target.engine.SetMapping(short, timeout=PATIENCE_SECONDS)
    assert [found.digest for found in answer.entries] == [digest, ""]
    request = forward(session, answer.generation, [1, 0, 2, 1], item(opened.target, 4), mapping_id=3)
    computed = opened.target.engine.Forward(request, timeout=PATIENCE_SECONDS)
    assert list(computed.digests) == [digest, "", digest, digest]
    session.release_mapping(3)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"targets": [entry("sql")], "indices": [0], "entries": [entry("sql")]}, "entries"),
        ({"targets": [entry("sql")]}, "indices"),
        ({"indices": [0]}, "indices"),
        ({"targets": [entry("sql")], "indices": [0, 1]}, "indices"),
        ({"targets": [entry("sql")], "indices": [2**32 - 1]}, "indices"),
        ({"targets": [entry("sql"), entry(None)], "indices": [1]}, "indices"),
        ({"targets": [entry("sql"), entry("sql")], "indices": [0, 1]}, "targets"),
        ({"targets": [entry("sql"), engine.MappingEntry()], "indices": [0, 1]}, "targets[1]"),
        ({"targets": [entry("a/../b")], "indices": [0]}, "targets[0].ref"),
        ({"targets": [entry("sql")], "indices": [0] * 100_000}, "indices"),
    ],
)
def test_what_is_said_in_short_must_add_up(opened: Open, fields: dict[str, Any], field: str) -> None:
    request = engine.SetMappingRequest(session=opened.session.id, mapping_id=1, **fields)
    refusal = call(opened.target, request)
    assert (refusal.reason, refusal.fields) == ("REQUEST_INVALID", (field,))


@pytest.mark.parametrize("guess", ["", "0" * 32, "'; --", "x" * 1000])
def test_a_guessed_session_is_not_found(opened: Open, guess: str) -> None:
    requests = [engine.OpenSessionRequest(resume_session=guess)] if guess else []
    for template in SESSION_REQUESTS:
        requests.append(type(template)())
        requests[-1].CopyFrom(template)
        requests[-1].session = guess
    for request in requests:
        refusal = call(opened.target, request)
        assert refusal.reason == "SESSION_NOT_FOUND"
        assert refusal.fields == ()


def spec(*sites: model_pb2.Site, **fields: Any) -> engine.OpenSessionRequest:
    return engine.OpenSessionRequest(model_spec=model_pb2.ModelSpec(sites=sites, **fields))


def site(**fields: Any) -> model_pb2.Site:
    return model_pb2.Site(**{"name": "k", "in_features": 8, "out_features": 8} | fields)


PART = model_pb2.SitePart(name="p", out_features=7)
WIDE_PART = model_pb2.SitePart(name="p", out_features=8, copies=2)

# (request, field): the field is where the request is wrong.
BAD_SESSIONS: dict[str, tuple[engine.OpenSessionRequest, str]] = {
    "long-name": (engine.OpenSessionRequest(client_name="x" * 201), "client_name"),
    "control-name": (engine.OpenSessionRequest(client_name="a\x1b[2J"), "client_name"),
    "negative-grace": (engine.OpenSessionRequest(grace=duration_pb2.Duration(seconds=-1)), "grace"),
    "long-grace": (engine.OpenSessionRequest(grace=duration_pb2.Duration(seconds=3601)), "grace"),
    "longer-grace": (engine.OpenSessionRequest(grace=duration_pb2.Duration(seconds=2**62)), "grace"),
    "bad-nanos": (engine.OpenSessionRequest(grace=duration_pb2.Duration(nanos=-1)), "grace"),
    "no-site": (spec(), "model_spec.sites"),
    "site-twice": (spec(SITE, SITE), "model_spec.sites"),
    "dtype": (spec(SITE, dtype=99), "model_spec.dtype"),
    "ranks": (spec(SITE, tensor_parallel=2**32 - 1), "model_spec.tensor_parallel"),
    "renames": (spec(SITE, renames=[model_pb2.Rename()] * 65), "model_spec.renames"),
}
BAD_SITES: dict[str, tuple[engine.OpenSessionRequest, str]] = {
    "no-name": (spec(SITE, site(name="")), "model_spec.sites[1].name"),
    "control-site": (spec(SITE, site(name="a\nb")), "model_spec.sites[1].name"),
    "long-site": (spec(SITE, site(name="x" * 501)), "model_spec.sites[1].name"),
    "no-features": (spec(SITE, site(in_features=0)), "model_spec.sites[1].in_features"),
    "features": (spec(SITE, site(out_features=2**32 - 1)), "model_spec.sites[1].out_features"),
    "kind": (spec(SITE, site(kind=99)), "model_spec.sites[1].kind"),
    "shard": (spec(SITE, site(shard=99)), "model_spec.sites[1].shard"),
    "experts-of-linear": (spec(SITE, site(experts=1)), "model_spec.sites[1].experts"),
    "no-experts": (spec(SITE, site(kind=model_pb2.SITE_KIND_EXPERTS)), "model_spec.sites[1].experts"),
    "experts": (spec(SITE, site(kind=model_pb2.SITE_KIND_EXPERTS, experts=4097)), "model_spec.sites[1].experts"),
    "parts": (spec(SITE, site(parts=[PART])), "model_spec.sites[1].parts"),
    "part-name": (spec(SITE, site(parts=[model_pb2.SitePart(out_features=8)])), "model_spec.sites[1].parts[0].name"),
    "sharded-embedding": (
        spec(SITE, site(kind=model_pb2.SITE_KIND_EMBEDDING, shard=model_pb2.SHARD_ROW)),
        "model_spec.sites[1].shard",
    ),
    "uneven-columns": (
        spec(SITE, site(shard=model_pb2.SHARD_COLUMN), tensor_parallel=3),
        "model_spec.sites[0].out_features",
    ),
    "uneven-rows": (spec(site(shard=model_pb2.SHARD_ROW), tensor_parallel=3), "model_spec.sites[0].in_features"),
    "copies": (
        spec(site(parts=[WIDE_PART], shard=model_pb2.SHARD_COLUMN), tensor_parallel=3),
        "model_spec.sites[0].parts.copies",
    ),
    "rename": (spec(SITE, renames=[model_pb2.Rename(adapter_prefix="a.")]), "model_spec.renames[0]"),
}


@pytest.mark.parametrize(("request_", "field"), BAD_SESSIONS.values(), ids=BAD_SESSIONS.keys())
def test_a_malformed_session_is_refused(opened: Open, request_: engine.OpenSessionRequest, field: str) -> None:
    refusal = call(opened.target, request_)
    assert refusal.reason == "REQUEST_INVALID"
    assert refusal.fields == (field,)
    assert has_field(request_.DESCRIPTOR, field)
    assert refusal.metadata["field"] == field
    assert refusal.metadata["wanted"]


@pytest.mark.parametrize(("request_", "field"), BAD_SITES.values(), ids=BAD_SITES.keys())
def test_a_malformed_site_is_refused(opened: Open, request_: engine.OpenSessionRequest, field: str) -> None:
    refusal = call(opened.target, request_)
    assert refusal.reason == "REQUEST_INVALID"
    assert refusal.metadata["wanted"]
    assert refusal.fields == (field,)


def test_an_unknown_enum_value_is_refused(opened: Open) -> None:
    target = opened.target
    request = adapters.LoadAdapterRequest(ref="other", source=str(target.folder("other")), on_conflict=99)
    refusal = call(target, request)
    assert refusal.reason == "REQUEST_INVALID"
    assert refusal.fields == ("on_conflict",)
    assert refusal.metadata["found"] == "99"


BAD_TOKENS = {
    "word": "garbage",
    "colon": ":",
    "guess": f"{'0' * 32}:1",
    "nul": "\0",
    "long": "x" * 2000,
    "negative": "{name}:-1",
    "none": "{name}:",
    "fraction": "{name}:1.0",
    "superscript": "{name}:²",
    "digits": "{name}:" + "9" * 4301,
}


@pytest.mark.parametrize("token", BAD_TOKENS.values(), ids=BAD_TOKENS.keys())
def test_a_page_token_of_ones_own_making_is_refused(opened: Open, token: str) -> None:
    target = opened.target
    target.load("sql-too", source=str(target.folder("sql")))
    page = target.adapters.ListAdapters(adapters.ListAdaptersRequest(page_size=1), timeout=PATIENCE_SECONDS)
    name = page.next_page_token.rpartition(":")[0]
    refusal = call(target, adapters.ListAdaptersRequest(page_token=token.format(name=name)))
    assert refusal.reason == "REQUEST_INVALID"
    assert refusal.fields == ("page_token",)


# What a caller may send within the limits, and a refusal would repeat.
LONG: dict[str, tuple[Callable[[Open], Any], str]] = {
    "name": (lambda _: adapters.GetAdapterRequest(ref="x" * 100_000), "REQUEST_INVALID"),
    "digest": (lambda _: adapters.GetAdapterRequest(ref="sql@" + "x" * 10_000), "REQUEST_INVALID"),
    "source": (lambda _: adapters.EstimateAdapterRequest(source="/" + "x" * 100_000), "SOURCE_DENIED"),
    "token": (lambda _: adapters.ListAdaptersRequest(page_token="x" * 100_000), "REQUEST_INVALID"),
    "client": (lambda _: engine.OpenSessionRequest(client_name="x" * 100_000), "REQUEST_INVALID"),
    "site-name": (lambda _: spec(site(name="x" * 100_000)), "REQUEST_INVALID"),
    "sites": (lambda _: spec(*(site(name=f"{'x' * 490}{index}") for index in range(99))), "MODEL_MISMATCH"),
    "entries": (
        lambda opened: mapping(opened.session.id, *(entry(f"nobody-{index}") for index in range(1000))),
        "ADAPTER_NOT_FOUND",
    ),
    "names": (
        lambda opened: mapping(opened.session.id, *(entry(f"{'x' * 190}-{index}") for index in range(30))),
        "ADAPTER_NOT_FOUND",
    ),
    "mapped-name": (lambda opened: mapping(opened.session.id, entry("x" * 100_000)), "REQUEST_INVALID"),
}


@pytest.mark.parametrize(("make", "reason"), LONG.values(), ids=LONG.keys())
def test_a_refusal_of_something_long_arrives_whole(opened: Open, make: Callable[[Open], Any], reason: str) -> None:
    """gRPC drops trailers over 8 KiB, and then the caller sees RESOURCE_EXHAUSTED without a reason."""
    assert call(opened.target, make(opened)).reason == reason


UNREADABLE = {"no-tag": b"\xff\xff\xff", "cut": b"\x0a\x7fabc", "no-utf8": b"\x0a\x02\xff\xfe"}


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE.keys())
@pytest.mark.parametrize("method", ["AdapterService/GetAdapter", "EngineService/Forward"])
def test_bytes_that_are_no_message_are_refused(opened: Open, method: str, data: bytes) -> None:
    rpc = opened.target.channel.unary_unary(f"/slotcar.v1.{method}")
    with opened.target.unchanged():
        refusal = refused(rpc, data, timeout=PATIENCE_SECONDS)
    assert (refusal.reason, refusal.metadata["field"]) == ("REQUEST_INVALID", "request")


def test_a_stream_goes_on_after_bytes_that_are_no_message(opened: Open) -> None:
    read = engine.ForwardStreamResponse.FromString
    rpc = opened.target.channel.stream_stream("/slotcar.v1.EngineService/ForwardStream", response_deserializer=read)
    with opened.target.unchanged():
        answers = rpc(iter([*UNREADABLE.values(), b""]), timeout=PATIENCE_SECONDS)
        refusals = [read_value(answer.error) for answer in answers]
    assert [refusal.reason for refusal in refusals] == ["REQUEST_INVALID"] * 4
    assert [refusal.metadata["field"] for refusal in refusals] == [*["request"] * 3, "forward"]


def test_an_unknown_method_is_unimplemented(opened: Open) -> None:
    rpc = opened.target.channel.unary_unary("/slotcar.v1.AdapterService/Nothing")
    with pytest.raises(grpc.RpcError) as caught:
        rpc(b"", timeout=PATIENCE_SECONDS)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_caller_that_gives_up_at_once_changes_nothing(opened: Open) -> None:
    target, session = opened
    requests = [*with_ref(target, "nobody")[1:], mapping(session.id, entry("nobody"))]
    with target.unchanged():
        for request in requests:
            method = type(request).__name__.removesuffix("Request")
            stub = target.engine if hasattr(target.engine, method) else target.adapters
            future = getattr(stub, method).future(request, timeout=PATIENCE_SECONDS)
            future.cancel()
            with suppress(grpc.RpcError, grpc.FutureCancelledError):
                future.result()
