"""The sidecar's side of the direct plane, whose every step is taken by the test: a real device, and no server."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from slotcar.shm import region
from slotcar.shm.mapping import map_file
from slotcar.v1 import engine_service_pb2, layout_pb2, model_pb2, plane_pb2, tensor_pb2
from slotcar_client.effects import Call
from slotcar_client.entries import BASE, Target
from slotcar_client.errors import Unavailable
from slotcar_client.transports.connection import Connection
from slotcar_client.values import LayoutVersion, Mapping
from slotcar_sidecar.core.ids import Epoch, SlotId
from slotcar_sidecar.core.layout import Layout
from slotcar_sidecar.core.model import ModelSpec, Site
from slotcar_sidecar.core.sealed_memory import sealed_memory
from slotcar_sidecar.device.cpu import CpuDevice

from tests.fakes.weights import FakeWeights, fake_weights

MODEL = ModelSpec.of([Site("k", 24, 16), Site("o", 16, 24), Site("q", 24, 40)])
SLOTS, MAX_RANK = 3, 8
RANKS = {"k": 3, "o": 1, "q": 8}
A, B, C = (fake_weights(MODEL, RANKS, seed=seed) for seed in (1, 2, 3))
NARROW = fake_weights(MODEL, {"q": 2}, seed=4)
NAMES = {weights.adapter.digest.value: name for name, weights in {"a": A, "b": B, "c": C, "narrow": NARROW}.items()}
DTYPES = {
    "float32": tensor_pb2.DTYPE_FLOAT32,
    "float16": tensor_pb2.DTYPE_FLOAT16,
    "bfloat16": tensor_pb2.DTYPE_BFLOAT16,
}


class SlotsWriter:
    """One life of a sidecar. What it made stays mapped for whoever mapped it."""

    def __init__(self, epoch: str = "0123456789abcdef", slot_dtype: str = "float32", uses: int = 4) -> None:
        self.epoch = epoch
        self.device = CpuDevice(SLOTS, MAX_RANK, slot_dtype, poison=True, epoch=epoch)
        self.device.shape(MODEL)
        self.layout = Layout.empty(Epoch(epoch), SLOTS)
        self.device.publish(self.layout)
        self.links: list[socket.socket] = []
        self.regions: list[mmap.mmap] = []
        self.geometry = region.RegionGeometry(4096, cells=1, payload_bytes=4096, uses=uses)
        self.refusal: Exception | None = None

    # What it says

    @property
    def opened(self) -> engine_service_pb2.SessionOpened:
        server = engine_service_pb2.ServerInfo(
            slots=SLOTS, max_rank=MAX_RANK, slot_dtype=DTYPES[self.device.slot_dtype]
        )
        version = layout_pb2.LayoutVersion(epoch=self.epoch, generation=self.layout.generation)
        sites = [
            model_pb2.Site(name=site.name, in_features=site.in_features, out_features=site.out_features)
            for site in MODEL.sites
        ]
        return engine_service_pb2.SessionOpened(
            session=f"session of {self.epoch}",
            server=server,
            layout=layout_pb2.Layout(version=version),
            model_spec=model_pb2.ModelSpec(sites=sites),
        )

    def connect(self, opened: engine_service_pb2.SessionOpened, plane: plane_pb2.Plane.ValueType) -> Connection:
        """As a Connect of the client."""
        if self.refusal is not None:
            raise self.refusal
        assert plane == plane_pb2.PLANE_DIRECT
        link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptor, memory = sealed_memory("slotcar-region", self.geometry.total_bytes, mmap.mmap, writable=True)
        header = self.geometry.header(self.epoch)
        memory[: len(header)] = header
        self.links.append(link)
        self.regions.append(memory)
        file = self.device.file
        assert file is not None
        slots = map_file(file.descriptor, len(file.memory), writable=False)
        descriptors = [descriptor, os.eventfd(0), os.eventfd(0), os.dup(file.descriptor)]
        return Connection(theirs, descriptors, mmap.mmap(descriptor, len(memory)), slots)

    # Its steps

    def publish(self, layout: Layout) -> None:
        self.layout = layout
        self.device.publish(layout)

    def begin(self, slot: int, weights: FakeWeights) -> None:
        """Publishes the slot as filling; nothing is written yet."""
        self.publish(self.layout.begin_fill(SlotId(slot), weights.adapter.digest))

    def write(self, slot: int, weights: FakeWeights) -> None:
        self.device.fill(SlotId(slot), weights)

    def load(self, slot: int, weights: FakeWeights) -> None:
        """All of an ordinary load into that slot."""
        self.begin(slot, weights)
        self.write(slot, weights)
        self.publish(self.layout.occupy(SlotId(slot)))

    def unload_by_force(self, slot: int) -> None:
        self.publish(self.layout.invalidate(SlotId(slot)))

    def map(self, *slots: int | None, mapping_id: int = 1, counts: Sequence[int] | None = None) -> Mapping:
        """The mapping whose entries are what is in these slots now, None for BASE."""
        self.publish(self.layout.advance())
        entries: list[Target] = []
        for slot in slots:
            digest = None if slot is None else self.layout[SlotId(slot)].digest
            entries.append(BASE if digest is None else f"{NAMES.get(digest.value, 'another')}@{digest.value}")
        version = LayoutVersion(self.epoch, self.layout.generation)
        row_counts = None if counts is None else tuple(counts)
        return Mapping(mapping_id, version, tuple(entries), {}, row_counts, slots)

    def end_connection(self) -> None:
        """In order, as when the session ends."""
        memoryview(self.regions[-1]).cast("Q")[region.CLOSED_OFFSET // 8] = 1
        self.cut()

    def cut(self) -> None:
        """Ends the connection without a word, as a server does that is killed and started again."""
        self.links[-1].close()

    def close(self) -> None:
        """In order: says so, then ends."""
        self.device.close()
        self.kill()

    def kill(self) -> None:
        """Ends without a word; nobody listens any more."""
        for link in self.links:
            link.close()
        self.refusal = Unavailable("nobody listens")

    def uses(self) -> list[tuple[int, ...]]:
        start = self.geometry.uses_offset
        data = self.regions[-1][start : start + region.USE.size * self.geometry.uses]
        return list(region.USE.iter_unpack(data))


class FakeRpc:
    """What a transport needs of gRPC."""

    timeout_seconds = 5.0

    def __init__(self, answer: Callable[[Call], Any] = lambda call: None) -> None:
        self.call = answer
