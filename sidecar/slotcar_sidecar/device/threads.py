"""How the threads of this process compute: each by itself, so that one Forward waits for no other thread.

OpenMP, which torch computes with, has three traps. It keeps the number of its threads for each thread that starts it:
set in the main thread alone, it would leave every other with one per core. Its threads spin after each computation, and
so take the cores of those that compute. And on a machine that does something else too, the slowest of them is waited
for. The compiled kernel has none of that: its caller says how many threads it takes.
"""

from __future__ import annotations

import torch

__all__ = ["compute_alone"]


def compute_alone() -> None:
    """Lets torch use no other thread than the caller; to be called first in each that computes or loads."""
    torch.set_num_threads(1)
