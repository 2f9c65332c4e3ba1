"""What a load gives to a name, and what a name then has: values, without the tables that they come from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from slotcar_sidecar.core.adapter import Adapter
from slotcar_sidecar.core.ids import AdapterName, Digest, SlotId
from slotcar_sidecar.core.layout import SlotState


class OnConflict(Enum):
    """What a load does when its name has other bytes."""

    FAIL = "fail"
    REPLACE = "replace"


@dataclass(frozen=True, slots=True)
class Resident:
    """A name with what it resolves to, and did before; `slot` is None when the adapter is in no slot."""

    name: AdapterName
    adapter: Adapter
    source: str
    slot: SlotId | None
    keep: bool
    pins: int
    history: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class Unloaded:
    """What an unload did; `slot_state` is None when the adapter was in no slot."""

    digest: Digest
    slot_state: SlotState | None
    pins_ended: int


@dataclass(frozen=True, slots=True)
class Binding:
    """The name that a load gives to an adapter, and how. `source` is where it was read now, None if it was not."""

    name: AdapterName
    on_conflict: OnConflict = OnConflict.FAIL
    keep: bool = False
    source: str | None = None
    in_slot: bool = True
