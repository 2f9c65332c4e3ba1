"""Whatever the sidecar sends or writes is an error of the call, or the right result: never a crash."""

from __future__ import annotations

import contextlib
import os
import random

import slotcar_client
import torch
from slotcar.shm import region
from slotcar.v1 import plane_pb2
from slotcar_client import Session
from slotcar_client.transports.connection import connect

from tests.unit.client.ring.fake_ring import FakeRing, Offer, Reply, RingEngine

X = torch.arange(12.0).reshape(3, 4)
ROUNDS = 300
HEADER_BYTES = 56
WORDS = (0, 1, 2, 255, (1 << 16) - 1, 1 << 31, (1 << 32) - 1)


def test_welcomes(ring: FakeRing, engine: RingEngine) -> None:
    engine.sessions["s"] = {}
    chance = random.Random(11)

    def offer(offer: Offer) -> Offer:
        data = bytearray(offer.data)
        for _ in range(chance.randrange(3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.2:
            data = bytearray(chance.randbytes(chance.randrange(100)))
        descriptors = offer.descriptors[: chance.choice((0, 1, 2, 3, 3, 3, 3))]
        if chance.random() < 0.7:
            os.pwrite(
                ring.connections[-1].region, chance.randbytes(chance.randint(1, 9)), chance.randrange(HEADER_BYTES)
            )
        return Offer(bytes(data), descriptors)

    ring.offer = offer
    for _ in range(ROUNDS):
        hello = plane_pb2.PlaneHello(session="s", plane=plane_pb2.PLANE_RING, arena_bytes=1 << 16)
        with contextlib.suppress(slotcar_client.SlotcarError):
            connect(ring.path, hello, engine.epoch, 20).close()
        served = ring.connections.pop()
        assert served.over.wait(20), "the client ended the connection"
        served.thread.join()


def test_answers(session: Session, ring: FakeRing) -> None:
    chance = random.Random(13)
    spoilt = False

    def reply(reply: Reply) -> None:
        nonlocal spoilt
        spoilt = chance.random() < 0.8
        if not spoilt:
            return
        reply.status = chance.choice(WORDS)
        reply.payload = chance.randbytes(chance.choice((0, 1, 100, region.PAYLOAD_BYTES)))
        if chance.random() < 0.5:
            reply.payload_bytes = chance.choice(WORDS)
        if chance.random() < 0.5:
            reply.fingerprint = chance.getrandbits(64)

    ring.reply = reply
    for _ in range(ROUNDS):
        try:
            outputs = session.forward({"q": X}) if chance.random() < 0.5 else session.forward_async({"q": X}).result()
        except slotcar_client.SlotcarError:
            assert spoilt
        else:
            assert torch.equal(outputs["q"], X)
        with contextlib.suppress(slotcar_client.SlotcarError):
            session.fence()
    assert len(ring.hellos) == 1
