"""Mappings and Forwards of absurd sizes and numbers: refused without harm, and what was sound stays so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from slotcar.v1 import engine_service_pb2 as engine

from tests.conformance.calls import Given, given, refusal_of
from tests.conformance.items import forward, item
from tests.conformance.refusals import refused
from tests.conformance.target import PATIENCE_SECONDS, Target, entry

MANY = 100_000


@pytest.fixture(scope="module")
def made(server: Target) -> Iterator[Given]:
    server.unload_all()
    with given(server) as made:
        yield made


def works(made: Given) -> bool:
    request = forward(made.session, made.generation, [1], item(made.target, 1))
    return len(made.target.engine.Forward(request, timeout=PATIENCE_SECONDS).outputs) == 1


@pytest.mark.parametrize("ref", [None, "sql", "nobody"])
@pytest.mark.parametrize("load", [False, True])
def test_a_hundred_thousand_entries_are_refused_by_their_number(made: Given, ref: str | None, load: bool) -> None:
    entries = [entry(ref)] * MANY
    request = engine.SetMappingRequest(session=made.session.id, mapping_id=1, entries=entries, load=load)
    refusal = refusal_of(made.target, request)
    assert (refusal.reason, refusal.fields) == ("REQUEST_INVALID", ("entries",))
    assert refusal.metadata["found"] == f"{MANY} of them"
    assert works(made)


def test_a_hundred_thousand_names_are_refused_by_their_number(made: Given) -> None:
    entries = [entry(f"sql-{number}") for number in range(MANY)]
    request = engine.SetMappingRequest(session=made.session.id, mapping_id=1, entries=entries)
    assert refusal_of(made.target, request).fields == ("entries",)
    assert works(made)


@pytest.mark.parametrize("count", [0, 2**64 - 1])
def test_a_hundred_thousand_row_counts_are_refused_by_their_number(made: Given, count: int) -> None:
    request = forward(made.session, made.generation, [count] * MANY, item(made.target, 1))
    refusal = refusal_of(made.target, request)
    assert (refusal.reason, refusal.fields) == ("REQUEST_INVALID", ("row_counts",))
    assert works(made)


@pytest.mark.parametrize("count", [0, 2**40, 2**64 - 1])
def test_a_row_count_is_never_taken_for_another(made: Given, count: int) -> None:
    refusal = refusal_of(made.target, forward(made.session, made.generation, [count], item(made.target, 1)))
    assert refusal.reason == ("SHAPE_MISMATCH" if count == 0 else "REQUEST_INVALID")
    assert refusal.fields == (("items[0].x",) if count == 0 else ("row_counts",))
    assert works(made)


@pytest.mark.parametrize("ahead", [1, 2**32, None])
def test_a_generation_of_the_future_is_stale(made: Given, ahead: int | None) -> None:
    generation = 2**64 - 1 if ahead is None else made.generation + ahead
    with made.target.unchanged():
        request = forward(made.session, generation, [1], item(made.target, 1))
        refusal = refused(made.target.engine.Forward, request, timeout=PATIENCE_SECONDS)
    assert (refusal.reason, refusal.metadata["found"]) == ("LAYOUT_STALE", str(generation))
    assert refusal.metadata["wanted"] == str(made.generation)
    assert refusal.metadata["entries"].startswith("sql@sha256:")
    assert works(made)


@pytest.mark.parametrize("mapping_id", [0, 2, 2**64 - 1])
def test_a_mapping_that_was_never_set_is_not_found(made: Given, mapping_id: int) -> None:
    request = forward(made.session, made.generation, [1], item(made.target, 1), mapping_id=mapping_id)
    refusal = refusal_of(made.target, request)
    assert (refusal.reason, refusal.metadata) == ("MAPPING_NOT_FOUND", {"mapping_id": str(mapping_id)})
