"""A server with a policy, over real sockets, in the process of the test; its clients are known by their tokens."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from slotcar.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    engine_service_pb2,
    engine_service_pb2_grpc,
    operator_service_pb2,
    operator_service_pb2_grpc,
)
from slotcar_sidecar.core.access import Policy
from slotcar_sidecar.core.denials import Denials
from slotcar_sidecar.process.policy import parse_policy
from slotcar_sidecar.rpc.access import Access
from slotcar_sidecar.rpc.operator_service import Operations, ProcessFacts
from slotcar_sidecar.rpc.server import Serving, make_server

from tests.unit.ring.world import MODEL, World

SECONDS = 20.0
FILES = (adapter_service_pb2, engine_service_pb2, operator_service_pb2)
RPCS = {m.name: m for file in FILES for s in file.DESCRIPTOR.services_by_name.values() for m in s.methods}


def token_of(client: str) -> str:
    return f"the-token-of-{client}"


def entry(name: str, **fields: str) -> str:
    """One client in a policy: by its token it may do everything, unless `fields` say something else."""
    known = hashlib.sha256(token_of(name).encode()).hexdigest()
    sound = {"token_sha256": known, "verbs": "[read, load, engine, operate]", "adapters": '["*"]'}
    return f"  - {{name: {name}, " + ", ".join(f"{key}: {text}" for key, text in (sound | fields).items()) + "}\n"


def policy(*entries: str) -> Policy:
    text = "apiVersion: slotcar.dev/v1\nclients:\n" + "".join(entries) if entries else NOBODY
    return parse_policy(text, "policy.yaml", lambda file: file)


NOBODY = "apiVersion: slotcar.dev/v1\nclients: []\n"


def refusal(error: aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    """The ErrorInfo of a refused call."""
    info = error_details_pb2.ErrorInfo()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            assert status_pb2.Status.FromString(value).details[0].Unpack(info)
    return info


@dataclass
class Guarded:
    """`told` has the denials that were to be audited, `tcp` is the same server at a port of this machine."""

    world: World
    channel: aio.Channel
    tcp: aio.Channel
    tls_port: int
    told: list[Mapping[str, object]] = field(default_factory=list)

    @property
    def access(self) -> Access:
        assert self.world.access is not None
        return self.world.access

    def method(self, name: str, channel: aio.Channel | None = None) -> Any:
        channel = channel or self.channel
        stubs = (
            adapter_service_pb2_grpc.AdapterServiceStub(channel),
            engine_service_pb2_grpc.EngineServiceStub(channel),
            operator_service_pb2_grpc.OperatorServiceStub(channel),
        )
        return next(getattr(stub, name) for stub in stubs if hasattr(stub, name))

    def begin(self, name: str, request: Message, client: str | None, channel: aio.Channel | None = None) -> Any:
        """The call of a client, of nobody for None."""
        metadata = (("authorization", f"Bearer {token_of(client)}"),) if client is not None else None
        streams = RPCS[name].client_streaming
        return self.method(name, channel)(_one(request) if streams else request, timeout=SECONDS, metadata=metadata)

    async def call(self, name: str, request: Message, client: str | None) -> Any:
        """The answer, or the first of them. Raises AioRpcError."""
        call = self.begin(name, request, client)
        if not RPCS[name].server_streaming:
            return await call
        answer = await call.read()
        if answer is aio.EOF:
            code = await call.code()
            raise aio.AioRpcError(code, await call.initial_metadata(), await call.trailing_metadata())
        call.cancel()
        return answer

    async def refused(self, name: str, request: Message, client: str | None) -> error_details_pb2.ErrorInfo | None:
        """How the policy refuses the call; None when it ends in any other way, or goes on."""
        try:
            await self.call(name, request, client)
        except aio.AioRpcError as error:
            denied = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
            return refusal(error) if error.code() in denied else None
        return None


async def _one(request: Message) -> AsyncIterator[Message]:
    yield request


def empty(name: str) -> Message:
    """The request of an RPC, without anything in it."""
    kind = RPCS[name].input_type
    return getattr(next(file for file in FILES if file.DESCRIPTOR is kind.file), kind.name)()


@asynccontextmanager
async def guarded(
    folder: Path, *entries: str, credentials: grpc.ServerCredentials | None = None, **serving: Any
) -> AsyncIterator[Guarded]:
    """The server, while the context is open; `serving` takes the place of what Serving has. With `credentials` it has a
    third address, over TLS."""
    told: list[Mapping[str, object]] = []
    path = folder / "s.sock"
    world = World(
        Path(f"{path}.shm"),
        guard=lambda cache: Access(policy(*entries), cache, Denials(lambda: 0.0, told.append)),
    )
    facts = ProcessFacts({}, 1, 0.0, "/", (), "")
    operations = Operations(lambda seconds: 0.0, lambda level: level, lambda: "info", lambda: facts)
    count = lambda method, reason: None  # noqa: E731
    sound = {"planes": ("stream", "ring", "direct"), "access": world.access, "operations": operations}
    server = make_server(world.cache, Serving(1 << 20, 0.05, count, **sound | serving))
    server.add_insecure_port(f"unix:{path}")
    port = server.add_insecure_port("127.0.0.1:0")
    tls_port = server.add_secure_port("localhost:0", credentials) if credentials is not None else 0
    await server.start()
    world.cache.adopt_model(MODEL)
    try:
        async with aio.insecure_channel(f"unix:{path}") as channel, aio.insecure_channel(f"127.0.0.1:{port}") as tcp:
            yield Guarded(world, channel, tcp, tls_port, told)
    finally:
        world.handshakes.close()
        world.cache.close()
        await server.stop(0.5)
        world.rings.close()
        await world.settle()
        world.rings.finish()
