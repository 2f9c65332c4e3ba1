"""Between the tensors of a Forward's messages and values; fields that are malformed raise with their names."""

from __future__ import annotations

from collections.abc import Iterable

from slotcar.v1 import engine_service_pb2, tensor_pb2

from slotcar_sidecar.core.errors import RequestInvalid
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.tensor import INDEX_DTYPE, Matrix
from slotcar_sidecar.rpc.convert import DTYPES, known

__all__ = ["from_matrix", "to_items"]

_DTYPE_NAMES: dict[int, str] = {
    **{number: name for name, number in DTYPES.items()},
    tensor_pb2.DTYPE_INT32: INDEX_DTYPE,
}
_ADDS: dict[int, bool] = {
    engine_service_pb2.FORWARD_MODE_UNSPECIFIED: False,
    engine_service_pb2.FORWARD_MODE_DELTA: False,
    engine_service_pb2.FORWARD_MODE_ADD: True,
}


def to_items(items: Iterable[engine_service_pb2.ForwardItem], model: ModelSpec | None) -> list[ForwardItem]:
    """The items of a Forward; one without x shares the Matrix of the item before that has one."""
    sites = model.by_name if model else {}
    converted: list[ForwardItem] = []
    x: Matrix | None = None
    for index, item in enumerate(items):
        field = f"items[{index}]"
        site = sites.get(item.site)
        is_embedding = site is not None and site.kind == "embedding"
        if item.HasField("x"):
            x = to_matrix(f"{field}.x", item.x)
        elif x is None and not is_embedding:
            raise RequestInvalid(f"{field}.x", found="nothing", wanted="a tensor")
        converted.append(_to_item(field, item, None if is_embedding and not item.HasField("x") else x))
    return converted


def _to_item(field: str, item: engine_service_pb2.ForwardItem, x: Matrix | None) -> ForwardItem:
    adds = known(f"{field}.mode", item.mode, _ADDS)
    if item.HasField("base") != adds:
        found = "nothing" if adds else "present"
        raise RequestInvalid(f"{field}.base", found=found, wanted="it in mode ADD only")
    return ForwardItem(
        item.site,
        x,
        to_matrix(f"{field}.base", item.base) if adds else None,
        aux=to_matrix(f"{field}.aux", item.aux) if item.HasField("aux") else None,
        out_dtype=known(f"{field}.out_dtype", item.out_dtype, _DTYPE_NAMES) if item.out_dtype else None,
    )


def to_matrix(field: str, tensor: tensor_pb2.TensorRef) -> Matrix:
    """Raises RequestInvalid or ShapeMismatch."""
    if tensor.WhichOneof("storage") is None:
        raise RequestInvalid(f"{field}.storage", found="nothing", wanted="inline")
    dtype = _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype or "unspecified"))
    return Matrix.checked(field, dtype, tensor.rows, tensor.columns, tensor.row_stride, tensor.inline)


def from_matrix(matrix: Matrix) -> tensor_pb2.TensorRef:
    """The matrix as a message; its rows must be contiguous."""
    assert matrix.row_stride == matrix.columns
    return tensor_pb2.TensorRef(
        dtype=DTYPES[matrix.dtype], rows=matrix.rows, columns=matrix.columns, inline=bytes(matrix.data)
    )
