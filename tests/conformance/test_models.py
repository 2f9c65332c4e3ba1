"""The model comes from the first session that has one; who has another is told the difference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from grpc_health.v1 import health_pb2
from slotcar.v1 import adapter_pb2, engine_service_pb2, model_pb2, tensor_pb2
from slotcar.v1 import adapter_service_pb2 as pb

from tests.conformance.items import delta, forward, item, tensor
from tests.conformance.refusals import read_value, refused
from tests.conformance.target import MODEL, PATIENCE_SECONDS, Streamed, Target
from tests.tolerances import assert_close

MOST_FEATURES = 1 << 24
FULL = model_pb2.ModelSpec(sites=MODEL.sites, dtype=tensor_pb2.DTYPE_BFLOAT16, fingerprint="a")


def opening(target: Target, **request: object) -> Callable[[], object]:
    return target.session(**request).__enter__


def wide(sites: int) -> model_pb2.ModelSpec:
    """A model whose sites are as wide as sites may be."""
    return model_pb2.ModelSpec(
        sites=[
            model_pb2.Site(name=f"wide.{index}", in_features=MOST_FEATURES, out_features=1) for index in range(sites)
        ]
    )


def check_forward(target: Target, name: str) -> None:
    """The server computes what the adapter says."""
    with target.session() as session:
        one = item(target, 2)
        request = forward(session, session.set_mapping(name).generation, [2], one)
        answer = target.engine.Forward(request, timeout=PATIENCE_SECONDS)
    assert_close(tensor(answer.outputs[0]), delta(target, name, tensor(one.x)))


def test_a_server_without_a_model_waits_for_one(start_target: Callable[..., Target]) -> None:
    target = start_target()
    target.model = MODEL
    with target.session() as session:
        target.server = session.opened.server
    assert target.health.Check(health_pb2.HealthCheckRequest(service="readiness"), timeout=PATIENCE_SECONDS).status == 1
    with target.unchanged():
        refusal = refused(target.load, "sql")
        assert (refusal.reason, refusal.metadata) == ("MODEL_UNKNOWN", {})
        estimate = target.adapters.EstimateAdapter(
            pb.EstimateAdapterRequest(source=str(target.folder("sql"))), timeout=PATIENCE_SECONDS
        )
    assert not estimate.fits
    assert estimate.why_not.startswith("MODEL_UNKNOWN: ")

    with target.session() as session:
        assert not session.opened.HasField("model_spec")
        generation = session.set_mapping(None).generation
        request = forward(session, generation, [1], item(target, 1))
        stream = Streamed(target)
        with target.unchanged():
            assert refused(target.engine.Forward, request, timeout=PATIENCE_SECONDS).reason == "MODEL_UNKNOWN"
            answer = stream.ask(engine_service_pb2.ForwardStreamRequest(forward=request))
            assert read_value(answer.error).reason == "MODEL_UNKNOWN"
        stream.close()

    check_memory(target)
    vectors = 2 * 4  # gain and bias of one feature, as float32
    needed = 40 * ((MOST_FEATURES + 1) * target.server.max_rank * 4 + vectors) * target.server.slots
    with target.unchanged():
        refusal = refused(opening(target, model_spec=wide(40)))
    assert refusal.reason == "CAPACITY_EXCEEDED"
    assert refusal.metadata == {"found": str(needed), "wanted": str(64 << 30)}
    with target.session() as session:
        assert not session.opened.HasField("model_spec")

    target.learn(FULL)
    assert (list(target.model.sites), target.model.fingerprint) == (list(MODEL.sites), FULL.fingerprint)
    # The bytes were kept in the host tier when the model was unknown: the digest is enough.
    assert target.load("sql", ref=f"sql@{estimate.digest}", source="").adapter.digest == estimate.digest
    target.load("chat")
    check_forward(target, "sql")
    check_forward(target, "chat")
    check_dtype_and_fingerprint(target)


def check_memory(target: Target) -> None:
    """Without a model, adapters come as far as memory, and may be held there."""
    target.load("kept-in-memory", target_tier=adapter_pb2.TIER_HOST)
    with target.session(reserved_slots=1) as session:
        with target.unchanged():
            refusal = refused(session.set_mapping, "kept-in-memory", load=True)
        assert (refusal.reason, refusal.metadata) == ("MODEL_UNKNOWN", {})
        assert session.hold("kept-in-memory", tier=adapter_pb2.TIER_DEVICE).tier == adapter_pb2.TIER_HOST
        assert target.capacity().slot_bytes == 0


def check_dtype_and_fingerprint(target: Target) -> None:
    """They are compared where both sides have one."""
    for fields, difference in (
        ({"dtype": tensor_pb2.DTYPE_FLOAT16}, "dtype: server bfloat16, engine float16"),
        ({"fingerprint": "b"}, "fingerprint: server a, engine b"),
    ):
        other = model_pb2.ModelSpec(sites=MODEL.sites, **fields)
        with target.unchanged():
            refusal = refused(opening(target, model_spec=other))
        assert (refusal.reason, refusal.metadata) == ("MODEL_MISMATCH", {"difference": difference})
    for agreeing in (MODEL, FULL):
        with target.session(model_spec=agreeing) as session:
            assert session.opened.model_spec == target.model


def test_a_model_that_memory_cannot_hold_is_refused_and_forgotten(start_target: Callable[..., Target]) -> None:
    target = start_target(slots=64, max_rank=4096, extra=("--device-bytes", str(1 << 60)))
    with target.unchanged():
        refusal = refused(opening(target, model_spec=wide(2)))
    assert refusal.reason == "CAPACITY_EXCEEDED"
    target.learn(MODEL)
    target.load("sql")
    check_forward(target, "sql")


def _changed(model: model_pb2.ModelSpec, change: Callable[[model_pb2.ModelSpec], object]) -> model_pb2.ModelSpec:
    other = model_pb2.ModelSpec()
    other.CopyFrom(model)
    change(other)
    return other


DIFFERENCES: dict[str, tuple[Callable[[model_pb2.ModelSpec], object], str]] = {
    "another-site": (
        lambda m: m.sites.add(name="layers.7.extra", in_features=8, out_features=8),
        "only the engine has layers.7.extra",
    ),
    "less-sites": (lambda m: m.sites.pop(0), "only the server has {name}"),
    "input": (
        lambda m: setattr(m.sites[0], "in_features", m.sites[0].in_features + 1),
        "server {name} [{out}, {in}], engine {name} [{out}, {more}]",
    ),
    "all-else": (
        lambda m: m.CopyFrom(model_pb2.ModelSpec(sites=[{"name": "x", "in_features": 1, "out_features": 1}])),
        "only the engine has x",
    ),
}


@pytest.mark.parametrize(("change", "difference"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_another_model_is_refused_with_the_difference(
    target: Target, change: Callable[[model_pb2.ModelSpec], object], difference: str
) -> None:
    other = _changed(target.model, change)
    with target.unchanged():
        refusal = refused(opening(target, model_spec=other))
    site = target.site
    names = {"name": site.name, "in": site.in_features, "out": site.out_features, "more": site.in_features + 1}
    assert refusal.reason == "MODEL_MISMATCH"
    assert difference.format(**names) in refusal.metadata["difference"]
    assert difference.format(**names) in refusal.message


def test_the_same_model_in_another_order_agrees(target: Target) -> None:
    model = model_pb2.ModelSpec(sites=reversed(target.model.sites), dtype=target.model.dtype)
    with target.session(model_spec=model) as session:
        assert session.opened.model_spec == target.model


def test_a_session_is_not_resumed_with_another_model_and_lives_on(target: Target) -> None:
    other = _changed(target.model, lambda m: m.sites.pop())
    with target.session() as session:
        generation = session.set_mapping(None).generation
        with target.unchanged():
            refusal = refused(opening(target, resume_session=session.id, model_spec=other))
        assert refusal.reason == "MODEL_MISMATCH"
        assert session.next("heartbeat")
        target.engine.Forward(forward(session, generation, [1], item(target, 1)), timeout=PATIENCE_SECONDS)
