"""The compiled CPU kernel, where this installation has it: native/lora.h says what it computes and promises."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slotcar_kernels.plan import Plan
from slotcar_kernels.sites import SiteSlots

__all__ = [
    "DTYPE_NUMBERS",
    "ISAS",
    "NativePlan",
    "PreparedCall",
    "PreparedSeed",
    "address",
    "available",
    "backend",
    "best_isa",
    "fill",
    "library",
    "takes",
]

ISAS = ("portable", "avx2", "avx512", "avx512-bf16")  # in the order of the library's numbers, the best last

_LIBRARY = Path(__file__).with_name("_native.so")
_ABI_VERSION = 3
_MAX_RANK = 16384
DTYPE_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_REFUSALS = {
    1: "the plan has positions, rows or slots out of range, wanted each row once",
    2: "a rank is too high",
    4: "an id is of no token",
}


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
        ("ids", ctypes.c_void_p),
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
        ("experts", ctypes.c_int64),
        ("a_expert_stride", ctypes.c_int64),
        ("b_expert_stride", ctypes.c_int64),
    )


class _Seed(ctypes.Structure):
    _fields_ = (
        ("vectors", ctypes.c_void_p),
        ("slot_stride", ctypes.c_int64),
        ("bias_offset", ctypes.c_int64),
        ("flags", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("seed", ctypes.c_void_p),
        ("seed_stride", ctypes.c_int64),
        ("base", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("base_stride", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
    )


# Where in the words of a batch, and of a site, what changes is; each field is one word. The plan comes first.
_WORD = 8
_X, _X_STRIDE, _IDS = (field.offset // _WORD for field in (_Batch.x, _Batch.x_stride, _Batch.ids))
_OUT, _OUT_STRIDE = (field.offset // _WORD for field in (_Site.out, _Site.out_stride))
_BASE, _BASE_STRIDE = (field.offset // _WORD for field in (_Site.base, _Site.base_stride))
_RANKS, _SCALES = (field.offset // _WORD for field in (_Site.ranks, _Site.scales))
_PLAN_WORDS = _X
_BATCH_WORDS, _SITE_WORDS = (ctypes.sizeof(struct) // _WORD for struct in (_Batch, _Site))


class _Loaded(NamedTuple):
    """The library and the best instruction set it has here, or why there is none."""

    library: ctypes.CDLL | None
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


def library() -> ctypes.CDLL | None:
    """The library, for other modules of this package: the headers in native/ say what it has. None without one."""
    return _loaded().library


def takes(site: SiteSlots) -> bool:
    """Whether the kernel can read these slots: rows of A and B contiguous, and no rank beyond its scratch."""
    return site.a.stride(-1) == 1 and site.b.stride(-1) == 1 and site.max_rank <= _MAX_RANK


class NativePlan:
    """A plan as the library reads it."""

    def __init__(self, plan: Plan) -> None:
        """Raises ValueError when its order is not what the library reads."""
        order = plan.order
        if order is not None and not (
            order.shape == (plan.rows,) and order.dtype == torch.int64 and order.is_contiguous()
        ):
            raise ValueError(f"the plan's order is {tuple(order.shape)} {order.dtype}, wanted {plan.rows} int64")
        segments = array("q", chain.from_iterable(plan.segments))
        base_ranges = array("q", chain.from_iterable(plan.base_ranges))
        self.words = array(
            "q",
            (
                plan.rows,
                0 if order is None else order.data_ptr(),
                address(segments),
                len(plan.segments),
                address(base_ranges),
                len(plan.base_ranges),
            ),
        )
        """The first fields of SlotcarBatch."""
        self._kept_alive = order, segments, base_ranges


class PreparedCall:
    """Sites that share an input: each run is of the plan that `use`, and of the tensors that `point` named last.

    As `cpu.prepare`, which has checked them all. The caller keeps alive what is used and pointed at.
    """

    def __init__(self, dtype: torch.dtype, sites: Sequence[SiteSlots], kernel: tuple[str, int]) -> None:
        """`kernel` is one of ISAS and the number of threads. The sites' ranks and scales are not read."""
        batch = _Batch(in_features=sites[0].in_features if sites else 0, dtype=DTYPE_NUMBERS[dtype])
        # The structs one after the other, as words, which are faster to change than fields of structs.
        self._words = array("q", b"".join(map(bytes, (batch, *map(_site, sites)))))
        self._firsts = range(_BATCH_WORDS, len(self._words), _SITE_WORDS)
        self._outs = [site + _OUT for site in self._firsts]
        self._kept_alive = sites
        self._x = _IDS if sites and sites[0].embedding else _X
        self._isa, threads = kernel
        at = address(self._words)
        self._arguments = at, at + ctypes.sizeof(_Batch), len(sites), ISAS.index(self._isa), threads
        self.run: Callable[[], int] = partial(_library().slotcar_lora_forward, *self._arguments)
        """Computes; returns 0 or a status of native/lora.h that says why nothing was."""

    def guarded(self, guard: int) -> Callable[[], int]:
        """`run` as a unit under the SlotcarGuard at this address; it returns a status of native/guard.h too."""
        return partial(_library().slotcar_guarded_forward, guard, *self._arguments)

    def use(self, plan: NativePlan, ranks: Iterable[int], scales: Iterable[int]) -> None:
        """`ranks` and `scales` are the addresses of those of the plan's segments, at each site."""
        words = self._words
        words[:_PLAN_WORDS] = plan.words
        for site, at_ranks, at_scales in zip(self._firsts, ranks, scales, strict=True):
            words[site + _RANKS], words[site + _SCALES] = at_ranks, at_scales

    def point(self, x: Tensor, outs: Sequence[Tensor], bases: Sequence[Tensor | None]) -> None:
        """From now on each run reads and writes these tensors."""
        words = self._words
        for site, out, base in zip(self._firsts, outs, bases, strict=True):
            words[site + _OUT_STRIDE] = out.stride(0)
            words[site + _BASE], words[site + _BASE_STRIDE] = (
                (0, 0) if base is None else (base.data_ptr(), base.stride(0))
            )
        self.point_alike(x, outs)

    def point_alike(self, x: Tensor, outs: Iterable[Tensor]) -> None:
        """`point` for outs with the strides of those before, and the same bases."""
        words = self._words
        words[self._x], words[_X_STRIDE] = x.data_ptr(), x.stride()[0]
        for at, out in zip(self._outs, outs, strict=True):
            words[at] = out.data_ptr()

    def refusal(self, status: int) -> ValueError:
        """What a status of native/lora.h other than 0 means; nothing was written then."""
        return ValueError(_REFUSALS.get(status, f"the library has no kernel for {self._isa} here"))


