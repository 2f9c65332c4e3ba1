"""The threads of torch in the pools that compute."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from slotcar_sidecar.device.threads import compute_pool_initializer


def test_each_worker_has_its_number_of_threads_whatever_the_main_thread_has() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(2, initializer=compute_pool_initializer, initargs=(1,)) as pool:
            assert set(pool.map(lambda _: torch.get_num_threads(), range(8))) == {1}
    finally:
        torch.set_num_threads(before)
