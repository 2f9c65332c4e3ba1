"""Sound requests that the server's state forbids: the row of the table, its facts, and nothing changes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import grpc
import pytest
from slotcar.v1 import adapter_service_pb2 as pb
from slotcar.v1 import engine_service_pb2, layout_pb2

from tests.conformance.items import forward, item
from tests.conformance.refusals import Refusal, read_value, refused
from tests.conformance.target import ABSENT_DIGEST, PATIENCE_SECONDS, Session, Streamed, Target

REPLACE = pb.ON_CONFLICT_REPLACE


def refusal_of_load(target: Target, name: str, **request: Any) -> Refusal:
    with target.unchanged():
        return refused(target.load, name, **request)


def unload(target: Target, ref: str, *, force: bool = False) -> pb.UnloadAdapterResponse:
    return target.adapters.UnloadAdapter(pb.UnloadAdapterRequest(ref=ref, force=force), timeout=PATIENCE_SECONDS)


def keep(target: Target, ref: str) -> pb.KeepAdapterResponse:
    return target.adapters.KeepAdapter(pb.KeepAdapterRequest(ref=ref), timeout=PATIENCE_SECONDS)


def stale(target: Target, session: Session, generation: int, **fields: Any) -> Refusal:
    """The refusal of a Forward for one row, which must be the same on both planes."""
    request = forward(session, generation, [1], item(target, 1), **fields)
    stream = Streamed(target)
    with target.unchanged():
        refusal = refused(target.engine.Forward, request, timeout=PATIENCE_SECONDS)
        answer = stream.ask(engine_service_pb2.ForwardStreamRequest(forward=request))
    stream.close()
    assert answer.WhichOneof("result") == "error"
    value = read_value(answer.error)
    assert (value.reason, value.metadata) == (refusal.reason, refusal.metadata)
    return refusal


# Names and bytes


def test_a_name_with_other_bytes_is_a_conflict(target: Target) -> None:
    found = target.load("sql").adapter.digest
    wanted = target.load("chat").adapter.digest
    refusal = refusal_of_load(target, "sql", source=str(target.folder("chat")))
    assert refusal.reason == "ADAPTER_CONFLICT"
    assert refusal.metadata == {"adapter": "sql", "found": found, "wanted": wanted}
    assert refusal.fields == ()
    assert refusal_of_load(target, "sql", source=str(target.folder("chat")), on_conflict=1).reason == refusal.reason


def test_other_bytes_than_were_asked_for_are_a_mismatch(target: Target) -> None:
    found = target.load("sql").adapter.digest
    source = str(target.folder("sql"))
    for name in ("sql", "other"):
        for on_conflict in (pb.ON_CONFLICT_FAIL, REPLACE):
            refusal = refusal_of_load(
                target, "sql", ref=f"{name}@{ABSENT_DIGEST}", source=source, on_conflict=on_conflict
            )
            assert refusal.reason == "DIGEST_MISMATCH"
            assert refusal.metadata["found"] == found
            assert refusal.metadata["wanted"] == ABSENT_DIGEST
            assert refusal.metadata["source"]


def test_a_source_that_was_not_read_is_not_a_names_source(target: Target) -> None:
    """The bytes of a known digest are not read again; a later load without a source must find them all the same."""
    wanted = target.load("sql").adapter.digest
    target.folder("chat")
    with suppress(grpc.RpcError):  # DIGEST_MISMATCH would be right, too
        answer = target.load("chat", ref=f"other@{wanted}")
        assert answer.adapter.source == str(target.folder("sql"))


def test_an_adapter_that_lost_its_slot_is_not_resident(target: Target) -> None:
    target.load("lost")
    target.fill_slots()
    refs = ["lost", f"lost@{target.load('lost', ref='lost').adapter.digest}"]
    target.fill_slots()
    with target.session() as session:
        mapped = session.set_mapping("full-0").generation
        for ref in refs:
            with target.unchanged():
                refusal = refused(session.set_mapping, "full-0", None, ref)
            assert refusal.reason == "ADAPTER_NOT_RESIDENT"
            assert refusal.metadata == {"adapters": ref}
            assert refusal.subjects == (ref,)
        with target.unchanged():
            assert refused(keep, target, "lost").reason == "ADAPTER_NOT_RESIDENT"
            target.engine.Forward(forward(session, mapped, [1], item(target, 1)), timeout=PATIENCE_SECONDS)


def test_unknown_comes_before_not_resident(target: Target) -> None:
    target.load("lost")
    target.fill_slots()
    with target.session() as session, target.unchanged():
        refusal = refused(session.set_mapping, "lost", "nobody", "none")
    assert (refusal.reason, refusal.metadata) == ("ADAPTER_NOT_FOUND", {"adapters": "nobody, none"})


# Slots


def test_slots_that_are_all_pinned_are_exhausted_and_waiting_helps(target: Target) -> None:
    names = target.fill_slots()
    with target.session() as session:
        session.set_mapping(*names)
        target.folder("one-more")
        for request in ({}, {"keep": True}):
            refusal = refusal_of_load(target, "one-more", **request)
            assert refusal.reason == "SLOTS_EXHAUSTED"
            assert refusal.retry_seconds
            slots = str(len(names))
            zeros = {"kept": "0", "loading": "0", "reserved": "0"}
            assert refusal.metadata == {"slots": slots, "pinned": slots} | zeros
        with target.unchanged():
            replaced = refused(target.load, names[0], source=str(target.folder("one-more")), on_conflict=REPLACE)
        assert replaced.reason == "SLOTS_EXHAUSTED"
        session.set_mapping(*names[:-1])
        target.load("one-more")
    assert names[-1] not in {adapter.name for adapter in target.state().adapters if adapter.HasField("slot")}


def test_as_many_keeps_as_slots_are_exhausted_and_waiting_does_not_help(target: Target) -> None:
    names = target.fill_slots()
    for name in names[:-1]:
        keep(target, name)
    with target.unchanged():
        refusal = refused(keep, target, names[-1])
    load = refusal_of_load(target, names[-1], keep=True)
    for found in (refusal, load, refusal_of_load(target, "one-more", keep=True)):
        assert found.reason == "SLOTS_EXHAUSTED"
        assert found.retry_seconds is None
        most = str(len(names) - 1)
        assert found.metadata == {"slots": str(len(names)), "kept": most, "wanted": most}
    target.load("one-more")
    assert [adapter.keep for adapter in target.state().adapters if adapter.HasField("slot")].count(False) == 1


# Generations


def test_a_forward_of_an_earlier_generation_is_stale(target: Target) -> None:
    digest = target.load("sql").adapter.digest
    with target.session() as session:
        first = session.set_mapping("sql").generation
        second = session.set_mapping("sql").generation
        assert second > first
        refusal = stale(target, session, first)
        assert refusal.reason == "LAYOUT_STALE"
        assert refusal.metadata == {"entries": f"sql@{digest}", "found": str(first), "wanted": str(second)}
        # The generation of one mapping is not that of another.
        third = session.set_mapping(None, mapping_id=2).generation
        assert stale(target, session, third).metadata["wanted"] == str(second)
        target.engine.Forward(forward(session, second, [1], item(target, 1)), timeout=PATIENCE_SECONDS)


def test_a_mapping_id_used_again_makes_the_generation_before_stale(target: Target) -> None:
    """Whatever the entries are now, also when they are the same, or none."""
    for name in ("sql", "chat"):
        target.load(name)
    with target.session() as session:
        old = session.set_mapping("sql")
        for entries in (["chat"], ["sql"], [None], []):
            new = session.set_mapping(*entries)
            request = forward(session, old.generation, [1], item(target, 1))
            with target.unchanged():
                refusal = refused(target.engine.Forward, request, timeout=PATIENCE_SECONDS)
            assert (refusal.reason, refusal.metadata["wanted"]) == ("LAYOUT_STALE", str(new.generation))
            old = new


def test_a_forced_unload_makes_its_mappings_stale_and_says_which_entries(target: Target) -> None:
    digest = target.load("sql").adapter.digest
    target.load("chat")
    with target.session() as session:
        generation = session.set_mapping("chat", "sql", None).generation
        answer = unload(target, "sql", force=True)
        assert answer.pins_ended == 1
        assert answer.slot_state == layout_pb2.SLOT_STATE_FREE
        refusal = stale(target, session, generation, row_counts=[0, 1, 0])
        assert refusal.reason == "LAYOUT_STALE"
        assert refusal.metadata["entries"] == f"sql@{digest}"
        assert refusal.metadata["wanted"] == str(generation)
        # Stale at once for every row, those of the base model too.
        assert stale(target, session, generation, row_counts=[0, 0, 1]).reason == "LAYOUT_STALE"
        with target.unchanged():
            gone = refused(session.set_mapping, f"sql@{digest}")
        assert (gone.reason, gone.metadata) == ("ADAPTER_NOT_FOUND", {"adapters": f"sql@{digest}"})
        session.set_mapping("chat")


def test_a_slot_that_was_taken_makes_stale_what_did_not_pin_it(target: Target) -> None:
    """A mapping that lost its pins by a forced unload stays stale when the slot has other bytes."""
    names = target.fill_slots()
    with target.session() as session:
        generation = session.set_mapping(names[0]).generation
        unload(target, names[0], force=True)
        target.load("taker")
        refusal = stale(target, session, generation)
        assert (refusal.reason, refusal.metadata["entries"].partition("@")[0]) == ("LAYOUT_STALE", names[0])


def test_an_unload_that_does_not_force_leaves_its_mappings_current(target: Target) -> None:
    digest = target.load("sql").adapter.digest
    with target.session() as session, target.session() as other:
        generation = session.set_mapping("sql").generation
        assert unload(target, "sql").slot_state == layout_pb2.SLOT_STATE_DRAINING
        target.engine.Forward(forward(session, generation, [1], item(target, 1)), timeout=PATIENCE_SECONDS)
        again = session.set_mapping(f"sql@{digest}")
        assert again.entries[0].digest == digest
        for who, ref in ((other, f"sql@{digest}"), (session, "sql")):
            with target.unchanged():
                assert refused(who.set_mapping, ref).metadata == {"adapters": ref}
        session.release_mapping()
        with target.unchanged():
            assert refused(session.set_mapping, f"sql@{digest}").reason == "ADAPTER_NOT_FOUND"


# Sessions


def test_what_a_session_owns_is_its_own(target: Target) -> None:
    target.load("sql")
    with target.session() as session, target.session() as other:
        generation = session.set_mapping("sql", mapping_id=7).generation
        assert stale(target, other, generation, mapping_id=7).reason == "MAPPING_NOT_FOUND"
        with target.unchanged():
            other.release_mapping(7)
        fields = {"mapping_id": 7}
        target.engine.Forward(forward(session, generation, [1], item(target, 1), **fields), timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("method", ["SetMapping", "ReleaseMapping", "Forward", "OpenSession"])
def test_a_closed_session_is_not_found(target: Target, method: str) -> None:
    target.load("sql")
    with target.session() as session:
        session.set_mapping("sql")
        target.close_session(session.id)
        with target.unchanged():
            if method == "SetMapping":
                refusal = refused(session.set_mapping, "sql")
            elif method == "ReleaseMapping":
                refusal = refused(session.release_mapping)
            elif method == "Forward":
                refusal = stale(target, session, 1)
            else:
                refusal = refused(target.session(resume_session=session.id).__enter__)
        assert (refusal.reason, refusal.metadata) == ("SESSION_NOT_FOUND", {})
    assert target.state().adapters[0].pins == 0


def test_a_released_mapping_is_not_found(target: Target) -> None:
    target.load("sql")
    with target.session() as session:
        generation = session.set_mapping("sql").generation
        session.release_mapping()
        assert stale(target, session, generation).metadata == {"mapping_id": "1"}
