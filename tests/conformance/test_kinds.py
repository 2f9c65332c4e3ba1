"""Sites of every kind over a real server, for an engine of two ranks that share them: the shards are the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from slotcar.v1 import engine_service_pb2 as engine
from slotcar.v1 import model_pb2, tensor_pb2

from tests.adapters import MINIMAL_CONFIG, write_raw_adapter
from tests.conformance.items import forward, tensor
from tests.conformance.refusals import refused
from tests.conformance.target import PATIENCE_SECONDS, Session, Target
from tests.tolerances import assert_close

RANKS, ROWS, TOKENS, WIDTH, EXPERTS = 2, 5, 11, 16, 3
COLUMN, ROW = model_pb2.SHARD_COLUMN, model_pb2.SHARD_ROW
EMBEDDING, OF_EXPERTS = model_pb2.SITE_KIND_EMBEDDING, model_pb2.SITE_KIND_EXPERTS


def site(name: str, inputs: int, outputs: int, **fields: Any) -> model_pb2.Site:
    rest = {"kind": model_pb2.SITE_KIND_LINEAR} | fields
    return model_pb2.Site(name=name, in_features=inputs, out_features=outputs, **rest)


def part(name: str, outputs: int, copies: int = 1) -> model_pb2.SitePart:
    return model_pb2.SitePart(name=name, out_features=outputs, copies=copies)


MODEL = model_pb2.ModelSpec(
    sites=[
        site("embed", TOKENS, WIDTH, kind=EMBEDDING),
        site("o_proj", 8, WIDTH, shard=ROW),
        site("qkv", WIDTH, 12, parts=[part("q_proj", 8), part("k_proj", 4, RANKS)], shard=COLUMN),
        site("up", WIDTH, 6, kind=OF_EXPERTS, experts=EXPERTS, parts=[part("experts.*.up_proj", 6)], shard=COLUMN),
    ],
    tensor_parallel=RANKS,
    renames=[model_pb2.Rename(adapter_prefix="model.text", model_prefix="")],
)
SCALE = MINIMAL_CONFIG["lora_alpha"] / MINIMAL_CONFIG["r"]


def pair(name: str, inputs: int, outputs: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(name))
    key = f"base_model.model.model.text.{name}.lora_"
    return {
        f"{key}A.weight": torch.randn(MINIMAL_CONFIG["r"], inputs, generator=generator) * inputs**-0.5,
        f"{key}B.weight": torch.randn(outputs, MINIMAL_CONFIG["r"], generator=generator) / 2,
    }


TENSORS = {
    **pair("o_proj", 8, WIDTH),
    **pair("q_proj", WIDTH, 8),
    **pair("k_proj", WIDTH, 4),
    **pair("experts.1.up_proj", WIDTH, 6),
}


def delta(name: str, x: torch.Tensor) -> torch.Tensor:
    a, b = (TENSORS[f"base_model.model.model.text.{name}.lora_{side}.weight"].double() for side in "AB")
    return SCALE * x.double() @ a.T @ b.T


def ref(values: torch.Tensor) -> tensor_pb2.TensorRef:
    dtype = {torch.float32: tensor_pb2.DTYPE_FLOAT32, torch.int32: tensor_pb2.DTYPE_INT32}[values.dtype]
    data = values.contiguous().numpy().tobytes()
    return tensor_pb2.TensorRef(dtype=dtype, rows=len(values), columns=values.shape[1], inline=data)


def numbers(count: int) -> torch.Tensor:
    return (torch.arange(ROWS, dtype=torch.int32) % count)[:, None]


def compute(target: Target, session: Session, generation: int, rank: int, *items: engine.ForwardItem) -> Any:
    request = forward(session, generation, [ROWS], *items, rank=rank)
    return [tensor(out) for out in target.engine.Forward(request, timeout=PATIENCE_SECONDS).outputs]


@pytest.fixture(scope="module")
def kinds(start_target: Callable[..., Target]) -> Target:
    return start_target(extra=("--dtype", "float32")).learn(MODEL)


def adapted(target: Target, session: Session) -> int:
    """The generation of a mapping with the adapter alone."""
    folder = target.root / "kinds"
    if not folder.exists():
        write_raw_adapter(folder, MINIMAL_CONFIG, TENSORS)
    digest = target.load("kinds", source=str(folder)).adapter.digest
    return session.set_mapping(f"kinds@{digest}").generation


def test_the_model_comes_back_as_it_was_sent(kinds: Target) -> None:
    assert kinds.model == MODEL


def test_the_report_says_what_lies_where(kinds: Target) -> None:
    with kinds.session(ranks=RANKS) as session:
        adapted(kinds, session)
        report = kinds.load("kinds", source=str(kinds.root / "kinds")).report
    assert [found.name for found in report.sites_matched] == sorted(
        f"model.text.{name}" for name in ("experts.1.up_proj", "k_proj", "o_proj", "q_proj")
    )
    assert list(report.sites_zero) == ["embed"]


def test_the_shards_of_the_ranks_are_the_whole(kinds: Target) -> None:
    x, inner, experts = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 8), numbers(EXPERTS)
    outputs = []
    with kinds.session(ranks=RANKS) as session:
        generation = adapted(kinds, session)
        streams = [session.join(rank) for rank in range(RANKS)]
        for rank, stream in enumerate(streams):
            assert next(stream).opened.ranks == RANKS
            items = [
                engine.ForwardItem(site="qkv", x=ref(x)),
                engine.ForwardItem(site="up", aux=ref(experts)),
                engine.ForwardItem(site="o_proj", x=ref(inner[:, 4 * rank : 4 * rank + 4])),
                engine.ForwardItem(site="embed", aux=ref(numbers(TOKENS)), out_dtype=tensor_pb2.DTYPE_FLOAT32),
            ]
            outputs.append(compute(kinds, session, generation, rank, *items))
        for stream in streams:
            stream.cancel()
    q, k = delta("q_proj", x), delta("k_proj", x)
    up = torch.where(experts == 1, delta("experts.1.up_proj", x), 0.0)
    for rank, (qkv, of_experts, _, embedded) in enumerate(outputs):
        assert_close(qkv, torch.cat([q[:, 4 * rank : 4 * rank + 4], k], 1))
        assert_close(of_experts, up[:, 3 * rank : 3 * rank + 3].contiguous())
        assert not embedded.any()
    torch.testing.assert_close(
        sum(output[2].double() for output in outputs), delta("o_proj", inner), rtol=1e-5, atol=1e-5
    )


X = ref(torch.zeros(ROWS, WIDTH))
FLOAT32 = tensor_pb2.DTYPE_FLOAT32
BAD_ITEMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no-ids": ({"site": "embed", "out_dtype": FLOAT32}, "REQUEST_INVALID", "items[0].aux"),
    "no-dtype": ({"site": "embed", "aux": ref(numbers(TOKENS))}, "REQUEST_INVALID", "items[0].out_dtype"),
    "x-at-embedding": (
        {"site": "embed", "x": X, "aux": ref(numbers(TOKENS))},
        "REQUEST_INVALID",
        "items[0].x",
    ),
    "id-too-large": (
        {"site": "embed", "out_dtype": FLOAT32, "aux": ref(numbers(TOKENS) + TOKENS)},
        "REQUEST_INVALID",
        "items[0].aux",
    ),
    "negative-id": (
        {"site": "embed", "out_dtype": FLOAT32, "aux": ref(numbers(TOKENS) - 1)},
        "REQUEST_INVALID",
        "items[0].aux",
    ),
    "no-expert": ({"site": "up", "x": X}, "REQUEST_INVALID", "items[0].aux"),
    "expert-too-large": ({"site": "up", "x": X, "aux": ref(numbers(4))}, "REQUEST_INVALID", "items[0].aux"),
    "experts-as-floats": (
        {"site": "up", "x": X, "aux": ref(torch.zeros(ROWS, 1))},
        "SHAPE_MISMATCH",
        "items[0].aux.dtype",
    ),
    "too-few-experts": (
        {"site": "up", "x": X, "aux": ref(numbers(EXPERTS)[1:])},
        "SHAPE_MISMATCH",
        "items[0].aux",
    ),
    "x-of-integers": (
        {"site": "qkv", "x": ref(torch.zeros(ROWS, WIDTH, dtype=torch.int32))},
        "SHAPE_MISMATCH",
        "items[0].x.dtype",
    ),
    "x-of-all-ranks": ({"site": "o_proj", "x": ref(torch.zeros(ROWS, 8))}, "SHAPE_MISMATCH", "items[0].x"),
    "aux-of-all-ranks": (
        {"site": "qkv", "x": X, "aux": ref(torch.zeros(ROWS, 12))},
        "SHAPE_MISMATCH",
        "items[0].aux",
    ),
    "another-dtype": (
        {"site": "qkv", "x": X, "out_dtype": tensor_pb2.DTYPE_BFLOAT16},
        "SHAPE_MISMATCH",
        "items[0].out_dtype",
    ),
    "unknown-dtype": ({"site": "qkv", "x": X, "out_dtype": 99}, "REQUEST_INVALID", "items[0].out_dtype"),
}


@pytest.mark.parametrize(("fields", "reason", "field"), BAD_ITEMS.values(), ids=BAD_ITEMS.keys())
def test_a_bad_item_is_refused(kinds: Target, fields: dict[str, Any], reason: str, field: str) -> None:
    with kinds.session(ranks=RANKS) as session:
        generation = adapted(kinds, session)
        with kinds.unchanged():
            refusal = refused(compute, kinds, session, generation, 0, engine.ForwardItem(**fields))
    assert (refusal.reason, refusal.fields) == (reason, (field,))


def test_a_rank_that_the_model_has_not_got_is_refused(kinds: Target) -> None:
    with kinds.session(ranks=RANKS + 1) as session:
        generation = adapted(kinds, session)
        item = engine.ForwardItem(site="qkv", x=X)
        refusal = refused(compute, kinds, session, generation, RANKS, item)
    assert (refusal.reason, refusal.fields) == ("REQUEST_INVALID", ("rank",))
