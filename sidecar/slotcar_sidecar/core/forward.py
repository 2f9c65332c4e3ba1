"""One Forward as the core sees it: which sites, which rows, and whether they fit the model and each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slotcar_sidecar.core.errors import RequestInvalid, ShapeMismatch, SiteUnknown
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.tensor import ITEM_BYTES, Matrix


@dataclass(frozen=True, slots=True)
class ForwardItem:
    """One site: its input x [rows, in_features] and, to add to, the base model's output [rows, out_features].

    `out` is where the result goes, if the caller has a place for it.
    """

    site: str
    x: Matrix
    base: Matrix | None = None
    out: Matrix | None = None


def check_items(items: Sequence[ForwardItem], rows: int, model: ModelSpec) -> None:
    """Raises SiteUnknown or ShapeMismatch, naming the field, unless every tensor fits its site and the rows."""
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
        _check_matrix(f"{field}.x", item.x, rows, site.in_features, item.site)
        if item.base is not None:
            _check_matrix(f"{field}.base", item.base, rows, site.out_features, item.site)
            if item.base.dtype != item.x.dtype:
                raise ShapeMismatch(f"{field}.base.dtype", found=item.base.dtype, wanted=item.x.dtype, site=item.site)


def output_bytes(items: Sequence[ForwardItem], rows: int, model: ModelSpec) -> int:
    """Size of all outputs of checked items."""
    return sum(rows * model.by_name[item.site].out_features * ITEM_BYTES[item.x.dtype] for item in items)


def _check_matrix(field: str, matrix: Matrix, rows: int, columns: int, site: str) -> None:
    found, wanted = (matrix.rows, matrix.columns), (rows, columns)
    if found != wanted:
        raise ShapeMismatch(field, found=list(found), wanted=list(wanted), site=site)
