"""The same bits from 20 repeats, in every batch, and from one CUDA graph for all batches of a bucket."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from slotcar_kernels.triton import BatchPlan, Prepared, SiteCall, SlicePart, planes_elements, prepare

from tests.gpu.place import DEVICE
from tests.tolerances import assert_same_bits

pytestmark = pytest.mark.gpu

ON_GPU = DEVICE.type == "cuda"
HIDDEN = 4096 if ON_GPU else 600  # more than one plane
REPEATS = 20 if ON_GPU else 3
# Bucket, live rows, adapters, rank.
SHAPES = [(1, 1, 1, 16), (32, 30, 8, 16), (64, 64, 64, 64), (256, 250, 64, 64), (1024, 700, 8, 16)]
SHAPES = SHAPES if ON_GPU else [(16, 13, 4, 16)]


class Bench:
    """A site with fixed buffers, into which batches are written."""

    def __init__(self, bucket: int, adapters: int, rank: int) -> None:
        generator = torch.Generator().manual_seed(bucket)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(torch.bfloat16).to(DEVICE)

        self.plan = BatchPlan.of_bucket(bucket, adapters, DEVICE)
        ranks = torch.tensor([max(rank - 3 * slot % rank, 1) for slot in range(adapters)], dtype=torch.int32)
        scales = torch.linspace(0.5, 2, adapters)
        part = SlicePart(
            random(adapters, rank, HIDDEN), random(adapters, rank, HIDDEN), ranks.to(DEVICE), scales.to(DEVICE)
        )
        self.x, self.base = random(bucket, HIDDEN), random(bucket, HIDDEN)
        self.rows = self.x.clone(), self.base.clone()
        call = SiteCall([part], torch.empty_like(self.base), self.x, self.base)
        self.planes = torch.empty(planes_elements(self.plan, call), device=DEVICE)
        self.site: Prepared = prepare(self.plan, call, self.planes)

    def launch(self) -> None:
        self.plan.execute()
        self.site.execute()

    def write(self, slots: Sequence[int], rows: Sequence[int]) -> None:
        """A batch of these rows; nothing is left of the one before."""
        for tensor, whole in zip((self.x, self.base), self.rows, strict=True):
            tensor.fill_(torch.nan)
            tensor[: len(rows)] = whole[list(rows)]
        self.planes.fill_(torch.nan)
        self.site.call.out.fill_(torch.nan)
        self.plan.write(slots)

    def out(self, count: int) -> torch.Tensor:
        return self.site.call.out[:count].to("cpu", copy=True)


def slots_of(rows: int, adapters: int) -> list[int]:
    """Some rows are BASE's."""
    chosen = random.Random(rows)
    return [-1 if chosen.random() < 0.1 else chosen.randrange(adapters) for _ in range(rows)]


@pytest.mark.parametrize(("bucket", "rows", "adapters", "rank"), SHAPES)
def test_repeats_have_the_same_bits(bucket: int, rows: int, adapters: int, rank: int) -> None:
    bench, slots, outs = Bench(bucket, adapters, rank), slots_of(rows, adapters), []
    for _ in range(REPEATS):
        bench.write(slots, range(rows))
        bench.launch()
        outs.append(bench.out(rows))
    assert outs[0].isfinite().all()
    for out in outs[1:]:
        assert_same_bits(out, outs[0])


@pytest.mark.parametrize(("bucket", "rows", "adapters", "rank"), SHAPES)
def test_a_row_has_the_same_bits_in_every_batch(bucket: int, rows: int, adapters: int, rank: int) -> None:
    """Shuffled, a half of them, and one alone."""
    bench, slots = Bench(bucket, adapters, rank), slots_of(rows, adapters)
    bench.write(slots, range(rows))
    bench.launch()
    wanted = bench.out(rows)
    shuffled = random.Random(1).sample(range(rows), rows)
    for chosen in (shuffled, shuffled[: rows // 2 + 1], shuffled[:1]):
        bench.write([slots[row] for row in chosen], chosen)
        bench.launch()
        assert_same_bits(bench.out(len(chosen)), wanted[chosen])


@pytest.mark.skipif(not ON_GPU, reason="there are no graphs without a GPU")
@pytest.mark.parametrize(("bucket", "rows", "adapters", "rank"), SHAPES)
def test_one_graph_serves_every_batch_of_its_bucket(bucket: int, rows: int, adapters: int, rank: int) -> None:
    bench, slots = Bench(bucket, adapters, rank), slots_of(rows, adapters)
    bench.write([-1], [0])
    bench.launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bench.launch()
    for count in (rows, 0, 1, rows // 2, rows):
        bench.write(slots[:count], range(count))
        bench.launch()
        wanted = bench.out(count)
        bench.write(slots[:count], range(count))
        graph.replay()
        assert_same_bits(bench.out(count), wanted)
        assert bench.site.call.out[count:].isnan().all(), "written behind the live rows"
