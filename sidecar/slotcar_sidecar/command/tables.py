"""From the client's values to rows of text for people; nothing is printed here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from slotcar_client import (
    Capacity,
    DesiredAdapter,
    DesiredSet,
    Event,
    Layout,
    MappingInfo,
    Prefetched,
    SessionInfo,
    Slot,
    Snapshot,
)

_DIGEST_CHARACTERS = 12
_BAR_CHARACTERS = 20


@dataclass(frozen=True, slots=True)
class Rows:
    """A table before anybody knows how wide it may be; the first columns matter most."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def first(self, count: int) -> Rows:
        """At most `count` rows, the last of which says how many are missing."""
        if len(self.rows) <= count:
            return self
        shown = self.rows[: max(count - 1, 0)]
        missing = f"+{len(self.rows) - len(shown)}"
        return Rows(self.headers, (*shown, (missing, *[""] * (len(self.headers) - 1))))


@dataclass(frozen=True, slots=True)
class Pin:
    """A mapping or a hold that pins a slot; `owner` is "mapping" or "hold", `owner_id` its id."""

    slot: int
    session: str
    client_name: str
    owner: str
    owner_id: int


def pins_of(sessions: Iterable[SessionInfo], layout: Layout) -> tuple[Pin, ...]:
    """Who pins which slot, in order of the slots."""
    slot_of = {slot.digest: slot.index for slot in layout.slots if slot.digest}
    pins: list[Pin] = []
    for session in sessions:
        who = (session.session, session.client_name)
        for mapping in session.mappings:
            if mapping.pinned:
                pins += [Pin(slot, *who, "mapping", mapping.mapping_id) for slot in mapping.slots]
        for hold in session.holds:
            slot = slot_of.get(digest_of(hold.ref))
            if hold.tier == "device" and slot is not None:
                pins.append(Pin(slot, *who, "hold", hold.hold_id))
    return tuple(sorted(pins, key=lambda pin: (pin.slot, pin.session, pin.owner, pin.owner_id)))


def adapters(snapshot: Snapshot, pins: Sequence[Pin]) -> Rows:
    """Each name, and after them the slots that drain."""
    rows = [
        (
            *(a.name, a.tier, number(a.slot), str(a.rank), human_bytes(a.bytes), str(a.pins)),
            *("yes" if a.keep else "-", short(a.digest), pinned_by(a.slot, pins)),
        )
        for a in snapshot.adapters
    ]
    for slot in snapshot.layout.slots:
        if slot.state == "draining":
            holders = [pin for pin in pins if pin.slot == slot.index]
            rows.append(
                (
                    *("(draining)", "device", str(slot.index), "-", "-", str(len(holders))),
                    *("-", short(slot.digest), pinned_by(slot.index, pins)),
                )
            )
    return Rows(("NAME", "TIER", "SLOT", "RANK", "SIZE", "PINS", "KEEP", "DIGEST", "PINNED BY"), tuple(rows))


def prefetched(found: Iterable[Prefetched]) -> Rows:
    """Where each adapter is, and why it is no nearer."""
    rows = [
        (each.ref, *((a.tier, number(a.slot)) if (a := each.adapter) else ("-", "-")), each.why_not) for each in found
    ]
    return Rows(("NAME", "TIER", "SLOT", "WHY NO NEARER"), tuple(rows))


def desired(found: Iterable[DesiredAdapter]) -> Rows:
    """What is declared, how far each is, and why it is not there."""
    rows = tuple(
        (
            *(each.name or each.place, each.desired or "-", each.tier or "-", each.state),
            *(human_seconds(each.since_seconds), str(each.attempts)),
            "-" if each.next_try_seconds is None else f"in {human_seconds(each.next_try_seconds)}",
            f"{each.reason}: {each.message}" if each.reason else "-",
        )
        for each in found
    )
    return Rows(("ADAPTER", "DESIRED", "TIER", "STATE", "SINCE", "ATTEMPTS", "NEXT TRY", "CAUSE"), rows)


