"""Forwards that do not fit are refused by the field at fault, alike on both planes, and the next one is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from slotcar.v1 import engine_service_pb2 as pb
from slotcar.v1 import tensor_pb2

from tests.conformance.items import delta, forward, item, matrix, tensor
from tests.conformance.refusals import Refusal, has_field, read_value, refused
from tests.conformance.target import PATIENCE_SECONDS, Session, Streamed, Target
from tests.tolerances import assert_close

ROWS = [2, 1]
COUNT = sum(ROWS)
FLOAT16 = tensor_pb2.DTYPE_FLOAT16


class Ready(NamedTuple):
    """A mapping of an adapter and the base model, and a way to ask for it."""

    target: Target
    session: Session
    generation: int
    plane: str
    stream: Streamed

    def forward(self, *items: pb.ForwardItem, **fields: Any) -> pb.ForwardRequest:
        return forward(self.session, self.generation, ROWS, *items, **fields)

    def item(self, **fields: Any) -> pb.ForwardItem:
        return item(self.target, COUNT, **fields)

    def x(self, **fields: Any) -> tensor_pb2.TensorRef:
        return matrix(COUNT, self.target.site.in_features, **fields)

    def base(self, **fields: Any) -> tensor_pb2.TensorRef:
        return matrix(COUNT, self.target.site.out_features, **fields)

    def answer(self, request: pb.ForwardRequest) -> pb.ForwardResponse:
        if self.plane == "unary":
            return self.target.engine.Forward(request, timeout=PATIENCE_SECONDS)
        response = self.stream.ask(pb.ForwardStreamRequest(forward=request))
        assert response.WhichOneof("result") == "forward", response
        return response.forward

    def refusal(self, request: pb.ForwardRequest) -> Refusal:
        if self.plane == "unary":
            return refused(self.target.engine.Forward, request, timeout=PATIENCE_SECONDS)
        response = self.stream.ask(pb.ForwardStreamRequest(forward=request))
        assert response.WhichOneof("result") == "error", response
        return read_value(response.error)


@pytest.fixture(scope="module", params=["unary", "stream"])
def ready(server: Target, request: pytest.FixtureRequest) -> Iterator[Ready]:
    """On the stream, every request of the module travels on one stream, the good ones between the bad."""
    server.unload_all()
    server.load("sql")
    stream = Streamed(server)
    with server.session() as session, server.session() as other:
        other.set_mapping("sql", mapping_id=2)
        yield Ready(server, session, session.set_mapping("sql", None).generation, request.param, stream)
    stream.close()


class Case(NamedTuple):
    """How to make the request, and the refusal: its reason and its metadata."""

    name: str
    make: Callable[[Ready], pb.ForwardRequest]
    reason: str
    facts: dict[str, str]


def one(**fields: Any) -> Callable[[Ready], pb.ForwardRequest]:
    """A sound request but for these fields of its x."""
    return lambda r: r.forward(r.item(x=r.x(**fields)))


def counts(*row_counts: int) -> Callable[[Ready], pb.ForwardRequest]:
    return lambda r: r.forward(r.item(), row_counts=row_counts)


def shape(field: str, found: str, wanted: str = "*", **facts: str) -> dict[str, str]:
    return {"field": field, "found": found, "wanted": wanted} | facts


INVALID, SHAPE = "REQUEST_INVALID", "SHAPE_MISMATCH"
ONE_COLUMN_LESS = {"columns": 1}
CASES = [
    # Rows.
    Case("no-counts", counts(), SHAPE, shape("row_counts", "0 counts", "2 counts")),
    Case("one-count", counts(3), SHAPE, shape("row_counts", "1 counts", "2 counts")),
    Case("three-counts", counts(1, 1, 1), SHAPE, shape("row_counts", "3 counts", "2 counts")),
    Case("sum-too-small", counts(1, 1), SHAPE, shape("items[0].x", "*")),
    Case("sum-too-large", counts(2, 2), SHAPE, shape("items[0].x", "*")),
    Case("no-rows-but-x", counts(0, 0), SHAPE, shape("items[0].x", "*")),
    Case("huge-count", counts(2**40, 1), INVALID, shape("row_counts", f"{2**40 + 1} rows")),
    Case("sum-over-64-bits", counts(2**64 - 1, 2**64 - 1), INVALID, shape("row_counts", f"{2**65 - 2} rows")),
    Case(
        "huge-count-huge-x",
        lambda r: r.forward(r.item(x=r.x(rows=2**40)), row_counts=[2**40, 0]),
        SHAPE,
        shape("items[0].x.inline", "*"),
    ),
    # The bytes of x.
    Case("no-dtype", one(dtype=0), SHAPE, shape("items[0].x.dtype", "unspecified")),
    Case("short", one(inline=b"123"), SHAPE, shape("items[0].x.inline", "3 bytes")),
    Case("empty", one(inline=b""), SHAPE, shape("items[0].x.inline", "0 bytes")),
    Case(
        "long", lambda r: r.forward(r.item(x=r.x(inline=r.x().inline + b"\0"))), SHAPE, shape("items[0].x.inline", "*")
    ),
    Case(
        "half-the-bytes", one(dtype=tensor_pb2.DTYPE_FLOAT32, inline=b"\0" * 12), SHAPE, shape("items[0].x.inline", "*")
    ),
    Case("stride-too-small", one(row_stride=1), SHAPE, shape("items[0].x.row_stride", "1")),
    Case("stride-too-large", one(row_stride=2**40), SHAPE, shape("items[0].x.inline", "*")),
    Case("stride-of-64-bits", one(row_stride=2**64 - 1), SHAPE, shape("items[0].x.inline", "*")),
    Case("huge-shape-no-bytes", one(rows=2**40, columns=0, inline=b""), SHAPE, shape("items[0].x", "*")),
    Case("no-storage", lambda r: r.forward(r.item(x=no_bytes(r))), INVALID, shape("items[0].x.storage", "nothing")),
    # Its shape.
    Case("one-row-more", lambda r: r.forward(item(r.target, COUNT + 1)), SHAPE, shape("items[0].x", "*", site="*")),
    Case("one-row-less", lambda r: r.forward(item(r.target, COUNT - 1)), SHAPE, shape("items[0].x", "*", site="*")),
    Case("one-column", lambda r: r.forward(r.item(x=matrix(COUNT, 1))), SHAPE, shape("items[0].x", "[3, 1]", site="*")),
    Case(
        "transposed",
        lambda r: r.forward(r.item(x=matrix(r.target.site.in_features, COUNT))),
        SHAPE,
        shape("items[0].x", "*", site="*"),
    ),
    # Items.
    Case("no-items", lambda r: r.forward(), INVALID, shape("items", "no item")),
    Case("no-x", lambda r: r.forward(pb.ForwardItem(site=r.target.site.name)), INVALID, shape("items[0].x", "nothing")),
    Case("no-site", lambda r: r.forward(r.item(site="")), "SITE_UNKNOWN", {"field": "items[0].site", "site": ""}),
    Case(
        "unknown-site",
        lambda r: r.forward(r.item(), r.item(site="model.layers.99.q_proj")),
        "SITE_UNKNOWN",
        {"field": "items[1].site", "site": "model.layers.99.q_proj"},
    ),
    Case("site-in-part", lambda r: r.forward(r.item(site=r.target.site.name[:-1])), "SITE_UNKNOWN", {"site": "*"}),
    Case(
        "second-item",
        lambda r: r.forward(r.item(), r.item(site=other_width(r), x=matrix(1, 1))),
        SHAPE,
        shape("items[1].x", "[1, 1]", site="*"),
    ),
    Case("site-twice", lambda r: r.forward(r.item(), r.item()), INVALID, shape("items[1].site", "*")),
    Case(
        "shared-x-of-another-width",
        lambda r: r.forward(r.item(), pb.ForwardItem(site=other_width(r))),
        SHAPE,
        shape("items[1].x", "*", site="*"),
    ),
    Case("mode", lambda r: r.forward(r.item(mode=99)), INVALID, shape("items[0].mode", "99")),
    # The base model's output.
    Case(
        "base-in-delta",
        lambda r: r.forward(r.item(mode=pb.FORWARD_MODE_DELTA, base=r.base())),
        INVALID,
        shape("items[0].base", "present"),
    ),
    Case("base-in-default", lambda r: r.forward(r.item(base=r.base())), INVALID, shape("items[0].base", "present")),
    Case(
        "no-base-in-add",
        lambda r: r.forward(r.item(mode=pb.FORWARD_MODE_ADD)),
        INVALID,
        shape("items[0].base", "nothing"),
    ),
    Case(
        "short-base",
        lambda r: r.forward(r.item(mode=pb.FORWARD_MODE_ADD, base=r.base(inline=b""))),
        SHAPE,
        shape("items[0].base.inline", "0 bytes"),
    ),
    Case(
        "base-of-x's-width",
        lambda r: r.forward(r.item(mode=pb.FORWARD_MODE_ADD, base=r.x())),
        SHAPE,
        shape("items[0].base", "*", site="*"),
    ),
    Case(
        "base-of-another-dtype",
        lambda r: r.forward(r.item(mode=pb.FORWARD_MODE_ADD, base=r.base(dtype=FLOAT16))),
        SHAPE,
        shape("items[0].base.dtype", "float16", "float32", site="*"),
    ),
    # Who and what it is for.
    Case("guessed-session", lambda r: r.forward(r.item(), session="0" * 32), "SESSION_NOT_FOUND", {}),
    Case("no-session", lambda r: r.forward(r.item(), session=""), "SESSION_NOT_FOUND", {}),
    Case("unknown-mapping", lambda r: r.forward(r.item(), mapping_id=9), "MAPPING_NOT_FOUND", {"mapping_id": "9"}),
    Case("mapping-of-another", lambda r: r.forward(r.item(), mapping_id=2), "MAPPING_NOT_FOUND", {"mapping_id": "2"}),
    Case(
        "huge-mapping-id",
        lambda r: r.forward(r.item(), mapping_id=2**64 - 1),
        "MAPPING_NOT_FOUND",
        {"mapping_id": str(2**64 - 1)},
    ),
    Case(
        "the-future",
        lambda r: r.forward(r.item(), generation=r.generation + 1),
        "LAYOUT_STALE",
        {"entries": "*", "found": "*", "wanted": "*"},
    ),
    Case(
        "the-far-future",
        lambda r: r.forward(r.item(), generation=2**64 - 1),
        "LAYOUT_STALE",
        {"entries": "*", "found": str(2**64 - 1), "wanted": "*"},
    ),
    Case("the-past", lambda r: r.forward(r.item(), generation=1), "LAYOUT_STALE", {"entries": "*", "found": "1"}),
    Case("no-generation", lambda r: r.forward(r.item(), generation=0), "LAYOUT_STALE", {"entries": "*", "found": "0"}),
]


def no_bytes(ready: Ready) -> tensor_pb2.TensorRef:
    x = ready.x()
    x.ClearField("storage")
    return x


def other_width(ready: Ready) -> str:
    """A site whose input has another width than the first one's."""
    sites = ready.target.model.sites
    return next(site.name for site in sites if site.in_features != sites[0].in_features)


