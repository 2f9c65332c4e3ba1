"""What callers ask of the cache, and what it answers, as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slotcar_sidecar.core.adapter import Adapter
from slotcar_sidecar.core.errors import CapacityExceeded, RequestInvalid, SlotcarError
from slotcar_sidecar.core.forward import ForwardItem, check_items, output_bytes
from slotcar_sidecar.core.ids import AdapterRef, SessionId
from slotcar_sidecar.core.layout import Layout
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.ports import Limits
from slotcar_sidecar.core.residency import OnConflict, Resident
from slotcar_sidecar.core.tensor import Matrix


@dataclass(frozen=True, slots=True)
class LoadCall:
    """What a caller wants to be resident under a name; `source` None means the one that is known."""

    ref: AdapterRef
    source: str | None
    on_conflict: OnConflict
    keep: bool


@dataclass(frozen=True, slots=True)
class Loaded:
    """The name with its adapter, the model it was checked against, and the layout at which it is resident."""

    resident: Resident
    model: ModelSpec
    layout: Layout
    already_resident: bool


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a load would take; `refusal` is the error that it would give."""

    adapter: Adapter
    model: ModelSpec | None
    device_bytes: int
    refusal: SlotcarError | None


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """Rows of a mapping at some sites; `generation` is the one that SetMapping returned."""

    session: SessionId
    mapping_id: int
    generation: int
    row_counts: Sequence[int]
    items: Sequence[ForwardItem]
    plane: str


@dataclass(frozen=True, slots=True)
class Computed:
    """One output per item, and what it was computed with. Times are in seconds."""

    outputs: list[Matrix]
    digests: tuple[str, ...]
    layout: Layout
    queue_seconds: float
    compute_seconds: float


def check_forward(call: ForwardCall, model: ModelSpec, limits: Limits) -> None:
    """Raises unless every tensor fits its site and the rows, and rows and outputs are within their bounds."""
    rows = sum(call.row_counts)
    if rows > limits.max_rows:
        raise RequestInvalid("row_counts", found=f"{rows} rows", wanted=f"at most {limits.max_rows}")
    check_items(call.items, rows, model)
    size = output_bytes(call.items, rows, model)
    if size > limits.max_response_bytes:
        raise CapacityExceeded(
            f"the outputs would have {size} bytes, the server sends at most {limits.max_response_bytes}: "
            "ask for fewer rows or sites in a call",
            found=size,
            wanted=limits.max_response_bytes,
        )
