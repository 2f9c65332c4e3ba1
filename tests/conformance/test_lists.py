"""A list that is read page by page is one consistent snapshot, whatever happens between two pages."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest
from slotcar.v1 import adapter_pb2, layout_pb2
from slotcar.v1 import adapter_service_pb2 as pb

from tests.conformance.refusals import refused
from tests.conformance.target import PATIENCE_SECONDS, Target


def page(target: Target, **request: object) -> pb.ListAdaptersResponse:
    return target.adapters.ListAdapters(pb.ListAdaptersRequest(**request), timeout=PATIENCE_SECONDS)


def pages(target: Target, page_size: int) -> Iterator[pb.ListAdaptersResponse]:
    answer = page(target, page_size=page_size)
    yield answer
    while answer.next_page_token:
        answer = page(target, page_size=page_size, page_token=answer.next_page_token)
        yield answer


def unload(target: Target, name: str) -> None:
    target.adapters.UnloadAdapter(pb.UnloadAdapterRequest(ref=name), timeout=PATIENCE_SECONDS)


def many(target: Target, count: int) -> list[str]:
    """Loads one adapter under many names."""
    source = str(target.folder("sql"))
    names = [f"name-{number:03}" for number in range(count)]
    for name in names:
        target.load("sql", ref=name, source=source)
    return names


def test_no_adapter_is_one_empty_page(target: Target) -> None:
    answer = page(target)
    assert list(answer.adapters) == []
    assert answer.next_page_token == ""
    assert len(answer.layout.slots) == target.server.slots
    assert {slot.state for slot in answer.layout.slots} == {layout_pb2.SLOT_STATE_FREE}


@pytest.mark.parametrize("page_size", [1, 2, 3, 6, 7, 8, 2**32 - 1])
def test_pages_together_are_the_list(target: Target, page_size: int) -> None:
    names = many(target, 7)
    answers = list(pages(target, page_size))
    assert [adapter.name for answer in answers for adapter in answer.adapters] == names
    assert len(answers) == -(-7 // page_size)
    assert {len(answer.adapters) for answer in answers[:-1]} <= {page_size}


def test_a_page_has_a_hundred_unless_said_otherwise(target: Target) -> None:
    names = many(target, 101)
    first = page(target)
    assert [adapter.name for adapter in first.adapters] == names[:100]
    assert [adapter.name for adapter in page(target, page_token=first.next_page_token).adapters] == names[100:]


def test_a_page_may_be_read_again(target: Target) -> None:
    many(target, 3)
    token = page(target, page_size=1).next_page_token
    first = page(target, page_size=1, page_token=token)
    assert page(target, page_size=1, page_token=token) == first
    assert len(page(target, page_size=9, page_token=token).adapters) == 2


def test_what_happens_between_two_pages_is_not_seen(target: Target) -> None:
    names = [*target.fill_slots("a"), *target.fill_slots("b")]
    before = target.state()
    assert {adapter.tier for adapter in before.adapters} == {adapter_pb2.TIER_HOST, adapter_pb2.TIER_DEVICE}
    first, *others = _interrupted(target, names)
    seen = [adapter for answer in (first, *others) for adapter in answer.adapters]
    assert [adapter.name for adapter in seen] == [adapter.name for adapter in before.adapters]
    assert [answer.layout for answer in (first, *others)] == [before.layout] * len(names)
    assert [adapter.slot for adapter in seen] == [adapter.slot for adapter in before.adapters]
    # The tiers too, though the adapters of the later pages are in none now.
    assert seen == list(before.adapters)


def _interrupted(target: Target, names: list[str]) -> list[pb.ListAdaptersResponse]:
    """The pages of a list, one adapter each, when everything is unloaded after the first."""
    answers = []
    for answer in pages(target, 1):
        answers.append(answer)
        if len(answers) == 1:
            for name in names:
                unload(target, name)
            target.load("newcomer")
    return answers


def test_a_list_is_consistent_while_loads_go_on(target: Target) -> None:
    """Adapters with a slot are what the layout of the same page has there, and names come once and in order."""
    names = [f"busy-{number}" for number in range(2 * target.server.slots + 1)]
    for name in names:
        target.load(name)
    enough = threading.Event()

    def churn() -> None:
        while not enough.is_set():
            for name in names:
                target.load(name)

    loader = threading.Thread(target=churn)
    loader.start()
    generations = set()
    try:
        for _ in range(40):
            answers = list(pages(target, 2))
            layout = answers[0].layout
            generations.add(layout.version.generation)
            assert all(answer.layout == layout for answer in answers)
            seen = [adapter for answer in answers for adapter in answer.adapters]
            assert [adapter.name for adapter in seen] == sorted(names)
            for adapter in seen:
                if adapter.HasField("slot"):
                    assert layout.slots[adapter.slot].digest == adapter.digest
                    assert layout.slots[adapter.slot].state == layout_pb2.SLOT_STATE_OCCUPIED
    finally:
        enough.set()
        loader.join(PATIENCE_SECONDS)
    assert len(generations) > 10


def test_a_token_of_many_lists_ago_is_refused_as_one(target: Target) -> None:
    many(target, 2)
    first = page(target, page_size=1).next_page_token
    for _ in range(100):
        page(target, page_size=1)
    try:
        assert len(page(target, page_token=first).adapters) == 1
    except grpc.RpcError:
        refusal = refused(page, target, page_token=first)
        assert (refusal.reason, refusal.fields) == ("REQUEST_INVALID", ("page_token",))
