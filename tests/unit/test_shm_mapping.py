"""Memory that processes share is mapped where it may have huge pages, keeps its bytes, and goes with its last view."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from slotcar.shm.mapping import map_file, use_huge_pages

HUGE = 2 << 20
SIZE = 3 * HUGE + 4096


@pytest.fixture
def descriptor() -> Iterator[int]:
    """A file of SIZE bytes that no folder has."""
    descriptor = os.memfd_create("slotcar-test", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, SIZE)
    yield descriptor
    os.close(descriptor)


def mapped_bytes() -> int:
    """Of this process's mappings of the file."""
    ranges = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "slotcar-test" in line]
    return sum(int(stop, 16) - int(start, 16) for start, _, stop in (text.partition("-") for text in ranges))


def test_two_mappings_are_the_same_memory(descriptor: int) -> None:
    mine, theirs = map_file(descriptor, SIZE, writable=True), map_file(descriptor, SIZE, writable=False)
    assert len(mine) == len(theirs) == SIZE
    mine[0], mine[SIZE - 1] = 1, 2
    assert (theirs[0], theirs[SIZE - 1]) == (1, 2)
    assert os.pread(descriptor, 1, SIZE - 1) == b"\2"


def test_it_begins_where_a_huge_page_may(descriptor: int) -> None:
    views = [map_file(descriptor, SIZE, writable=True) for _ in range(5)]
    assert {ctypes.addressof(ctypes.c_char.from_buffer(view)) % HUGE for view in views} == {0}


def test_what_is_mapped_for_reading_can_not_be_written(descriptor: int) -> None:
    memory = map_file(descriptor, SIZE, writable=False)
    with pytest.raises(TypeError):
        memory[0] = 1
    with pytest.raises(TypeError):
        ctypes.c_char.from_buffer(memory)


def test_it_stays_as_long_as_there_is_a_view(descriptor: int) -> None:
    memory = map_file(descriptor, SIZE, writable=True)
    part = memory[HUGE : HUGE + 8].cast("Q")
    del memory
    gc.collect()
    part[0] = 5
    assert mapped_bytes() == SIZE
    del part
    gc.collect()
    assert mapped_bytes() == 0


@pytest.mark.parametrize(
    ("start", "stop"), [(0, SIZE), (4096, SIZE), (100, 200), (HUGE - 1, HUGE + 1), (HUGE, HUGE), (SIZE, SIZE)]
)
def test_huge_pages_change_no_byte_for_anybody(descriptor: int, start: int, stop: int) -> None:
    memory, theirs = map_file(descriptor, SIZE, writable=True), map_file(descriptor, SIZE, writable=False)
    pattern = bytes(range(251)) * (SIZE // 251 + 1)
    memory[:] = pattern[:SIZE]
    for _ in range(2):
        use_huge_pages(memory, start, stop)
        assert memory == theirs == pattern[:SIZE]
    memory[2 * HUGE] ^= 0xFF
    assert theirs[2 * HUGE] == memory[2 * HUGE]


def test_what_can_not_be_mapped_says_why(descriptor: int) -> None:
    with pytest.raises(ValueError, match="no bytes"):
        map_file(descriptor, 0, writable=False)
    read, write = os.pipe()
    with pytest.raises(OSError, match="No such device") as caught:
        map_file(read, SIZE, writable=False)
    assert caught.value.errno == errno.ENODEV
    os.close(read)
    os.close(write)


def test_neighbours_may_write_while_huge_pages_are_made(descriptor: int) -> None:
    """Another thread counts up a word in the same huge page: no count is lost."""
    memory = map_file(descriptor, SIZE, writable=True)
    words, done = memory[: SIZE // 8 * 8].cast("Q"), threading.Event()

    def count() -> None:
        while not done.is_set():
            words[0] += 1
            words[1] = words[0]

    thread = threading.Thread(target=count)
    thread.start()
    for block in range(3):
        use_huge_pages(memory, block * HUGE + 4096, (block + 1) * HUGE - 4096)
    done.set()
    thread.join()
    assert words[0] == words[1] > 0
