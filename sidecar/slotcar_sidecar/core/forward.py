"""One Forward as the core sees it: which sites, which rows, and whether they fit the model and each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slotcar_sidecar.core.errors import RequestInvalid, ShapeMismatch, SiteUnknown
from slotcar_sidecar.core.model import ModelSpec, Site
from slotcar_sidecar.core.tally import Work
from slotcar_sidecar.core.tensor import INDEX_DTYPE, ITEM_BYTES, Matrix


@dataclass(frozen=True, slots=True)
class ForwardItem:
    """One site: its input x [rows, in] and, to add to, the base model's output [rows, out], of the rank that computes.

    `out` is where the result goes, if the caller has a place for it. `aux` [rows, 1] has the id of each row's token,
    for an embedding, which has no x, or its expert; at a linear site it may have the base model's output, without
    adding to it. `out_dtype` is needed where no other tensor says it.
    """

    site: str
    x: Matrix | None
    base: Matrix | None = None
    out: Matrix | None = None
    aux: Matrix | None = None
    out_dtype: str | None = None

    @property
    def dtype(self) -> str:
        """Of the result, once the item is checked."""
        given = self.x or self.base
        dtype = given.dtype if given is not None else self.out_dtype
        assert dtype is not None, "a checked item says its dtype"
        return dtype


def check_items(items: Sequence[ForwardItem], rows: int, model: ModelSpec) -> None:
    """Raises SiteUnknown, ShapeMismatch or RequestInvalid, naming the field, unless all fits the sites and the rows."""
    if not items:
        raise RequestInvalid("items", found="no item", wanted="at least one")
    seen: set[str] = set()
    for index, item in enumerate(items):
        field = f"items[{index}]"
        site = model.by_name.get(item.site)
        if site is None:
            raise SiteUnknown(f"{field}.site", item.site)
        if item.site in seen:
            raise RequestInvalid(f"{field}.site", found=item.site, wanted="each site once")
        seen.add(item.site)
        in_features, out_features = model.rank_features(item.site)
        _check_input(field, item, site, (rows, in_features))
        _check_dtype(field, item)
        if item.base is not None:
            _check_matrix(f"{field}.base", item.base, (rows, out_features), item.dtype, item.site)
        _check_aux(f"{field}.aux", item, site, (rows, out_features))


def work_of(items: Sequence[ForwardItem], rows: int, model: ModelSpec) -> Work:
    """What checked items compute; a tensor that several of them share comes once."""
    given = {id(tensor): tensor for item in items for tensor in (item.x, item.base, item.aux) if tensor is not None}
    out_bytes = sum(rows * model.rank_features(item.site)[1] * ITEM_BYTES[item.dtype] for item in items)
    return Work(rows, sum(tensor.size_bytes for tensor in given.values()), out_bytes)


def _check_input(field: str, item: ForwardItem, site: Site, shape: tuple[int, int]) -> None:
    if site.kind == "embedding":
        if item.x is not None:
            raise RequestInvalid(f"{field}.x", found="present", wanted="nothing: an embedding has ids in aux")
    elif item.x is None:
        raise RequestInvalid(f"{field}.x", found="nothing", wanted="a tensor")
    else:
        dtype = item.x.dtype if item.x.dtype in ITEM_BYTES else " or ".join(ITEM_BYTES)
        _check_matrix(f"{field}.x", item.x, shape, dtype, site.name)


def _check_dtype(field: str, item: ForwardItem) -> None:
    given = item.x or item.base
    if given is None and item.out_dtype is None:
        raise RequestInvalid(f"{field}.out_dtype", found="nothing", wanted=" or ".join(ITEM_BYTES))
    if item.dtype not in ITEM_BYTES:
        wanted = " or ".join(ITEM_BYTES)
        raise ShapeMismatch(
            f"{field}.base.dtype" if given else f"{field}.out_dtype", found=item.dtype, wanted=wanted, site=item.site
        )
    if item.out_dtype not in (None, item.dtype):
        raise ShapeMismatch(f"{field}.out_dtype", found=item.out_dtype, wanted=item.dtype, site=item.site)


def _check_aux(field: str, item: ForwardItem, site: Site, output: tuple[int, int]) -> None:
    aux = item.aux
    if site.kind != "linear":
        if aux is None:
            wanted = "the id of each row's token" if site.kind == "embedding" else "the expert of each row"
            raise RequestInvalid(field, found="nothing", wanted=wanted)
        _check_matrix(field, aux, (output[0], 1), INDEX_DTYPE, site.name)
    elif aux is not None:
        if item.base is not None:
            raise RequestInvalid(field, found="present", wanted="it without base only, which is the same")
        _check_matrix(field, aux, output, item.dtype, site.name)


def _check_matrix(field: str, matrix: Matrix, wanted: tuple[int, int], dtype: str, site: str) -> None:
    found = (matrix.rows, matrix.columns)
    if found != wanted:
        raise ShapeMismatch(field, found=list(found), wanted=list(wanted), site=site)
    if matrix.dtype != dtype:
        raise ShapeMismatch(f"{field}.dtype", found=matrix.dtype, wanted=dtype, site=site)
