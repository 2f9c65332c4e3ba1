"""A matrix as it travels: dtype, shape and stride beside its bytes, without a tensor library."""

from __future__ import annotations

from dataclasses import dataclass

from slotcar_sidecar.core.errors import ShapeMismatch

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
INDEX_DTYPE = "int32"  # of ids of tokens and numbers of experts
_ITEM_BYTES = ITEM_BYTES | {INDEX_DTYPE: 4}


@dataclass(frozen=True, slots=True)
class Matrix:
    """`rows` × `columns` elements of `dtype`, rows `row_stride` elements apart, at the start of `data`."""

    dtype: str
    rows: int
    columns: int
    row_stride: int
    data: bytes | memoryview

    @property
    def size_bytes(self) -> int:
        """Size of the elements, without what lies between rows."""
        return self.rows * self.columns * _ITEM_BYTES[self.dtype]

    @classmethod
    def checked(cls, field: str, dtype: str, rows: int, columns: int, row_stride: int, data: bytes) -> Matrix:
        """The matrix, or ShapeMismatch for `field` when the bytes are not exactly what the shape needs."""
        if dtype not in _ITEM_BYTES:
            raise ShapeMismatch(f"{field}.dtype", found=dtype, wanted=" or ".join(ITEM_BYTES))
        stride = row_stride if row_stride and rows > 1 else columns
        if stride < columns:
            raise ShapeMismatch(f"{field}.row_stride", found=stride, wanted=f"at least {columns}")
        wanted = ((rows - 1) * stride + columns) * _ITEM_BYTES[dtype] if rows else 0
        if len(data) != wanted:
            raise ShapeMismatch(f"{field}.inline", found=f"{len(data)} bytes", wanted=f"{wanted} bytes")
        return cls(dtype, rows, columns, stride, data)
