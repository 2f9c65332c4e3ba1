"""LoRA for rows of several adapters on a GPU, in launches that one CUDA graph per token bucket serves any mix with.

A device makes, once for each token bucket, the buffers of a batch and what its sites launch, and then replays:

    plan = BatchPlan.of_bucket(bucket, slot_count, device)
    parts = [SlicePart(a, b, ranks, scales), ...]            # q, k and v of a packed site: views of the slots
    site = prepare(plan, SiteCall(parts, out, x, base))      # checks everything, raises ValueError, launches nothing

    plan.write(slots_by_row, staging)                        # of a batch: copies, enqueued on the current stream
    plan.execute(); site.execute()                           # kernels only: what a CUDA graph captures and replays

Addresses stay: `plan.rows` and `plan.slots` are what a batch changes; x, base, aux and out are read and written where
they were at `prepare`; A, B, ranks and scales where the slots are, as they are when the kernels run, so that a fill
needs no new graph. How many tiles there are is read on the device by a grid that depends on the bucket alone; rows
behind the live ones are neither read nor written. Nothing waits for the device, and nothing on it is atomic.

Rows of BASE, and of slots with rank 0, get zeros, or the base's bits, or are left alone where base is `out` (I9).
No rows, and rows of BASE only, are batches like others. Where aux, or a slot, is out of range, a site writes nothing,
and its `plan.faults` are not all 0 once its work is complete.
"""

from slotcar_kernels.triton.checks import check_ranks
from slotcar_kernels.triton.plan import BatchPlan
from slotcar_kernels.triton.site import Prepared, SiteCall, planes_elements, prepare
from slotcar_kernels.triton.slices import SlicePart

__all__ = ["BatchPlan", "Prepared", "SiteCall", "SlicePart", "check_ranks", "planes_elements", "prepare"]