def undone(found: Iterable[DesiredAdapter]) -> Rows:
    """What is declared and not there, and why."""
    rows = tuple(
        (each.name or each.place, each.state, f"{each.reason}: {each.message}" if each.reason else "-")
        for each in found
    )
    return Rows(("NOT AS DECLARED", "STATE", "CAUSE"), rows)


def desired_file(desired: DesiredSet) -> tuple[str, ...]:
    """The file behind the table, in a line, and what is wrong with it in another."""
    file, states = desired.file, [each.state for each in desired.adapters]
    if file is None:
        return ()
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "no entries"
    version = f"version {short(file.version)}" if file.version else "no version yet"
    wrong = (f"what is in it now is not in force: {file.reason}: {file.message}",) if file.reason else ()
    return (f"{file.path}: {counts}; {version}", *wrong)


def slots(snapshot: Snapshot, pins: Sequence[Pin]) -> Rows:
    """Each slot with its adapter and who pins it."""
    rows = tuple(
        (str(slot.index), slot.state, adapter_in(slot, snapshot), pinned_by(slot.index, pins))
        for slot in snapshot.layout.slots
    )
    return Rows(("SLOT", "STATE", "ADAPTER", "PINNED BY"), rows)


def outside(snapshot: Snapshot) -> Rows:
    """The names that are in no slot."""
    rows = tuple((a.name, a.tier, human_bytes(a.bytes)) for a in snapshot.adapters if a.slot is None)
    return Rows(("IN NO SLOT", "TIER", "SIZE"), rows)


def sessions(found: Iterable[SessionInfo]) -> Rows:
    """Each session in one row."""
    rows = tuple(
        (
            *(session.session, session.client_name or "-", life(session), ranks(session)),
            *(" ".join(session.planes) or "stream", str(session.reserved_slots), str(session.forwards_in_flight)),
            *(str(len(session.mappings)), str(len(session.holds))),
        )
        for session in found
    )
    headers = ("SESSION", "CLIENT", "STATE", "RANKS", "PLANES", "RESERVED", "FORWARDS", "MAPPINGS", "HOLDS")
    return Rows(headers, rows)


def mappings(session: SessionInfo) -> Rows:
    rows = tuple(
        (
            *(str(mapping.mapping_id), str(mapping.generation), " ".join(map(str, mapping.slots)) or "-"),
            *("yes" if mapping.pinned else "no", "yes" if mapping.current else "no"),
            *(human_seconds(mapping.idle_seconds), refs(mapping)),
        )
        for mapping in session.mappings
    )
    return Rows(("MAPPING", "GENERATION", "SLOTS", "PINNED", "CURRENT", "IDLE", "ADAPTERS"), rows)


def holds(session: SessionInfo) -> Rows:
    rows = tuple(
        (
            *(str(hold.hold_id), hold.tier),
            "until released" if hold.left_seconds is None else human_seconds(hold.left_seconds),
            short_ref(hold.ref),
        )
        for hold in session.holds
    )
    return Rows(("HOLD", "TIER", "LEFT", "ADAPTER"), rows)


def capacity(c: Capacity) -> tuple[str, ...]:
    """How full a server is, a line for each thing that can be full."""
    held = f", {human_bytes(c.host_bytes_held)} of it held" if c.host_bytes_held else ""
    size = f" of {human_bytes(c.slot_bytes)}" if c.slot_bytes else ""
    states = f"{c.slots_free} free, {c.slots_filling} filling, {c.slots_occupied} occupied, {c.slots_draining} draining"
    return (
        f"slots     {c.slots}{size}: {states}",
        f"          {c.slots_pinned} pinned, {c.slots_reserved} reserved, {c.slots_available} available to a load",
        f"host      {human_bytes(c.host_bytes_used)} of {human_bytes(c.host_bytes_capacity)}{held}",
        *_disk(c),
        f"adapters  {c.adapters} of {c.adapters_capacity}, {c.keeps} kept",
        f"sessions  {c.sessions} of {c.sessions_capacity}, {c.waiting} mappings wait for slots",
        *((f"restoring {c.restoring} names of the journal",) if c.restoring else ()),
        *(f"not back  {short_ref(failure.ref)}: {failure.why_not}" for failure in c.restore_failures),
    )


