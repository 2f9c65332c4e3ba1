"""The protocol's pure half: what goes out, and that no answer is believed that is not one to the question."""

from __future__ import annotations

from typing import Any

import pytest
from slotcar.v1 import adapter_pb2, engine_service_pb2, layout_pb2, tensor_pb2
from slotcar_client import BASE, AuditFailed, CapacityExceeded, LayoutVersion, Mapping, RequestInvalid, protocol
from slotcar_client.entries import Entries, parse_entries
from slotcar_client.options import SessionOptions
from slotcar_client.protocol import HoldWish, MappingWish

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64
VERSION = layout_pb2.LayoutVersion(epoch="e1", generation=9)


def set_answer(*digests: str, generation: int = 7) -> engine_service_pb2.SetMappingResponse:
    entries = [engine_service_pb2.ResolvedEntry(digest=digest) for digest in digests]
    return engine_service_pb2.SetMappingResponse(generation=generation, entries=entries, layout=VERSION)


def mapping(*entries: Any, digests: tuple[str, ...]) -> Mapping:
    return protocol.read_mapping(1, parse_entries(entries), set_answer(*digests))


def test_open_request_carries_the_options() -> None:
    options = SessionOptions("engine", grace_seconds=1.5, ranks=4, reserved_slots=2)
    request = protocol.open_request(options, "s1", "0.1.0")
    assert isinstance(request, engine_service_pb2.OpenSessionRequest)
    assert (request.client_name, request.resume_session, request.client_version) == ("engine", "s1", "0.1.0")
    assert (request.ranks, request.reserved_slots, request.grace.ToMilliseconds()) == (4, 2, 1500)
    assert not request.HasField("model_spec")


def test_a_rank_joins_whether_it_is_new_or_back() -> None:
    for resume in ("", "s1"):
        request = protocol.open_request(SessionOptions(join="s1", rank=3), resume, "0.1.0")
        assert isinstance(request, engine_service_pb2.JoinSessionRequest)
        assert (request.session, request.rank, request.client_version) == ("s1", 3, "0.1.0")


@pytest.mark.parametrize(
    ("field", "found"),
    [
        ("grace_seconds", -1),
        ("grace_seconds", 3601),
        ("grace_seconds", float("nan")),
        ("ranks", 0),
        ("ranks", 1025),
        ("rank", -1),
        ("reserved_slots", -1),
        ("away", "base"),
        ("away_seconds", -0.1),
        ("away_seconds", float("nan")),
    ],
)
def test_options_are_checked_at_once(field: str, found: Any) -> None:
    with pytest.raises(RequestInvalid) as caught:
        SessionOptions(**{field: found})
    assert caught.value.metadata["field"] == field


def test_mapping_request_has_a_target_per_entry() -> None:
    wish = MappingWish(3, Entries(("sql", BASE), None))
    request = protocol.mapping_request("s1", wish)
    assert [entry.WhichOneof("target") for entry in request.targets] == ["ref", "base"]
    assert request.targets[1].base
    assert (request.session, request.mapping_id, request.targets[0].ref) == ("s1", 3, "sql")
    assert (request.load, request.HasField("wait")) == (False, False)


def test_a_request_names_each_target_once() -> None:
    wish = MappingWish(3, Entries(("sql", BASE, "sql", f"sql@{A}", BASE), None))
    request = protocol.mapping_request("s1", wish)
    assert [entry.ref for entry in request.targets] == ["sql", "", f"sql@{A}"]
    assert list(request.indices) == [0, 1, 0, 2, 1]
    found = protocol.read_mapping(3, wish.entries, set_answer(A, "", A))
    assert found.entries == (f"sql@{A}", BASE, f"sql@{A}", f"sql@{A}", BASE)


def test_mapping_request_may_load_and_wait() -> None:
    request = protocol.mapping_request("s1", MappingWish(3, Entries(("sql",), None), True, 2.5))
    assert (request.load, request.wait.ToMilliseconds()) == (True, 2500)
    for seconds in (-1, 3601, float("nan")):
        with pytest.raises(RequestInvalid):
            MappingWish(3, Entries((), None), False, seconds)


def test_hold_request_says_how_long_and_where() -> None:
    request = protocol.hold_request("s1", HoldWish(7, "sql", 1.5, True))
    assert (request.session, request.hold_id, request.ref) == ("s1", 7, "sql")
    assert (request.duration.ToMilliseconds(), request.tier) == (1500, adapter_pb2.TIER_DEVICE)
    forever = protocol.hold_request("s1", HoldWish(7, "sql"))
    assert (forever.HasField("duration"), forever.tier) == (False, adapter_pb2.TIER_HOST)
    load = protocol.load_hold("s1", HoldWish(7, "sql", 1.5, True))
    assert (load.session, load.hold_id, load.duration, load.tier) == ("s1", 7, request.duration, request.tier)
    assert not protocol.load_hold("s1", HoldWish(7, "sql")).HasField("duration")


@pytest.mark.parametrize(("hold_id", "seconds"), [(-1, None), (1 << 64, None), (1, 0.0), (1, 86401.0)])
def test_a_hold_that_cannot_be_is_refused(hold_id: int, seconds: float | None) -> None:
    with pytest.raises(RequestInvalid):
        HoldWish(hold_id, "sql", seconds)