class PreparedSeed:
    """A seed of the rows of a plan, as `seed.prepare`, which has checked it; each run writes it anew."""

    def __init__(
        self, plan: NativePlan, flags: array[int], seed: tuple[Tensor, Tensor, Tensor | None, Tensor | None]
    ) -> None:
        """`flags` has one value per segment; `seed` is vectors, out, base and y. The caller keeps y and base alive."""
        vectors, out, base, y = seed
        batch = _Batch(dtype=DTYPE_NUMBERS[out.dtype])
        self._batch = array("q", bytes(batch))
        self._batch[:_PLAN_WORDS] = plan.words
        self._seed = _Seed(
            vectors=vectors.data_ptr(),
            slot_stride=vectors.stride(0),
            bias_offset=vectors.stride(1),
            flags=address(flags),
            out_features=vectors.shape[2],
            seed=out.data_ptr(),
            seed_stride=out.stride(0),
            base=0 if base is None else base.data_ptr(),
            base_stride=0 if base is None else base.stride(0),
            y=0 if y is None else y.data_ptr(),
            y_stride=0 if y is None else y.stride(0),
        )
        self._kept_alive = plan, flags, seed

    def run(self, isa: str) -> None:
        """Writes the seed. Raises ValueError when the plan does not fit; then nothing was written."""
        status = _library().slotcar_seed(address(self._batch), ctypes.addressof(self._seed), ISAS.index(isa))
        if status:
            raise ValueError(_REFUSALS.get(status, f"the library has no kernel for {isa} here"))


def fill(arrays: array[int], count: int, dtype: torch.dtype, isa: str) -> None:
    """Writes `count` arrays of slots of `dtype`, each as its words in `arrays` say: those of SlotcarFill in lora.h.

    The caller has checked them. Raises ValueError when the instruction set is not there; then nothing was written.
    """
    if _library().slotcar_fill(address(arrays), count, DTYPE_NUMBERS[dtype], ISAS.index(isa)):
        raise ValueError(f"the library has no kernel for {isa} here")


def _site(site: SiteSlots) -> _Site:
    a, b = site.a, site.b
    a_slot_stride, *a_expert_stride, a_row_stride, _ = a.stride()
    b_slot_stride, *b_expert_stride, b_row_stride, _ = b.stride()
    return _Site(
        a=a.data_ptr(),
        b=b.data_ptr(),
        a_slot_stride=a_slot_stride,
        a_row_stride=a_row_stride,
        b_slot_stride=b_slot_stride,
        b_row_stride=b_row_stride,
        slot_dtype=DTYPE_NUMBERS[a.dtype],
        out_features=site.out_features,
        experts=site.experts,
        a_expert_stride=a_expert_stride[0] if a_expert_stride else 0,
        b_expert_stride=b_expert_stride[0] if b_expert_stride else 0,
    )


def address(values: array[int] | array[float]) -> int:
    """Of the first value; it stays the same until the array's length changes."""
    return values.buffer_info()[0]


def _library() -> ctypes.CDLL:
    library = _loaded().library
    assert library is not None, "the caller asked for the best instruction set, and there is none"
    return library


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
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for function, arguments in (
        (library.slotcar_lora_forward, (pointer, pointer, number, number, number)),
        (library.slotcar_fill, (pointer, number, number, number)),
        (library.slotcar_seed, (pointer, pointer, number)),
        (library.slotcar_guarded_forward, (pointer, pointer, pointer, number, number, number)),
        (library.slotcar_guard_begin, (pointer, number)),
        (library.slotcar_guard_end, (pointer,)),
    ):
        function.argtypes, function.restype = arguments, number
    return _Loaded(library, ISAS[library.slotcar_best_isa()], "")
