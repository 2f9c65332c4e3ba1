"""A site's Forward on the device: checked and laid out once for a token bucket, then launched as often as wanted.

Invariant: what `prepare` returns has fixed addresses and a fixed grid, reads how much there is to do on the device, and
launches kernels only, so that a CUDA graph of its `execute` serves every batch of its bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import triton
from torch import Tensor
from triton import language as tl

from slotcar_kernels.triton.checks import ADDRESS_BYTES, check_matrix, check_parts, check_separate
from slotcar_kernels.triton.expand import ADD, DELTA, IN_PLACE, expand
from slotcar_kernels.triton.plan import BatchPlan, warp_size
from slotcar_kernels.triton.shrink import shrink
from slotcar_kernels.triton.slices import SlicePart, slice_table
from slotcar_kernels.triton.tiles import RANK_STEP, Block, Tiles, tiles_for

__all__ = ["Prepared", "SiteCall", "planes_elements", "prepare"]


@dataclass(frozen=True, slots=True, eq=False)
class SiteCall:
    """One site: out = base + delta, with the parts side by side in `out`.

    out, base: [bucket, columns of all parts] of one dtype; base None counts as zero, and may be `out` itself.
    x: [bucket, in] in out's dtype; None for an embedding. aux: int32 [bucket, 1], each row's token or expert.
    """

    parts: Sequence[SlicePart]
    out: Tensor
    x: Tensor | None = None
    base: Tensor | None = None
    aux: Tensor | None = None

    @property
    def is_embedding(self) -> bool:
        return self.x is None

    @property
    def mode(self) -> tl.constexpr:
        if self.base is None:
            return DELTA
        return IN_PLACE if self.base.data_ptr() == self.out.data_ptr() else ADD

    @property
    def is_wide(self) -> bool:
        """Whether products are in float32, because x or A is, or the two differ."""
        a = self.parts[0].a.dtype
        return a == torch.float32 or (self.x is not None and self.x.dtype != a)

    @property
    def multiple(self) -> int:
        """What all strides and widths, in elements, are multiples of: 16, or as many as make 16 bytes; else 1."""
        rows = [tensor for tensor in (self.x, self.base, self.out) if tensor is not None]
        tensors = [*rows, *(tensor for part in self.parts for tensor in (part.a, part.b))]
        numbers = [stride for tensor in tensors for stride in tensor.stride()[:-1]]
        numbers += [part.out_features for part in self.parts] + ([] if self.x is None else [self.x.shape[1]])
        if any(tensor.data_ptr() % ADDRESS_BYTES for tensor in tensors):
            return 1
        least = ADDRESS_BYTES // min(tensor.itemsize for tensor in tensors)
        return next((step for step in (16, least) if all(number % step == 0 for number in numbers)), 1)

    def tiles(self, plan: BatchPlan) -> Tiles:
        return tiles_for(plan.bucket, self.is_wide, self.multiple > 1)


def prepare(plan: BatchPlan, call: SiteCall, planes: Tensor | None = None) -> Prepared:
    """out = base + scale · (x Aᵀ) Bᵀ for each live row by its slot; base alone, or zeros, for rows without a delta.

    plan: of the token bucket; `plan.execute` goes before, on the same stream. Sites of experts and embeddings sort, or
    check, their rows by aux themselves: if a number is out of range, nothing is written and the faults are not 0.
    planes: float32 scratch of at least `planes_elements`, for all calls that run one after the other; None makes some.
    Rows behind the live ones are neither read nor written. The sums are float32, rounded once, and a row gets the same
    bits in every batch of the bucket.

    Raises ValueError when anything does not fit; then nothing was launched.
    """
    routed = _routed(plan, call)
    check_parts(routed, call.parts, call.is_embedding)
    _check_rows(plan, call)
    needed = planes_elements(plan, call)
    if planes is None:
        planes = torch.empty(needed, dtype=torch.float32, device=plan.rows.device)
    if planes.dtype != torch.float32 or not planes.is_contiguous() or planes.device != plan.rows.device:
        raise ValueError(f"planes are {planes.dtype} on {planes.device}, wanted float32 on {plan.rows.device}")
    if planes.numel() < needed or planes.data_ptr() % ADDRESS_BYTES:
        raise ValueError(f"{planes.numel()} elements of planes, wanted {needed} at a multiple of {ADDRESS_BYTES} bytes")
    tiles = call.tiles(plan)
    table, blocks = slice_table(call.parts, (tiles.embed if call.is_embedding else tiles.expand).width)
    return Prepared(routed, call, planes, table, blocks)


def planes_elements(plan: BatchPlan, call: SiteCall) -> int:
    """How many elements of float32 scratch the call needs between its shrink and its expand; 0 for an embedding."""
    if call.x is None:
        return 0
    planes = _plane_count(call.tiles(plan), call.x.shape[1])
    return len(call.parts) * planes * plan.bucket * _padded(call.parts[0].max_rank)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A site's launches; `plan` is the one that it was prepared with, or its own, by aux, whose faults to look at."""

    plan: BatchPlan
    call: SiteCall
    planes: Tensor
    table: Tensor
    blocks: int

    def execute(self) -> None:
        """Enqueues the kernels on the current stream: nothing is allocated, copied or waited for."""
        if self.plan.aux is not None:
            self.plan.execute()
        if self.call.x is not None:
            arguments, constants = self.shrink_launch
            shrink[self._grid(self.tiles.shrink, self._shrink_items)](*arguments, **constants)
        arguments, constants = self.expand_launch
        expand[self._grid(self._expand_block, self.plan.max_tiles * self.blocks)](*arguments, **constants)

    @cached_property
    def tiles(self) -> Tiles:
        return self.call.tiles(self.plan)

    @cached_property
    def shrink_launch(self) -> tuple[tuple[object, ...], dict[str, object]]:
        """Arguments and constants of the shrink; not for an embedding."""
        x, plan, tiles = self.call.x, self.plan, self.tiles
        assert x is not None
        first = self.call.parts[0]
        arguments = (x, plan.order, plan.tiles, plan.counts, self.table, first.a, self.planes, x.stride(0))
        constants = {
            **self._common,
            "FEATURES": x.shape[1],
            "WIDE": self.call.is_wide or _is_interpreted(),
            "PLANE": tiles.plane or _padded(x.shape[1], tiles.shrink.width),
            "STEP": tiles.shrink.width,
            **_how(tiles.shrink, first.max_rank),
        }
        return arguments, constants

    @cached_property
    def expand_launch(self) -> tuple[tuple[object, ...], dict[str, object]]:
        """Arguments and constants of the expand."""
        call, plan, block = self.call, self.plan, self._expand_block
        out, base, first = call.out, call.out if call.base is None else call.base, call.parts[0]
        ids = plan.order if plan.aux is None else plan.aux
        index = (ids, plan.order, plan.tiles, plan.counts, self.table)
        matrices = (first.b, base, out, base.stride(0), out.stride(0), self.blocks)
        arguments = (first.a if call.x is None else self.planes, *index, *matrices)
        constants = {
            **self._common,
            "TOKENS": first.a.shape[1] if call.x is None else 0,
            "PLANES": 1 if call.x is None else _plane_count(self.tiles, call.x.shape[1]),
            "MODE": call.mode.value,
            "INTERPRETED": _is_interpreted(),
            "COLUMNS": block.width,
            **_how(block, first.max_rank),
        }
        return arguments, constants

    @property
    def _common(self) -> dict[str, object]:
        first = self.call.parts[0]
        return {
            "POSITIONS": self.plan.bucket,
            "RANK": first.max_rank if self.call.x is None else _padded(first.max_rank),
            "EXPERTS": self.plan.experts,
            "SLICES": len(self.call.parts),
            "MULTIPLE": self.call.multiple,
            "PRECISION": "ieee" if torch.version.hip else "tf32x3",
            "ROWS": self.tiles.rows,
        }

    @property
    def _expand_block(self) -> Block:
        return self.tiles.embed if self.call.is_embedding else self.tiles.expand

    @property
    def _shrink_items(self) -> int:
        assert self.call.x is not None
        planes = _plane_count(self.tiles, self.call.x.shape[1])
        return self.plan.max_tiles * planes * len(self.call.parts)

    def _grid(self, block: Block, items: int) -> tuple[int]:
        """As many programs as the largest batch has use for, and no more than the device runs at a time."""
        device = self.plan.rows.device
        return (min(items, block.programs * (_multiprocessors(device) if device.type == "cuda" else 1)),)


