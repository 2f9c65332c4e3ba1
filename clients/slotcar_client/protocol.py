"""The session protocol as pure functions: requests from values, and values from answers that were checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from slotcar.v1 import adapter_pb2, adapter_service_pb2, engine_service_pb2
from slotcar.version import WANTED, compatible

from slotcar_client import convert
from slotcar_client.entries import BASE, Entries, Target, checked_count
from slotcar_client.errors import AuditFailed, CapacityExceeded, RequestInvalid, VersionMismatch
from slotcar_client.options import SessionOptions, within
from slotcar_client.values import LayoutVersion, Mapping

# What a message is larger than its tensors: ids and the framing of the stream, then each item.
_REQUEST_OVERHEAD_BYTES = 256
_ITEM_OVERHEAD_BYTES = 64

MAX_WAIT_SECONDS = 3600.0
MAX_HOLD_SECONDS = 86400.0
SHORTEST_SECONDS = 1e-9


def open_request(
    options: SessionOptions, resume_session: str, version: str
) -> engine_service_pb2.OpenSessionRequest | engine_service_pb2.JoinSessionRequest:
    """Opens a session, or resumes `resume_session` unless it is empty; a rank joins in either case."""
    if not options.owner:
        return engine_service_pb2.JoinSessionRequest(session=options.join, rank=options.rank, client_version=version)
    return engine_service_pb2.OpenSessionRequest(
        client_name=options.name,
        resume_session=resume_session,
        model_spec=options.model_spec,
        grace=convert.duration(options.grace_seconds),
        ranks=options.ranks,
        reserved_slots=options.reserved_slots,
        client_version=version,
    )


def check_version(ours: str, theirs: str) -> None:
    """Raises VersionMismatch unless client and server work together; an older server does not look itself."""
    if not compatible(ours, theirs):
        raise VersionMismatch(
            f"the server is slotcar {theirs}, this client {ours}: they need {WANTED}", found=theirs, wanted=ours
        )


@dataclass(frozen=True, slots=True)
class MappingWish:
    """What a mapping is asked for: `load` as in SetMapping, for as long as it lives; `wait_seconds` once."""

    mapping_id: int
    entries: Entries
    load: bool = False
    wait_seconds: float = 0.0

    def __post_init__(self) -> None:
        within("mapping_id", self.mapping_id, 0, (1 << 64) - 1)
        within("wait_seconds", self.wait_seconds, 0, MAX_WAIT_SECONDS)


def mapping_request(session: str, wish: MappingWish) -> engine_service_pb2.SetMappingRequest:
    places: dict[Target, int] = {}
    indices = [places.setdefault(target, len(places)) for target in wish.entries.targets]
    targets = (
        engine_service_pb2.MappingEntry(base=True)
        if target is BASE
        else engine_service_pb2.MappingEntry(ref=str(target))
        for target in places
    )
    return engine_service_pb2.SetMappingRequest(
        session=session,
        mapping_id=wish.mapping_id,
        targets=targets,
        indices=indices,
        load=wish.load,
        wait=convert.duration(wish.wait_seconds) if wish.wait_seconds else None,
    )


@dataclass(frozen=True, slots=True)
class HoldWish:
    """What a hold is asked for; `seconds` is None until it is released, `slot` asks for the slot too."""

    hold_id: int
    ref: str
    seconds: float | None = None
    slot: bool = False

    def __post_init__(self) -> None:
        within("hold_id", self.hold_id, 0, (1 << 64) - 1)
        if self.seconds is not None:
            within("seconds", self.seconds, SHORTEST_SECONDS, MAX_HOLD_SECONDS)


def hold_request(session: str, wish: HoldWish) -> engine_service_pb2.HoldAdapterRequest:
    return engine_service_pb2.HoldAdapterRequest(
        session=session,
        hold_id=wish.hold_id,
        ref=wish.ref,
        duration=convert.duration(wish.seconds) if wish.seconds is not None else None,
        tier=adapter_pb2.TIER_DEVICE if wish.slot else adapter_pb2.TIER_HOST,
    )


def load_hold(session: str, wish: HoldWish) -> adapter_service_pb2.LoadHold:
    """The same hold as a part of a load."""
    hold = hold_request(session, wish)
    duration = hold.duration if hold.HasField("duration") else None
    return adapter_service_pb2.LoadHold(session=session, hold_id=hold.hold_id, duration=duration, tier=hold.tier)


def read_hold(ref: str, response: engine_service_pb2.HoldAdapterResponse) -> tuple[str, str]:
    """name@digest and the tier that is held. Raises AuditFailed when it is not the digest of `ref`."""
    name, _, wanted = ref.partition("@")
    _audit("digest", response.digest, wanted or response.digest or "a digest")
    return f"{name}@{response.digest}", convert.tier(response.tier)


def read_load_hold(ref: str, response: adapter_service_pb2.LoadAdapterResponse) -> tuple[str, str]:
    """The same of the hold that came with a load."""
    answer = engine_service_pb2.HoldAdapterResponse(digest=response.adapter.digest, tier=response.hold_tier)
    return read_hold(ref, answer)


def read_mapping(mapping_id: int, entries: Entries, response: engine_service_pb2.SetMappingResponse) -> Mapping:
    """The mapping that was set. Raises AuditFailed when the answer is not one for the targets of `entries`."""
    targets = tuple(dict.fromkeys(entries.targets))
    if len(response.entries) != len(targets):
        raise AuditFailed(
            f"SetMapping answered {len(response.entries)} entries for {len(targets)}",
            found=len(response.entries),
            wanted=len(targets),
        )
    resolved: dict[Target, Target] = {BASE: BASE}
    slots: dict[Target, int | None] = {BASE: None}
    digests: dict[str, str] = {}
    for index, (target, entry) in enumerate(zip(targets, response.entries, strict=True)):
        if not isinstance(target, str):
            _audit(f"entries[{index}]", entry.digest, "")
            continue
        name, _, wanted = target.partition("@")
        digest = digests[target] = entry.digest
        _audit(f"entries[{index}]", digest, wanted or digest or "a digest")
        resolved[target] = f"{name}@{digest}"
        slots[target] = entry.slot if entry.HasField("slot") else None
    version = LayoutVersion(response.layout.epoch, response.generation)
    all_resolved = tuple(map(resolved.__getitem__, entries.targets))
    all_slots = tuple(map(slots.__getitem__, entries.targets))
    return Mapping(mapping_id, version, all_resolved, MappingProxyType(digests), entries.row_counts, all_slots)


def remapped(old: Mapping, response: engine_service_pb2.SetMappingResponse) -> Mapping:
    """The mapping `old`, set again by its digests. Raises AuditFailed when the answer has any other digest."""
    again = read_mapping(old.mapping_id, Entries(old.entries, old.row_counts), response)
    return replace(old, version=again.version, slots=again.slots)


def check_forward(
    mapping: Mapping, request: engine_service_pb2.ForwardRequest, response: engine_service_pb2.ForwardResponse
) -> None:
    """Raises AuditFailed unless the answer was computed with the mapping's digests and has an output per item."""
    _audit("digests", list(response.digests), list(mapping.entry_digests))
    _audit("epoch", response.layout.epoch, mapping.version.epoch)
    _audit("outputs", len(response.outputs), len(request.items))
    rows, x = sum(request.row_counts), request.items[0].x
    for index, (item, output) in enumerate(zip(request.items, response.outputs, strict=True)):
        x = item.x if item.HasField("x") else x
        _audit(f"outputs[{index}].rows", output.rows, rows)
        _audit(f"outputs[{index}].dtype", output.dtype, item.out_dtype or x.dtype)


