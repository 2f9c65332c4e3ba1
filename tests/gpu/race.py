"""Small batches of the sweep, for a tool that looks at every access of memory: decode with slices, and prefill."""

from __future__ import annotations

import torch

from tests.gpu.twins import TwinBatch
from tests.kernels.cases import entries_of, site_slots

if __name__ == "__main__":
    parts = [site_slots(520, width, torch.bfloat16, width) for width in (136, 40)]
    TwinBatch(entries_of("zipf", 24, base=0.2), parts, torch.bfloat16, "add").check()
    TwinBatch(entries_of("skewed", 40, base=0.2, ragged=True), parts[:1], torch.bfloat16, "in place", 513).check()
    print("right")