def _routed(plan: BatchPlan, call: SiteCall) -> BatchPlan:
    """The plan that the call's kernels run on: its own where aux has a say."""
    experts = call.parts[0].experts if call.parts else 1
    is_by_aux = call.is_embedding or (bool(call.parts) and call.parts[0].b.dim() == 4)
    if is_by_aux and call.aux is not None:
        return plan.routed(call.aux, call.parts[0].a.shape[1] if call.is_embedding else experts, experts)
    if is_by_aux or call.aux is not None:
        wanted = "one" if is_by_aux else "none"
        raise ValueError(f"a site with {'no' if call.aux is None else 'an'} aux, wanted {wanted}")
    return plan


def _check_rows(plan: BatchPlan, call: SiteCall) -> None:
    dtype, device, width = call.out.dtype, plan.rows.device, sum(part.out_features for part in call.parts)
    check_matrix("out", call.out, (plan.bucket, width), dtype, device)
    if call.x is not None:
        check_matrix("x", call.x, (plan.bucket, call.parts[0].a.shape[-1]), dtype, device)
    if call.base is not None:
        check_matrix("base", call.base, (plan.bucket, width), dtype, device)
    check_separate(call.out, call.base)


def _how(block: Block, max_rank: int) -> dict[str, object]:
    """The constants of a kernel that say how it runs, and in which steps over the ranks."""
    return {
        "RANKS_STEP": min(block.ranks, triton.next_power_of_2(_padded(max_rank))),
        "num_warps": block.threads // warp_size(),
        "num_stages": block.stages,
    }


def _padded(count: int, step: int = RANK_STEP) -> int:
    return -(-count // step) * step


def _plane_count(tiles: Tiles, features: int) -> int:
    return 1 if tiles.plane is None else -(-features // tiles.plane)


def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _is_interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)