def check_size(request: engine_service_pb2.ForwardRequest, tensor_bytes: int, max_message_bytes: int) -> None:
    """Raises CapacityExceeded when the request is larger than the server takes."""
    names = sum(len(item.site) for item in request.items)
    found = tensor_bytes + names + _ITEM_OVERHEAD_BYTES * len(request.items)
    found += _REQUEST_OVERHEAD_BYTES + 10 * len(request.row_counts)
    if max_message_bytes and found > max_message_bytes:
        raise CapacityExceeded(
            f"a Forward of {found} bytes is larger than the server takes, {max_message_bytes}: send fewer rows",
            found=found,
            wanted=max_message_bytes,
        )


def shared_inputs(inputs: Iterable[tuple[str, object]]) -> list[tuple[str, bool]]:
    """Sites in the order of the wire, each with whether its x travels: those of one x object stand side by side."""
    groups: dict[int, list[str]] = {}
    for site, x in inputs:
        groups.setdefault(id(x), []).append(site)
    return [(site, index == 0) for sites in groups.values() for index, site in enumerate(sites)]


def counts_for(mapping: Mapping, row_counts: Sequence[int] | None) -> tuple[int, ...]:
    """The row counts of a call: its own, else the mapping's. Raises RequestInvalid when there are none."""
    if row_counts is not None:
        # Once in each Forward: a field has its name made only when it is at fault.
        if all(type(count) is int and count >= 0 for count in row_counts):
            return tuple(row_counts)
        return tuple(checked_count(f"row_counts[{index}]", count) for index, count in enumerate(row_counts))
    if mapping.row_counts is None:
        raise RequestInvalid(
            "row_counts is absent, and the mapping was set without counts",
            field="row_counts",
            found="nothing",
            wanted=f"{len(mapping.entries)} counts",
        )
    return mapping.row_counts


def _audit(field: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise AuditFailed(f"the server answered {field} {found!r}, not {wanted!r}", found=found, wanted=wanted)