def bars(c: Capacity) -> tuple[str, ...]:
    """How full slots and tiers are, as bars that need no colour; for what has no size, none."""
    used = (
        ("slots", c.slots - c.slots_free, c.slots),
        ("host", c.host_bytes_used, c.host_bytes_capacity),
        ("disk", c.disk_bytes_used, c.disk_bytes_capacity),
    )
    return tuple(f"{name:<9} {_bar(count, most)}" for name, count, most in used if most)


def _bar(count: int, most: int) -> str:
    filled = min(_BAR_CHARACTERS, -(-count * _BAR_CHARACTERS // most))
    return f"[{'#' * filled}{' ' * (_BAR_CHARACTERS - filled)}] {count / most:4.0%}"


def _disk(c: Capacity) -> Iterator[str]:
    if c.disk_bytes_capacity:
        held = f", {human_bytes(c.disk_bytes_held)} of it nowhere else" if c.disk_bytes_held else ""
        yield f"disk      {human_bytes(c.disk_bytes_used)} of {human_bytes(c.disk_bytes_capacity)}{held}"


def event(event: Event, time_format: str = "%Y-%m-%d %H:%M:%S") -> str:
    """One event in a line, with the local time."""
    when = datetime.fromtimestamp(event.time_seconds, tz=UTC).astimezone().strftime(time_format)
    subject = (
        event.name,
        short(event.digest) if event.digest else "",
        f"slot {event.slot}" if event.slot is not None else "",
        f"session {event.session}" if event.session else "",
        event.reason,
    )
    missed = f"({event.missed} events missed) " if event.missed else ""
    return f"{when} {missed}{event.kind:<14} {'  '.join(part for part in subject if part)}".rstrip()


# Parts


def human_bytes(count: int) -> str:
    """1536 → "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """90 → "1 min 30 s"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def short(digest: str) -> str:
    """A digest with as many of its digits as a person compares."""
    kind, _, digits = digest.partition(":")
    return f"{kind}:{digits[:_DIGEST_CHARACTERS]}" if digits else "-"


def short_ref(ref: str) -> str:
    name, _, digest = ref.partition("@")
    return f"{name}@{short(digest)}" if digest else name


def digest_of(ref: str) -> str:
    return ref.partition("@")[2]


def number(value: int | None) -> str:
    return "-" if value is None else str(value)


def refs(mapping: MappingInfo) -> str:
    return ", ".join(map(short_ref, mapping.refs)) or "the base model only"


def adapter_in(slot: Slot, snapshot: Snapshot) -> str:
    """The names of a slot's adapter, or its digest when it has none."""
    names = [a.name for a in snapshot.adapters if slot.digest and a.digest == slot.digest]
    return ", ".join(names) or short(slot.digest)


def pinned_by(slot: int | None, pins: Iterable[Pin]) -> str:
    """The sessions that pin a slot, each with its mappings and holds that do."""
    owners: dict[str, list[str]] = {}
    for pin in pins:
        if pin.slot == slot:
            owners.setdefault(f"{pin.client_name} {pin.session}".strip(), []).append(f"{pin.owner} {pin.owner_id}")
    return "; ".join(f"{session}: {', '.join(what)}" for session, what in owners.items()) or "-"


def life(session: SessionInfo) -> str:
    if session.attached:
        return "attached"
    left = session.grace_left_seconds
    return "detached" if left is None else f"grace, {human_seconds(max(left, 0.0))} left"


def ranks(session: SessionInfo) -> str:
    return f"{len(session.joined)} of {session.ranks} joined" if session.ranks > 1 else "1"


def slot_counts(layout: Layout) -> str:
    """How many slots are in each state, as in "2 occupied, 6 free"."""
    states = [slot.state for slot in layout.slots]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
