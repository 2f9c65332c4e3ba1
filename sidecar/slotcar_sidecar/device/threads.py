"""How many threads torch uses in the pools that compute."""

from __future__ import annotations

import torch

__all__ = ["compute_pool_initializer"]


def compute_pool_initializer(threads: int) -> None:
    """Lets torch use `threads` threads in the thread that calls it; give it to an executor as `initializer`.

    OpenMP keeps the number per thread: set in the main thread alone, it would leave each worker with one per core.
    """
    torch.set_num_threads(threads)
