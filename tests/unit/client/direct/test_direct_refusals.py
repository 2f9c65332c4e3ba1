"""What the direct plane refuses, each by its name: calls that fit nothing, and files that are not the agreed ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from slotcar.v1 import engine_service_pb2
from slotcar_client import errors
from slotcar_client.effects import Forward, ForwardCall
from slotcar_client.transports.direct import DirectTransport

from tests.tolerances import assert_close
from tests.unit.client.direct.calls import forward, made, rows, truth
from tests.unit.client.direct.slots_writer import SLOTS, A, C, SlotsWriter

WRONG: dict[str, tuple[dict[str, Any], type[errors.SlotcarError], str]] = {
    "no site": ({"inputs": {}}, errors.RequestInvalid, "no site"),
    "site": ({"inputs": {"v": rows(2, "q")}}, errors.SiteUnknown, "'v'"),
    "features": ({"inputs": {"q": rows(2, "o")}}, errors.ShapeMismatch, r"x of q is \[2, 16\], wanted \[2, 24\]"),
    "rows": ({"inputs": {"q": rows(3, "q")}}, errors.ShapeMismatch, r"x of q is \[3, 24\], wanted \[2, 24\]"),
    "dimensions": ({"inputs": {"q": rows(2, "q")[0]}}, errors.ShapeMismatch, r"x of q is \[24\]"),
    "dtype": ({"inputs": {"q": rows(2, "q", torch.float64)}}, errors.ShapeMismatch, "x of q is float64"),
    "base site": (
        {"inputs": {"q": rows(2, "q")}, "base": {"k": torch.zeros(2, 16)}},
        errors.RequestInvalid,
        "other sites",
    ),
    "base features": (
        {"inputs": {"q": rows(2, "q")}, "base": {"q": torch.zeros(2, 16)}},
        errors.ShapeMismatch,
        "base of q",
    ),
    "base dtype": (
        {"inputs": {"q": rows(2, "q")}, "base": {"q": torch.zeros(2, 40).half()}},
        errors.ShapeMismatch,
        "base of q",
    ),
    "counts": ({"inputs": {"q": rows(2, "q")}, "row_counts": (2, 0)}, errors.ShapeMismatch, "2 counts, wanted 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named(writer: SlotsWriter, transport: DirectTransport, name: str) -> None:
    fields, error, message = WRONG[name]
    mapping = writer.map(0)
    good = forward(writer, mapping, (2,), {"q": rows(2, "q")})
    for _ in range(2):
        with pytest.raises(error, match=message):
            transport.forward(Forward(ForwardCall(**{"row_counts": (2,), **fields}), mapping, writer.opened))
        assert_close(transport.forward(good)["q"], truth([A, A], "q", rows(2, "q")))


def test_two_sites_of_different_features_may_not_share_an_input(
    writer: SlotsWriter, transport: DirectTransport
) -> None:
    x = rows(2, "q")
    with pytest.raises(errors.ShapeMismatch, match="x of o"):
        transport.forward(forward(writer, writer.map(0), (2,), {"q": x, "o": x}))


HEADER: dict[str, tuple[str, Any, str]] = {
    "magic": ("header", (0, b"SLOTCARX"), "magic"),
    "version": ("header", (8, b"\x09"), "version 9, wanted 2"),
    "slots": ("header", (12, b"\x04"), "slots 4, wanted 3"),
    "leaves": ("header", (16, b"\x02"), "leaves 2, wanted 3"),
    "rank": ("header", (20, b"\x07"), "max_rank 7, wanted 8"),
    "dtype": ("header", (24, b"\x02"), "dtype 2, wanted 0"),
    "parts": ("header", (28, b"\x04"), "parts 4, wanted 3"),
    "a server with more slots": ("server", {"slots": 4}, "slots 3, wanted 4"),
    "a server with a higher rank": ("server", {"max_rank": 9}, "max_rank 8, wanted 9"),
    "a server with another dtype": ("server", {"slot_dtype": 3}, "dtype"),
}


@pytest.mark.parametrize("name", HEADER)
def test_a_file_that_is_not_the_agreed_one_is_refused_by_field(name: str) -> None:
    where, change, message = HEADER[name]
    writer = SlotsWriter()
    opened = writer.opened
    if where == "header":
        at, data = change
        assert writer.device.file is not None
        writer.device.file.memory[at : at + len(data)] = data
    else:
        opened.server.MergeFrom(engine_service_pb2.ServerInfo(**change))
    transport = made(writer)
    with pytest.raises(errors.AuditFailed, match=message):
        transport.use(opened)
    transport.close()


def test_a_model_of_other_features_gives_another_size(writer: SlotsWriter) -> None:
    opened = writer.opened
    opened.model_spec.sites[0].out_features += 2000
    transport = made(writer)
    with pytest.raises(errors.AuditFailed, match="bytes, wanted"):
        transport.use(opened)
    transport.close()


def test_a_server_without_a_model_is_refused(writer: SlotsWriter) -> None:
    opened = writer.opened
    opened.ClearField("model_spec")
    transport = made(writer)
    with pytest.raises(errors.ModelUnknown):
        transport.use(opened)
    transport.close()


def test_a_rank_that_cannot_be_is_refused(writer: SlotsWriter, transport: DirectTransport) -> None:
    file = writer.device.file
    assert file is not None
    file.write_parts(0, [(1, 1.0, 0), (2, 1.0, 0), (9, 1.0, 0)])
    with pytest.raises(errors.AuditFailed, match="rank 9"):
        transport.forward(forward(writer, writer.map(0), (2,), {"q": rows(2, "q")}))
    # While the slot changes, it may be half of something.
    mapping = writer.map(0)
    writer.begin(0, C)
    with pytest.raises(errors.LayoutStale):
        transport.forward(forward(writer, mapping, (2,), {"q": rows(2, "q")}))


@pytest.mark.parametrize("slot", [SLOTS, 1 << 31])
def test_a_mapping_of_slots_that_are_not_there_is_refused(
    writer: SlotsWriter, transport: DirectTransport, slot: int
) -> None:
    mapping = writer.map(0)
    object.__setattr__(mapping, "slots", (slot,))
    with pytest.raises(errors.AuditFailed, match=str(slot)):
        transport.forward(forward(writer, mapping, (2,), {"q": rows(2, "q")}))
