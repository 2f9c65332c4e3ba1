"""Ranks agree on one answer, however different what they have met: two real processes over gloo."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from slotcar_client.engines.vllm.ranks import Group
from slotcar_client.errors import AdapterNotFound, InternalError, SlotcarError


def _any(ranks: Group) -> Any:
    return [ranks.any(False), ranks.any(ranks.rank == 1), ranks.any(True)]


def _decided(ranks: Group) -> Any:
    return [ranks.decided(lambda: ("from", ranks.rank)), (ranks.rank, ranks.size)[1]]


def _refused(ranks: Group) -> Any:
    def refuse() -> None:
        raise AdapterNotFound("there is no adapter sql", adapters="sql")

    try:
        ranks.decided(refuse)
    except SlotcarError as error:
        return type(error), error.reason, error.message, error.metadata
    return None


def _broken(ranks: Group) -> Any:
    try:
        ranks.decided(lambda: {}["nothing"])
    except InternalError as error:
        return error.message
    return None


def _run(rank: int, address: str, ask: Callable[[Group], Any], answers: Any) -> None:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    answers.put((rank, ask(Group(dist.group.WORLD))))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ask", "wanted"),
    [
        (_any, [False, True, True]),
        (_decided, [("from", 0), 2]),
        (_refused, (AdapterNotFound, "ADAPTER_NOT_FOUND", "there is no adapter sql", {"adapters": "sql"})),
        (_broken, "KeyError: 'nothing'"),
    ],
)
def test_both_ranks_get_one_answer(tmp_path: Path, ask: Callable[[Group], Any], wanted: Any) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [
        context.Process(target=_run, args=(rank, f"file://{tmp_path}/meet", ask, answers)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    assert found == {0: wanted, 1: wanted}
