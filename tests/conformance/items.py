"""Forward requests for one site of a server under test, and what they must give."""

from __future__ import annotations

from typing import Any

import torch
from slotcar.v1 import engine_service_pb2, tensor_pb2

from tests.conformance.target import Session, Target, alpha_of, tensors_of

TORCH = {
    tensor_pb2.DTYPE_FLOAT32: torch.float32,
    tensor_pb2.DTYPE_FLOAT16: torch.float16,
    tensor_pb2.DTYPE_BFLOAT16: torch.bfloat16,
}


def matrix(rows: int, columns: int, /, **fields: Any) -> tensor_pb2.TensorRef:
    """A sound matrix whose elements count up; `fields` replace what is said of it."""
    values = torch.arange(rows * columns, dtype=torch.float32) / 64
    dtype = fields.get("dtype", tensor_pb2.DTYPE_FLOAT32)
    data = values.to(TORCH.get(dtype, torch.float32)).view(torch.uint8).numpy().tobytes()
    sound = {"dtype": tensor_pb2.DTYPE_FLOAT32, "rows": rows, "columns": columns, "inline": data}
    return tensor_pb2.TensorRef(**sound | fields)


def item(target: Target, rows: int, /, **fields: Any) -> engine_service_pb2.ForwardItem:
    """A delta for the first site; `fields` replace those of the item."""
    return engine_service_pb2.ForwardItem(
        **{"site": target.site.name, "x": matrix(rows, target.site.in_features)} | fields
    )


def forward(session: Session, generation: int, rows: list[int], /, *items: Any, **fields: Any) -> Any:
    """A Forward for mapping 1; `fields` replace those of the request."""
    sound = {
        "session": session.id,
        "mapping_id": 1,
        "generation": generation,
        "row_counts": rows,
        "items": items,
    }
    return engine_service_pb2.ForwardRequest(**sound | fields)


def tensor(message: tensor_pb2.TensorRef) -> torch.Tensor:
    """The values of a message whose rows are not apart."""
    if not message.rows:
        return torch.empty(0, message.columns, dtype=TORCH[message.dtype])
    flat = torch.frombuffer(bytearray(message.inline), dtype=TORCH[message.dtype])
    return flat.reshape(message.rows, message.columns)


def delta(target: Target, name: str, x: torch.Tensor) -> torch.Tensor:
    """What the sound adapter `name` adds at the first site, in float64, of weights that are rounded as in a slot."""
    folder, key = target.root / name, f"base_model.model.{target.site.name}.lora_"
    weights, slot_dtype = tensors_of(folder), TORCH[target.server.slot_dtype]
    a, b = (weights[f"{key}{side}.weight"].to(slot_dtype).double() for side in "AB")
    return alpha_of(folder) / len(a) * x.double() @ a.T @ b.T
