"""Sidecars at a disk tier or a journal, in processes of their own, that die by kill -9 where a test says."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from slotcar_sidecar.core.ids import AdapterName, AdapterRef
from slotcar_sidecar.core.journal import JournalEntry
from slotcar_sidecar.store.disk.entry import entry_bytes, pieces_of
from slotcar_sidecar.store.journal import JournalFile

from tests.fakes.stored import open_folder, same, stored_weights

LIBRARY = [stored_weights(seed, source="") for seed in range(6)]
ENTRY_BYTES = entry_bytes(pieces_of(LIBRARY[0], 1000.0))
CAPACITY_BYTES = 3 * ENTRY_BYTES + 100
_END_SECONDS = 60.0

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


def run(work: Callable[..., None], *arguments: Any) -> int:
    """The exit code of a process that does `work`; −9 when it died."""
    process = _processes.Process(target=work, args=arguments)
    process.start()
    process.join(_END_SECONDS)
    code = process.exitcode
    process.kill()
    assert code is not None, "it did not end"
    return code


def start(work: Callable[..., None], *arguments: Any) -> Any:
    """A process that does `work`."""
    process = _processes.Process(target=work, args=arguments)
    process.start()
    return process


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(wanted: str, step: StrEnum) -> None:
    """Dies there."""
    if step == wanted:
        die()


def use_disk(path: Path, step: str) -> None:
    """Writes one entry more than there is room for, forgets one, and dies at the step."""
    folder = open_folder(path, CAPACITY_BYTES, reach=partial(die_at, step))
    for weights in LIBRARY[:3]:
        folder.write(weights, only=False)
    folder.write(LIBRARY[3], only=True)
    folder.remove(LIBRARY[3].adapter.digest)


def use_disk_at_random(path: Path, seed: int, steps: int) -> None:
    """Writes, reads and forgets what comes, believes nothing that is wrong, and dies after so many steps."""
    numbers, left = random.Random(seed), itertools.count(1)
    clock = itertools.count(1000 + seed)
    folder = open_folder(
        path,
        CAPACITY_BYTES,
        clock=lambda: float(next(clock)),
        reach=lambda _: die() if next(left) >= steps else None,
    )
    while True:
        weights = numbers.choice(LIBRARY)
        action = numbers.choice(("write", "write", "keep", "read", "read", "remove"))
        if action == "read":
            read = folder.read(weights.adapter.digest)
            assert read is None or same(weights, read)
        elif action == "remove":
            folder.remove(weights.adapter.digest)
        else:
            outcome = folder.write(weights, only=action == "keep")
            assert outcome.result in ("written", "present", "full"), outcome


def entries_of(version: int) -> list[JournalEntry]:
    """A journal that says by what it has which version it is."""
    return [
        JournalEntry(
            AdapterRef(AdapterName(f"n{number}"), LIBRARY[version % 6].adapter.digest), f"/{version}", False, True
        )
        for number in range(50)
    ]


def write_journal(path: Path, step: str) -> None:
    """Writes version 1 whole, and dies at a step of version 2."""
    versions: list[int] = []
    journal = JournalFile(path, lambda now: die_at(step, now) if versions else None)
    journal.write(entries_of(1))
    versions.append(1)
    journal.write(entries_of(2))
