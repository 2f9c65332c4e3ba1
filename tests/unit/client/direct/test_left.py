"""What a transport leaves: to the child of its process, and when it is closed."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
from slotcar_client import errors

from tests.tolerances import assert_close
from tests.unit.client.direct.calls import connected, forward, rows, truth
from tests.unit.client.direct.slots_writer import A, C, SlotsWriter

REPOSITORY = Path(__file__).resolve().parents[4]
FORK = """
import os
import torch
from tests.unit.client.direct import calls
from tests.unit.client.direct.slots_writer import A, SlotsWriter
torch.set_num_threads(1)
writer = SlotsWriter()
writer.load(0, A)
transport, x = calls.connected(writer), calls.rows(2, "q")
call = calls.forward(writer, writer.map(0), (2,), {"q": x})
before = transport.forward(call)["q"]
for _ in range(2):
    child = os.fork()
    if not child:
        assert transport.forward(call)["q"].equal(before)
        transport.close()
        del transport
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert transport.forward(call)["q"].equal(before)
assert len(writer.links) == 1, "the connection has stood"
"""


def test_a_child_of_the_process_harms_nothing() -> None:
    """In a process without a channel: gRPC does not survive a fork."""
    subprocess.run([sys.executable, "-c", FORK], cwd=REPOSITORY, check=True, timeout=120)


def mapped_files() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:slotcar" in line]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_is_left_without_the_library_either(without_library: None, writer: SlotsWriter) -> None:
    test_nothing_is_left_when_it_is_closed(writer)


def test_nothing_is_left_when_it_is_closed(writer: SlotsWriter) -> None:
    """The memory goes with its last reference, not with the next garbage collection, and not before."""
    connected(writer).close()
    gc.collect()
    writer.regions.clear()
    gc.disable()
    try:
        before = len(mapped_files()), descriptors()
        transport = connected(writer)
        output = transport.forward(forward(writer, writer.map(0), (2,), {"q": rows(2, "q")}))["q"]
        with pytest.raises(errors.ShapeMismatch):
            transport.forward(forward(writer, writer.map(0), (2,), {"q": rows(3, "q")}))
        writer.begin(0, C)
        assert len(mapped_files()) > before[0]
        transport.close()
        writer.links.pop().close()
        writer.regions.clear()
        del transport
        assert (len(mapped_files()), descriptors()) == before
        assert_close(output, truth([A, A], "q", rows(2, "q")))
    finally:
        gc.enable()
