"""No request can name an adapter or a session where the policy does not look."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from slotcar.v1 import adapter_service_pb2 as adapters
from slotcar.v1 import engine_service_pb2 as engines
from slotcar.v1 import operator_service_pb2
from slotcar_sidecar.core.errors import RequestInvalid
from slotcar_sidecar.core.ports import Limits
from slotcar_sidecar.rpc.named import ADAPTER_FIELDS, OTHER_FIELDS, SESSION_FIELDS, adapters_of, sessions_of

LIMITS = Limits(1, 3, 1, 1, 1, 1.0)


def texts(message: Descriptor) -> Iterator[str]:
    for field in message.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            yield from texts(field.message_type)
        elif field.type == FieldDescriptor.TYPE_STRING:
            yield field.name


def test_every_text_of_a_request_is_known() -> None:
    """A new field that names an adapter or a session is called as the others, or this fails."""
    files = (adapters, engines, operator_service_pb2)
    methods = [m for file in files for s in file.DESCRIPTOR.services_by_name.values() for m in s.methods]
    found = {name for method in methods for name in texts(method.input_type)}
    assert found == ADAPTER_FIELDS | SESSION_FIELDS | OTHER_FIELDS


def test_adapters_and_sessions_are_found_wherever_they_are() -> None:
    entries = [engines.MappingEntry(ref="a"), engines.MappingEntry(base=True)]
    mapping = engines.SetMappingRequest(session="s", entries=entries, targets=[engines.MappingEntry(ref="b@x")])
    load = adapters.LoadAdapterRequest(ref="c", hold=adapters.LoadHold(session="t"))
    upload = adapters.LoadAdapterStreamRequest(header=adapters.UploadHeader(ref="d"))
    forward = engines.ForwardStreamRequest(forward=engines.ForwardRequest(session="u"))
    assert list(adapters_of(mapping, LIMITS)) == ["a", "b@x"]
    assert list(adapters_of(load, LIMITS)) == ["c"]
    assert list(adapters_of(upload, LIMITS)) == ["d"]
    assert list(adapters_of(adapters.PrefetchAdaptersRequest(refs=["e", "f"]), LIMITS)) == ["e", "f"]
    assert [list(sessions_of(each)) for each in (mapping, load, forward)] == [["s"], ["t"], ["u"]]
    assert list(sessions_of(adapters.EndSessionRequest(session="short"))) == []


def test_more_entries_than_may_be_are_not_looked_at() -> None:
    request = engines.SetMappingRequest(entries=[engines.MappingEntry(ref="a")] * 4)
    with pytest.raises(RequestInvalid, match="at most 3"):
        list(adapters_of(request, LIMITS))