def check_answer(ready: Ready) -> None:
    answer = ready.answer(ready.forward(ready.item()))
    wanted = delta(ready.target, "sql", tensor(ready.x()))
    wanted[ROWS[0] :] = 0
    assert_close(tensor(answer.outputs[0]), wanted)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_forward_that_does_not_fit_is_refused(ready: Ready, case: Case) -> None:
    request = case.make(ready)
    with ready.target.unchanged():
        refusal = ready.refusal(request)
    assert refusal.reason == case.reason, refusal
    for name, value in case.facts.items():
        assert name in refusal.metadata
        assert value in ("*", refusal.metadata[name])
    field = refusal.metadata.get("field")
    assert field is None or has_field(request.DESCRIPTOR, field)
    if ready.plane == "unary":
        assert refusal.fields == ((field,) if field else ())
    check_answer(ready)


def test_an_unknown_dtype_is_shown(ready: Ready) -> None:
    refusal = ready.refusal(ready.forward(ready.item(x=ready.x(dtype=99))))
    assert (refusal.reason, refusal.metadata["field"]) == (SHAPE, "items[0].x.dtype")
    assert refusal.metadata["found"] == "99"


@pytest.mark.parametrize("stride", [2**40, 2**63 - 1, 2**63, 2**64 - 1])
def test_the_stride_of_a_single_row_means_nothing(ready: Ready, stride: int) -> None:
    """However large: there is no second row at that distance, and what computes takes 63 bits at most."""
    for rows in ([1, 0], [0, 0]):
        x = matrix(sum(rows), ready.target.site.in_features, row_stride=stride)
        answer = ready.answer(ready.forward(ready.item(x=x), row_counts=rows))
        assert_close(tensor(answer.outputs[0]), delta(ready.target, "sql", tensor(x)))


