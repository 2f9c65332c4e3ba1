"""The suite is about a plane only if Forwards travel over it."""

from __future__ import annotations

from tests.conformance.items import delta, forward, item, tensor
from tests.conformance.target import PATIENCE_SECONDS, Target
from tests.planes.stub import PlaneStub
from tests.tolerances import assert_close


def test_a_forward_travels_over_the_plane(target: Target) -> None:
    digest = target.load("sql").adapter.digest
    with target.session() as session:
        generation = session.set_mapping("sql", None).generation
        asked = item(target, 3)
        request = forward(session, generation, [2, 1], asked)
        answer = target.engine.Forward(request, timeout=PATIENCE_SECONDS)
        if isinstance(target.engine, PlaneStub):
            assert target.engine.carried[target.plane] >= 1
    found = tensor(answer.outputs[0])
    assert list(answer.digests) == [digest, ""]
    assert_close(found[:2], delta(target, "sql", tensor(asked.x))[:2])
    assert not found[2].any()
