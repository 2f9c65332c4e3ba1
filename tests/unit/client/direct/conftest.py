"""A writer of slots with two adapters, and the transport of a client that mapped them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from slotcar_client.transports.direct import DirectTransport

from tests.unit.client.direct.calls import connected
from tests.unit.client.direct.slots_writer import A, B, SlotsWriter


@pytest.fixture
def writer() -> SlotsWriter:
    """A is in slot 0, B in slot 1, nothing in slot 2."""
    writer = SlotsWriter()
    writer.load(0, A)
    writer.load(1, B)
    return writer


@pytest.fixture
def transport(writer: SlotsWriter) -> Iterator[DirectTransport]:
    transport = connected(writer)
    yield transport
    transport.close()
