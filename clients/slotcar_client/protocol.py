"""The session protocol as pure functions: requests from values, and values from answers that were checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType

from google.protobuf import duration_pb2
from slotcar.v1 import engine_service_pb2, model_pb2

from slotcar_client.entries import BASE, Entries, Target, checked_count
from slotcar_client.errors import AuditFailed, CapacityExceeded, RequestInvalid
from slotcar_client.values import LayoutVersion, Mapping

# What a message is larger than its tensors: ids and the framing of the stream, then each item.
_REQUEST_OVERHEAD_BYTES = 256
_ITEM_OVERHEAD_BYTES = 64


def open_request(
    client_name: str, resume_session: str, model_spec: model_pb2.ModelSpec | None, grace_seconds: float
) -> engine_service_pb2.OpenSessionRequest:
    """Opens a session, or resumes `resume_session` unless it is empty."""
    if not 0 <= grace_seconds <= 3600:
        raise RequestInvalid(
            f"grace_seconds is {grace_seconds}, wanted 0 to 3600",
            field="grace_seconds",
            found=grace_seconds,
            wanted="0 to 3600",
        )
    seconds = int(grace_seconds)
    grace = duration_pb2.Duration(seconds=seconds, nanos=int((grace_seconds - seconds) * 1e9))
    return engine_service_pb2.OpenSessionRequest(
        client_name=client_name, resume_session=resume_session, model_spec=model_spec, grace=grace
    )


def mapping_request(session: str, mapping_id: int, targets: Iterable[Target]) -> engine_service_pb2.SetMappingRequest:
    entries = (
        engine_service_pb2.MappingEntry(base=True)
        if target is BASE
        else engine_service_pb2.MappingEntry(ref=str(target))
        for target in targets
    )
    return engine_service_pb2.SetMappingRequest(session=session, mapping_id=mapping_id, entries=entries)


def read_mapping(mapping_id: int, entries: Entries, response: engine_service_pb2.SetMappingResponse) -> Mapping:
    """The mapping that was set. Raises AuditFailed when the answer is not one for `entries`."""
    found = [entry.digest for entry in response.entries]
    if len(found) != len(entries.targets):
        raise AuditFailed(
            f"SetMapping answered {len(found)} entries for {len(entries.targets)}",
            found=len(found),
            wanted=len(entries.targets),
        )
    resolved: list[Target] = []
    digests: dict[str, str] = {}
    for index, (target, digest) in enumerate(zip(entries.targets, found, strict=True)):
        if not isinstance(target, str):
            _audit(f"entries[{index}]", digest, "")
            resolved.append(BASE)
            continue
        name, _, wanted = target.partition("@")
        _audit(f"entries[{index}]", digest, wanted or digest or "a digest")
        resolved.append(f"{name}@{digest}")
        digests[target] = digest
    version = LayoutVersion(response.layout.epoch, response.generation)
    return Mapping(mapping_id, version, tuple(resolved), MappingProxyType(digests), entries.row_counts)


def remapped(old: Mapping, response: engine_service_pb2.SetMappingResponse) -> Mapping:
    """The mapping `old`, set again by its digests. Raises AuditFailed when the answer has any other digest."""
    again = read_mapping(old.mapping_id, Entries(old.entries, old.row_counts), response)
    return replace(old, version=again.version)


def check_forward(
    mapping: Mapping, request: engine_service_pb2.ForwardRequest, response: engine_service_pb2.ForwardResponse
) -> None:
    """Raises AuditFailed unless the answer was computed with the mapping's digests and has an output per item."""
    _audit("digests", list(response.digests), list(mapping.entry_digests))
    _audit("epoch", response.layout.epoch, mapping.version.epoch)
    _audit("outputs", len(response.outputs), len(request.items))
    rows, dtype = request.items[0].x.rows, request.items[0].x.dtype
    for index, output in enumerate(response.outputs):
        _audit(f"outputs[{index}].rows", output.rows, rows)
        _audit(f"outputs[{index}].dtype", output.dtype, dtype)


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
    counts = (
        mapping.row_counts
        if row_counts is None
        else tuple(checked_count(f"row_counts[{index}]", count) for index, count in enumerate(row_counts))
    )
    if counts is None:
        raise RequestInvalid(
            "row_counts is absent, and the mapping was set without counts",
            field="row_counts",
            found="nothing",
            wanted=f"{len(mapping.entries)} counts",
        )
    return counts


def _audit(field: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise AuditFailed(f"the server answered {field} {found!r}, not {wanted!r}", found=found, wanted=wanted)
