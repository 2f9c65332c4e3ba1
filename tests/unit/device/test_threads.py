"""Each thread computes by itself: what is counted are threads and the times one waits, never the time that it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from slotcar_kernels import native

REPOSITORY = Path(__file__).resolve().parents[3]

# Two pools and a thread of rings, as the server has them; each computes with torch what OpenMP shares out.
POOLS = """
import os, sys, threading
from concurrent.futures import ThreadPoolExecutor
import torch
from slotcar_sidecar.device.threads import compute_alone

def count():
    return len(os.listdir("/proc/self/task"))

def compute(barrier):
    barrier.wait()
    x = torch.ones(512, 512)
    for _ in range(3):
        torch.aminmax(x @ x)
    found.append(torch.get_num_threads())
    barrier.wait()
    barrier.wait()  # until they are counted

def ring(barrier):
    begin()
    compute(barrier)

begin = compute_alone if sys.argv[1] == "alone" else lambda: None
found, before, together = [], count(), threading.Barrier(6)
pools = [ThreadPoolExecutor(2, initializer=begin) for _ in ("load", "compute")]
ringing = threading.Thread(target=ring, args=(together,))
ringing.start()
for pool in pools * 2:
    pool.submit(compute, together)
together.wait()
together.wait()
print(sorted(found), count() - before - 5)
together.wait()
"""

# A thread of an engine or a ring that makes Forwards with the compiled kernel.
FORWARDS = """
import os, resource, threading
import torch
from slotcar_kernels.cpu import prepare
from slotcar_kernels.plan import plan_rows
from slotcar_kernels.sites import SiteSlots

site = SiteSlots(torch.ones(2, 16, 1024), torch.ones(2, 16, 1024), [16, 16], [1.0, 1.0])
x, out = torch.ones(8, 1024), torch.empty(8, 1024)
forward = prepare(plan_rows([(0, 4), (1, 4)]), x, [site], [out])

def counts():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw, len(os.listdir("/proc/self/task"))

def run():
    forward()
    waits, threads = counts()
    for _ in range(1000):
        forward()
    waits_after, threads_after = counts()
    print(waits_after - waits, threads_after - threads, torch.get_num_threads())

thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def printed(program: str, *arguments: str) -> str:
    """What a process prints in which OpenMP would take two threads, whatever the machine."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=REPOSITORY,
        env=environment | {"OMP_NUM_THREADS": "2"},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout.strip()


def test_every_pool_and_ring_computes_in_its_own_threads_alone() -> None:
    assert printed(POOLS, "alone") == "[1, 1, 1, 1, 1] 0", "the threads that torch may use, and how many it has started"


def test_left_to_itself_openmp_starts_threads_beside_them() -> None:
    assert printed(POOLS, "as they are") == "[2, 2, 2, 2, 2] 5"


@pytest.mark.skipif(not native.available(), reason=native.backend())
def test_a_forward_waits_for_nobody_and_leaves_torch_as_it_is() -> None:
    waits, started, torch_threads = map(int, printed(FORWARDS).split())
    assert waits < 50, "times that the thread gave up its core of its own accord, in 1000 Forwards"
    assert started == 0
    assert torch_threads == 2
