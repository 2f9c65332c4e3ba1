"""The compiled CPU kernel, where this installation has it: native/lora.h says what it computes and promises."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slotcar_kernels.plan import Plan
from slotcar_kernels.sites import SiteSlots

__all__ = ["ISAS", "Places", "PreparedCall", "available", "backend", "best_isa", "takes"]

ISAS = ("portable", "avx2", "avx512", "avx512-bf16")  # in the order of the library's numbers, the best last

_LIBRARY = Path(__file__).with_name("_native.so")
_ABI_VERSION = 1
_MAX_RANK = 16384
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_REFUSALS = {1: "the plan has positions, rows or slots out of range, wanted each row once", 2: "a rank is too high"}


class Places(NamedTuple):
    """The sites that share an input, and for each where its results go and what is added to them."""

    sites: Sequence[SiteSlots]
    outs: Sequence[Tensor]
    bases: Sequence[Tensor | None]


class _Batch(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64),
        ("order", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("segment_count", ctypes.c_int64),
        ("base_ranges", ctypes.c_void_p),
        ("base_range_count", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )


class _Site(ctypes.Structure):
    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("a_slot_stride", ctypes.c_int64),
        ("a_row_stride", ctypes.c_int64),
        ("b_slot_stride", ctypes.c_int64),
        ("b_row_stride", ctypes.c_int64),
        ("slot_dtype", ctypes.c_int64),
        ("ranks", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("base", ctypes.c_void_p),
        ("base_stride", ctypes.c_int64),
    )


class _Loaded(NamedTuple):
    """The library's function and the best instruction set it has here, or why there is none."""

    forward: Callable[..., int] | None
    isa: str | None
    why_not: str


def available() -> bool:
    """Whether the compiled kernel can run here."""
    return best_isa() is not None


def backend() -> str:
    """What computes here, for people: the best instruction set of the compiled kernel, or "torch: " and why."""
    loaded = _loaded()
    return loaded.isa or f"torch: {loaded.why_not}"


def best_isa() -> str | None:
    """The best of ISAS that the library and this processor have; each before it runs too. None without a library."""
    return _loaded().isa


def takes(site: SiteSlots) -> bool:
    """Whether the kernel can read these slots: rows of A and B contiguous, and no rank beyond its scratch."""
    return site.a.stride(2) == 1 and site.b.stride(2) == 1 and site.a.shape[1] <= _MAX_RANK


class PreparedCall:
    """As cpu.prepare, which has checked the arguments: the library reads and writes where these say, at each run.

    Raises ValueError when the plan's order is not what the library reads.
    """

    def __init__(self, plan: Plan, x: Tensor, places: Places, isa: str, threads: int = 1) -> None:
        forward = _loaded().forward
        assert forward is not None, "the caller asked for the best instruction set, and there is none"
        order = plan.order
        if order is not None and not (
            order.shape == (plan.rows,) and order.dtype == torch.int64 and order.is_contiguous()
        ):
            raise ValueError(f"the plan's order is {tuple(order.shape)} {order.dtype}, wanted {plan.rows} int64")
        segments = array("q", chain.from_iterable(plan.segments))
        base_ranges = array("q", chain.from_iterable(plan.base_ranges))
        self._isa = isa
        self._batch = _Batch(
            plan.rows,
            None if order is None else order.data_ptr(),
            _address(segments),
            len(plan.segments),
            _address(base_ranges),
            len(plan.base_ranges),
            x.data_ptr(),
            x.stride(0),
            x.shape[1],
            _DTYPES[x.dtype],
        )
        slots = [segment[0] for segment in plan.segments]
        ranks = [array("q", [site.ranks[slot] for slot in slots]) for site in places.sites]
        scales = [array("f", [site.scales[slot] for slot in slots]) for site in places.sites]
        self._sites = (_Site * len(places.sites))(*map(_site, *places, ranks, scales))
        self._kept_alive = (order, segments, base_ranges, x, places, ranks, scales)
        self._call = partial(
            forward, ctypes.byref(self._batch), self._sites, len(self._sites), ISAS.index(isa), threads
        )

    def __call__(self) -> None:
        """Raises ValueError when the plan names rows that are not there; then nothing was written."""
        status = self._call()
        if status:
            raise ValueError(_REFUSALS.get(status, f"the library has no kernel for {self._isa} here"))


def _site(site: SiteSlots, out: Tensor, base: Tensor | None, ranks: array[int], scales: array[float]) -> _Site:
    a, b = site.a, site.b
    a_slot_stride, a_row_stride, _ = a.stride()
    b_slot_stride, b_row_stride, _ = b.stride()
    return _Site(
        a.data_ptr(),
        b.data_ptr(),
        a_slot_stride,
        a_row_stride,
        b_slot_stride,
        b_row_stride,
        _DTYPES[a.dtype],
        _address(ranks),
        _address(scales),
        b.shape[2],
        out.data_ptr(),
        out.stride(0),
        None if base is None else base.data_ptr(),
        0 if base is None else base.stride(0),
    )


def _address(values: array[int] | array[float]) -> int:
    return values.buffer_info()[0]


@cache
def _loaded() -> _Loaded:
    if not _LIBRARY.exists():
        return _Loaded(
            None,
            None,
            "this installation has no compiled kernel; in a checkout, `make native` builds it or says why not",
        )
    try:
        library = ctypes.CDLL(str(_LIBRARY))
        version = library.slotcar_abi_version()
    except (OSError, AttributeError) as error:
        return _Loaded(None, None, f"the compiled kernel does not load: {error}")
    if version != _ABI_VERSION:
        return _Loaded(None, None, f"the compiled kernel has version {version}, wanted {_ABI_VERSION}: build it again")
    forward = library.slotcar_lora_forward
    forward.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    forward.restype = ctypes.c_int64
    return _Loaded(forward, ISAS[library.slotcar_best_isa()], "")
