"""What is, as gauges: one snapshot of the server per scrape, so that all values are of one moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from slotcar_sidecar.core.calls import Capacity, TierUse
from slotcar_sidecar.core.ids import AdapterName, Digest, SlotId
from slotcar_sidecar.core.layout import Layout, SlotState
from slotcar_sidecar.ops.catalogue import BY_NAME, LORA_INFO

_Rows = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class ResidentName:
    """A name whose adapter is in a slot."""

    name: AdapterName
    digest: Digest
    slot: SlotId
    pins: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The server at `time`, in Unix seconds. `pins` by kind of owner; `residents` as many as are to be named.

    `waiting`: the names for which slots are being written, or whose mappings wait for slots.
    """

    time: float
    layout: Layout
    capacity: Capacity
    pins: Mapping[str, int]
    holds: int
    mappings: int
    residents: tuple[ResidentName, ...] = ()
    waiting: tuple[AdapterName, ...] = ()


@dataclass(frozen=True, slots=True)
class Naming:
    """Whether adapters are named at all, and what the gauge for routers is called."""

    names_adapters: bool = True
    lora_info: str = LORA_INFO


class Gauges(Collector):
    """Shows what `snapshot` returns at each scrape."""

    def __init__(self, snapshot: Callable[[], Snapshot], naming: Naming) -> None:
        self._snapshot = snapshot
        self._naming = naming

    def collect(self) -> Iterator[GaugeMetricFamily]:
        now = self._snapshot()
        for name, rows in (_of_slots(now) | _of_tiers(now) | _of_owners(now)).items():
            yield _family(name, rows)
        if self._naming.names_adapters:
            for name, rows in _of_adapters(now).items():
                yield _family(name, rows, self._naming.lora_info if name == LORA_INFO else name)


def _family(name: str, rows: _Rows, shown_name: str = "") -> GaugeMetricFamily:
    described = BY_NAME[name]
    family = GaugeMetricFamily(shown_name or name, described.text, labels=described.labels, unit=described.unit)
    for labels, value in rows:
        family.add_metric(labels, value)
    return family


def _alone(value: float) -> _Rows:
    return [((), value)]


def _by_label(values: Mapping[str, float]) -> _Rows:
    return [((label,), value) for label, value in values.items()]


def _of_slots(now: Snapshot) -> dict[str, _Rows]:
    capacity = now.capacity
    return {
        "slotcar_layout_generation": _alone(now.layout.generation),
        "slotcar_slots": _by_label({state.value: len(now.layout.in_state(state)) for state in SlotState}),
        "slotcar_slots_reserved": _alone(capacity.reserved),
        "slotcar_adapters": _alone(capacity.adapters[0]),
        "slotcar_adapters_kept": _alone(capacity.keeps),
        "slotcar_journal_names": _by_label(
            {"waiting": capacity.restoring, "failed": len(capacity.restore_failures)},
        ),
    }


def _of_tiers(now: Snapshot) -> dict[str, _Rows]:
    capacity = now.capacity
    filled = len(now.layout.slots) - len(now.layout.in_state(SlotState.FREE))
    used, most, held = (count * capacity.slot_bytes for count in (filled, len(now.layout.slots), capacity.pinned))
    device = TierUse(used, most, held, len(now.layout.in_state(SlotState.OCCUPIED, SlotState.DRAINING)))
    tiers = {"device": device, "host": capacity.host, "disk": capacity.disk}
    return {
        "slotcar_tier_adapters": _by_label({tier: use.adapters for tier, use in tiers.items()}),
        "slotcar_tier_used_bytes": _by_label({tier: use.used_bytes for tier, use in tiers.items()}),
        "slotcar_tier_capacity_bytes": _by_label({tier: use.capacity_bytes for tier, use in tiers.items()}),
        "slotcar_tier_held_bytes": _by_label({tier: use.held_bytes for tier, use in tiers.items()}),
    }


def _of_owners(now: Snapshot) -> dict[str, _Rows]:
    return {
        "slotcar_sessions": _alone(now.capacity.sessions[0]),
        "slotcar_mappings": _alone(now.mappings),
        "slotcar_mappings_waiting": _alone(now.capacity.waiting),
        "slotcar_pins": _by_label(now.pins),
        "slotcar_holds": _alone(now.holds),
    }


def _of_adapters(now: Snapshot) -> dict[str, _Rows]:
    names = [(str(each.name), each.digest.short, each) for each in now.residents]
    running = ",".join(name for name, _, _ in names)
    waiting = ",".join(map(str, now.waiting))
    return {
        "slotcar_adapter_pins": [((name, digest, str(each.slot)), each.pins) for name, digest, each in names],
        "slotcar_adapter_bytes": [((name, digest), each.bytes) for name, digest, each in names],
        LORA_INFO: [((str(len(now.layout.slots)), running, waiting), now.time)],
    }
