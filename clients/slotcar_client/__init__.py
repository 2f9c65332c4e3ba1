"""The Python client of slotcar: load adapters, map them to rows, compute their LoRA.

with connect("unix:///run/slotcar/slotcar.sock") as client:
    client.load("sql", "/adapters/sql")
    with client.session("my engine", model_spec=spec) as session:
        session.set_mapping([("sql", 3), (BASE, 1)])
        delta = session.forward({"model.layers.0.self_attn.q_proj": x})
"""

from slotcar_client.client import Client, connect
from slotcar_client.entries import BASE
from slotcar_client.errors import (
    AdapterConflict,
    AdapterInvalid,
    AdapterNotFound,
    AdapterNotResident,
    AdapterUnsupported,
    AuditFailed,
    CallCancelled,
    CapacityExceeded,
    DeadlineExceeded,
    DigestMismatch,
    InternalError,
    LayoutStale,
    MappingNotFound,
    ModelMismatch,
    ModelUnknown,
    RequestInvalid,
    SessionNotFound,
    ShapeMismatch,
    ShuttingDown,
    SiteUnknown,
    SlotcarError,
    SlotsExhausted,
    SourceDenied,
    SourceUnavailable,
    TransportError,
    Unavailable,
)
from slotcar_client.session import Session
from slotcar_client.values import (
    AdapterInfo,
    Estimate,
    Event,
    Layout,
    LayoutVersion,
    LoadReport,
    Mapping,
    ServerInfo,
    SiteReport,
    Slot,
    Snapshot,
    UnloadReport,
)

__all__ = [
    "BASE",
    "AdapterConflict",
    "AdapterInfo",
    "AdapterInvalid",
    "AdapterNotFound",
    "AdapterNotResident",
    "AdapterUnsupported",
    "AuditFailed",
    "CallCancelled",
    "CapacityExceeded",
    "Client",
    "DeadlineExceeded",
    "DigestMismatch",
    "Estimate",
    "Event",
    "InternalError",
    "Layout",
    "LayoutStale",
    "LayoutVersion",
    "LoadReport",
    "Mapping",
    "MappingNotFound",
    "ModelMismatch",
    "ModelUnknown",
    "RequestInvalid",
    "ServerInfo",
    "Session",
    "SessionNotFound",
    "ShapeMismatch",
    "ShuttingDown",
    "SiteReport",
    "SiteUnknown",
    "Slot",
    "SlotcarError",
    "SlotsExhausted",
    "Snapshot",
    "SourceDenied",
    "SourceUnavailable",
    "TransportError",
    "Unavailable",
    "UnloadReport",
    "connect",
]