def test_a_hold_of_another_digest_is_not_believed() -> None:
    response = engine_service_pb2.HoldAdapterResponse(digest=A, tier=adapter_pb2.TIER_DEVICE)
    assert protocol.read_hold("sql", response) == (f"sql@{A}", "device")
    assert protocol.read_hold(f"sql@{A}", response) == (f"sql@{A}", "device")
    for ref, found in ((f"sql@{B}", response), ("sql", engine_service_pb2.HoldAdapterResponse())):
        with pytest.raises(AuditFailed):
            protocol.read_hold(ref, found)


def test_a_mapping_has_digests_by_what_the_caller_wrote() -> None:
    found = mapping(("sql", 2), (BASE, 1), (f"chat@{B}", 4), digests=(A, "", B))
    assert found.entries == (f"sql@{A}", BASE, f"chat@{B}")
    assert found.digests == {"sql": A, f"chat@{B}": B}
    assert found.entry_digests == (A, "", B)
    assert found.row_counts == (2, 1, 4)
    assert found.version == LayoutVersion("e1", 7)
    assert hash(found) == hash(mapping(("sql", 2), (BASE, 1), (f"chat@{B}", 4), digests=(A, "", B)))


@pytest.mark.parametrize(
    ("entries", "digests"),
    [
        (("sql", "chat"), (A,)),
        (("sql",), (A, A)),
        (("sql",), ("",)),
        ((BASE,), (A,)),
        ((f"sql@{B}",), (A,)),
    ],
)
def test_an_answer_for_other_entries_is_not_a_mapping(entries: Any, digests: tuple[str, ...]) -> None:
    with pytest.raises(AuditFailed):
        mapping(*entries, digests=digests)


def test_a_remap_has_the_same_digests_at_a_new_generation() -> None:
    old = mapping(("sql", 2), (BASE, 1), digests=(A, ""))
    again = protocol.remapped(old, set_answer(A, "", generation=12))
    assert (again.entries, again.digests, again.row_counts) == (old.entries, old.digests, old.row_counts)
    assert again.generation == 12
    with pytest.raises(AuditFailed):
        protocol.remapped(old, set_answer(B, "", generation=12))


def forward_pair() -> tuple[engine_service_pb2.ForwardRequest, engine_service_pb2.ForwardResponse]:
    ref = tensor_pb2.TensorRef(dtype=tensor_pb2.DTYPE_FLOAT32, rows=3, columns=4)
    item = engine_service_pb2.ForwardItem(site="q", x=ref)
    return (
        engine_service_pb2.ForwardRequest(items=[item], row_counts=[2, 1]),
        engine_service_pb2.ForwardResponse(layout=VERSION, digests=[A, ""], outputs=[ref]),
    )


def test_an_answer_with_the_mappings_digests_passes() -> None:
    request, response = forward_pair()
    protocol.check_forward(mapping(("sql", 2), (BASE, 1), digests=(A, "")), request, response)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: r.digests.__setitem__(0, B),
        lambda r: r.digests.__setitem__(1, A),
        lambda r: r.digests.pop(),
        lambda r: r.digests.append(""),
        lambda r: setattr(r.layout, "epoch", "e2"),
        lambda r: r.ClearField("outputs"),
        lambda r: setattr(r.outputs[0], "rows", 2),
        lambda r: setattr(r.outputs[0], "dtype", tensor_pb2.DTYPE_BFLOAT16),
    ],
)
def test_an_answer_that_was_computed_with_anything_else_is_thrown_away(spoil: Any) -> None:
    request, response = forward_pair()
    spoil(response)
    with pytest.raises(AuditFailed):
        protocol.check_forward(mapping(("sql", 2), (BASE, 1), digests=(A, "")), request, response)


def test_sites_of_one_tensor_stand_side_by_side() -> None:
    x, y = object(), object()
    assert protocol.shared_inputs([("q", x), ("o", y), ("k", x), ("v", x)]) == [
        ("q", True),
        ("k", False),
        ("v", False),
        ("o", True),
    ]


def test_equal_tensors_are_not_one_tensor() -> None:
    assert protocol.shared_inputs([("q", [1]), ("k", [1])]) == [("q", True), ("k", True)]


def test_row_counts_are_never_inferred() -> None:
    with_counts, without = mapping(("sql", 2), digests=(A,)), mapping("sql", digests=(A,))
    assert protocol.counts_for(with_counts, None) == (2,)
    assert protocol.counts_for(with_counts, [5]) == (5,)
    with pytest.raises(RequestInvalid):
        protocol.counts_for(without, None)


def test_a_request_that_the_server_would_refuse_is_not_sent() -> None:
    request, _ = forward_pair()
    protocol.check_size(request, 10_000, 0)
    protocol.check_size(request, 10_000, 20_000)
    with pytest.raises(CapacityExceeded) as caught:
        protocol.check_size(request, 10_000, 10_000)
    assert caught.value.metadata["wanted"] == "10000"
    assert int(caught.value.metadata["found"]) >= request.ByteSize() + 10_000