def test_a_stream_goes_on_after_a_request_without_a_forward(ready: Ready) -> None:
    if ready.plane == "unary":
        assert ready.refusal(pb.ForwardRequest()).reason == "SESSION_NOT_FOUND"
        return
    response = ready.stream.ask(pb.ForwardStreamRequest())
    refusal = read_value(response.error)
    assert refusal.reason == INVALID
    assert refusal.metadata == {"field": "forward", "found": "nothing", "wanted": "a request"}
    check_answer(ready)


def test_answers_come_in_the_order_of_requests_that_were_sent_ahead(ready: Ready) -> None:
    if ready.plane == "unary":
        return
    requests = [ready.forward(ready.item()) if n % 3 else ready.forward(session=f"nobody-{n}") for n in range(30)]
    for request in requests:
        ready.stream.send(pb.ForwardStreamRequest(forward=request))
    kinds = [next(ready.stream.call).WhichOneof("result") for _ in requests]
    assert kinds == ["forward" if n % 3 else "error" for n in range(30)]


def test_no_rows_at_all_give_no_rows(ready: Ready) -> None:
    answer = ready.answer(ready.forward(item(ready.target, 0), row_counts=[0, 0]))
    (output,) = answer.outputs
    assert (output.rows, output.columns, output.inline) == (0, ready.target.site.out_features, b"")
    assert len(answer.digests) == 2


