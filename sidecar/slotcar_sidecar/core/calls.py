"""What callers ask of the cache, and what it answers, as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slotcar_sidecar.core.adapter import Adapter
from slotcar_sidecar.core.bindings import OnConflict, Resident
from slotcar_sidecar.core.errors import CapacityExceeded, RequestInvalid, SlotcarError
from slotcar_sidecar.core.folded import Folded
from slotcar_sidecar.core.forward import ForwardItem, check_items, work_of
from slotcar_sidecar.core.holds import Hold, HoldTerms
from slotcar_sidecar.core.ids import AdapterRef, SessionId
from slotcar_sidecar.core.layout import Layout, SlotState
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.pins import MappingOwner
from slotcar_sidecar.core.ports import Limits, Upload
from slotcar_sidecar.core.tally import NO_WORK, Work
from slotcar_sidecar.core.tensor import Matrix

MAX_WAIT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class LoadCall:
    """What a caller wants under a name: from `source`, from what came with the call, or else from where it is known.

    `in_slot` False stops at the host tier, with `on_disk` at the disk tier; `hold` takes a hold in the same step.
    `must_read`: the source itself has to have the ref's digest, as the caller may not have bytes for knowing theirs.
    """

    ref: AdapterRef
    source: str | None = None
    on_conflict: OnConflict = OnConflict.FAIL
    keep: bool = False
    in_slot: bool = True
    on_disk: bool = False
    hold: HoldTerms | None = None
    upload: Upload | None = None
    must_read: bool = False

    def __post_init__(self) -> None:
        if self.keep and not self.in_slot:
            found = "TIER_DISK" if self.on_disk else "TIER_HOST"
            raise RequestInvalid("target_tier", found=found, wanted="TIER_DEVICE for what is to be kept")


@dataclass(frozen=True, slots=True)
class Loaded:
    """The name with its adapter, the model it was checked against, the layout at which it is there, and its hold.

    `warnings`: what the slots lose of it.
    """

    resident: Resident
    model: ModelSpec | None
    layout: Layout
    already_resident: bool
    hold: Hold | None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefetchCall:
    """Known adapters to bring nearer, the most wanted first; how near is as in LoadCall."""

    refs: Sequence[AdapterRef]
    in_slot: bool = True
    on_disk: bool = False


@dataclass(frozen=True, slots=True)
class Prefetched:
    """Where an adapter is after a prefetch, None for one that is not known, and what kept it from being nearer."""

    ref: AdapterRef
    resident: Resident | None
    refusal: SlotcarError | None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a load would take; `refusal` is the error that it would give."""

    adapter: Adapter
    model: ModelSpec | None
    device_bytes: int
    refusal: SlotcarError | None


@dataclass(frozen=True, slots=True)
class TierUse:
    """Bytes in a tier, the most that there may be, those that may not be dropped, and of how many adapters they are."""

    used_bytes: int
    capacity_bytes: int
    held_bytes: int
    adapters: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """How full the server is. Pairs are what there is and the most that there may be.

    `restoring` names of the journal are not back yet, and why others could not come back is in `restore_failures`.
    """

    slots: Mapping[SlotState, int]
    pinned: int
    available: int
    reserved: int
    keeps: int
    slot_bytes: int
    host: TierUse
    disk: TierUse
    adapters: tuple[int, int]
    sessions: tuple[int, int]
    waiting: int
    restoring: int
    restore_failures: Mapping[AdapterRef, str]


@dataclass(frozen=True, slots=True)
class MappingCall:
    """A mapping that a session wants. `load`: make resident what is in no slot.

    `wait_seconds`: how long to wait, in the order of the calls, until enough slots can be had.
    """

    session: SessionId
    mapping_id: int
    refs: Folded[AdapterRef | None]
    load: bool = False
    wait_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.wait_seconds <= MAX_WAIT_SECONDS:
            raise RequestInvalid("wait", found=self.wait_seconds, wanted=f"0 to {MAX_WAIT_SECONDS:g} seconds")

    @property
    def owner(self) -> MappingOwner:
        return MappingOwner(self.session, self.mapping_id)


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """Rows of a mapping at some sites; `generation` is the one that SetMapping returned."""

    session: SessionId
    mapping_id: int
    generation: int
    row_counts: Sequence[int]
    items: Sequence[ForwardItem]
    plane: str
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Computed:
    """One output per item, and what it was computed with. Times are in seconds."""

    outputs: Sequence[Matrix]
    digests: tuple[str, ...]
    layout: Layout
    queue_seconds: float
    compute_seconds: float
    work: Work = NO_WORK


def check_forward(call: ForwardCall, model: ModelSpec, limits: Limits) -> Work:
    """What it computes. Raises unless every tensor fits its site and the rows, and rows and outputs their bounds."""
    if call.rank >= model.tensor_parallel > 1:
        raise RequestInvalid("rank", found=call.rank, wanted=f"below {model.tensor_parallel}, the model's ranks")
    rows = sum(call.row_counts)
    if rows > limits.max_rows:
        raise RequestInvalid("row_counts", found=f"{rows} rows", wanted=f"at most {limits.max_rows}")
    check_items(call.items, rows, model)
    work = work_of(call.items, rows, model)
    if work.out_bytes > limits.max_response_bytes:
        raise CapacityExceeded(
            f"the outputs would have {work.out_bytes} bytes, the server sends at most {limits.max_response_bytes}: "
            "ask for fewer rows or sites in a call",
            found=work.out_bytes,
            wanted=limits.max_response_bytes,
        )
    return work