@pytest.mark.parametrize("dtype", [tensor_pb2.DTYPE_FLOAT32, FLOAT16, tensor_pb2.DTYPE_BFLOAT16])
def test_rows_may_be_apart_and_base_rows_keep_their_bits(ready: Ready, dtype: tensor_pb2.Dtype.ValueType) -> None:
    x, base = ready.x(dtype=dtype), ready.base(dtype=dtype)
    plain = ready.answer(ready.forward(ready.item(x=x, mode=pb.FORWARD_MODE_ADD, base=base)))
    wide = torch.full((COUNT, x.columns + 5), torch.nan, dtype=tensor(x).dtype)
    wide[:, : x.columns] = tensor(x)
    data = wide.view(torch.uint8).flatten()[: -5 * wide.element_size()].numpy().tobytes()
    strided = ready.x(dtype=dtype, row_stride=x.columns + 5, inline=data)
    again = ready.answer(ready.forward(ready.item(x=strided, mode=pb.FORWARD_MODE_ADD, base=base)))
    assert again.outputs == plain.outputs
    assert tensor(plain.outputs[0])[ROWS[0] :].equal(tensor(base)[ROWS[0] :])
    assert not tensor(plain.outputs[0])[: ROWS[0]].equal(tensor(base)[: ROWS[0]])
