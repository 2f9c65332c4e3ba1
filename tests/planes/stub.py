"""EngineService's stub whose Forward, SetMapping, ReleaseMapping and Fence travel over a plane.

What cannot be said on the plane, such as a tensor of another shape than its rows, goes over gRPC, which refuses it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, NamedTuple

import grpc
from slotcar.shm import region, slots
from slotcar.v1 import engine_service_pb2 as pb
from slotcar.v1 import layout_pb2, model_pb2, tensor_pb2
from slotcar.v1.engine_service_pb2_grpc import EngineServiceStub

from tests.planes.connection import Connection, Gone, Refused, hello
from tests.planes.errors import PlaneError

PLANES = ("unary", "stream", "ring", "direct")
MOST_ENTRIES = 64  # whose answer, and whose refusal by name, is sure to fit into a cell
DTYPES = {
    tensor_pb2.DTYPE_FLOAT32: "float32",
    tensor_pb2.DTYPE_FLOAT16: "float16",
    tensor_pb2.DTYPE_BFLOAT16: "bfloat16",
}


class Mapped(NamedTuple):
    """What SetMapping answered; a slot is None for the base model."""

    generation: int
    digests: tuple[str, ...]
    slots: tuple[int | None, ...]


def engine_stub(channel: grpc.Channel, target: str, plane: str) -> Any:
    """The stub itself for "unary"."""
    stub = EngineServiceStub(channel)
    return stub if plane == "unary" else PlaneStub(stub, target, plane)


class PlaneStub:
    """`carried` counts the Forwards that went over the plane."""

    # By their fingerprint: the ranks of a session, each with a stub of its own, use one mapping.
    _digests: ClassVar[dict[int, tuple[str, ...]]] = {}

    def __init__(self, stub: EngineServiceStub, target: str, plane: str) -> None:
        self._stub = stub
        self._target = target
        self._plane = plane
        self._models: dict[str, model_pb2.ModelSpec] = {}
        self._mapped: dict[tuple[str, int], Mapped] = {}
        self._connections: dict[tuple[str, int], Connection] = {}
        self._pool = ThreadPoolExecutor(8)
        self._lock = threading.Lock()
        self.carried: Counter[str] = Counter()
        self.Forward = _Method(self._forward, partial(self._pool.submit, self._forward))
        self.SetMapping = _Method(self._set_mapping, self._set_mapping_later)
        self._release = self._over_ring(region.Kind.RELEASE_MAPPING, "ReleaseMapping")
        self.ReleaseMapping = _Method(self._release_mapping, stub.ReleaseMapping.future)
        self.Fence = _Method(self._over_ring(region.Kind.FENCE, "Fence"), stub.Fence.future)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    def OpenSession(self, request: pb.OpenSessionRequest, **options: Any) -> Any:
        return _Opening(self._stub.OpenSession(request, **options), self._learn)

    def JoinSession(self, request: pb.JoinSessionRequest, **options: Any) -> Any:
        return _Opening(self._stub.JoinSession(request, **options), self._learn)

    def _learn(self, opened: pb.SessionOpened) -> None:
        if opened.HasField("model_spec"):
            self._models[opened.session] = opened.model_spec

    def _connection(self, session: str, rank: int) -> Connection:
        """Raises Refused or Gone."""
        with self._lock:
            known = self._connections.get((session, rank))
            if known is None or known.is_over:
                plane = "direct" if self._plane == "direct" else "ring"
                fresh = Connection(self._target, hello(session, plane, rank))
                self._close_those_that_are_over()
                known = self._connections[session, rank] = fresh
            return known

    def _close_those_that_are_over(self) -> None:
        """Or each session that ever was would leave its descriptors in this process."""
        for key, connection in tuple(self._connections.items()):
            if connection.is_over:
                with connection.lock:
                    connection.close()
                del self._connections[key]

    def _over_ring(self, kind: region.Kind, name: str) -> Callable[..., Any]:
        unary = getattr(self._stub, name)

        def call(request: Any, **options: Any) -> Any:
            payload = request.SerializeToString()
            if self._plane == "stream" or request.session not in self._models or len(payload) > region.PAYLOAD_BYTES:
                return unary(request, **options)
            try:
                connection = self._connection(request.session, 0)
                with connection.lock:
                    answer = connection.ask(kind, payload)
            except Gone:
                return unary(request, **options)
            except Refused as refused:
                raise PlaneError(refused.error) from None
            return getattr(pb, f"{name}Response").FromString(answer.payload)

        return call

    def _set_mapping(self, request: pb.SetMappingRequest, **options: Any) -> pb.SetMappingResponse:
        goes_over_ring = not request.HasField("wait") and len(request.entries) <= MOST_ENTRIES
        call = self._over_ring(region.Kind.SET_MAPPING, "SetMapping") if goes_over_ring else self._stub.SetMapping
        response: pb.SetMappingResponse = call(request, **options)
        self._learn_mapping(request, response)
        return response

    def _release_mapping(self, request: pb.ReleaseMappingRequest, **options: Any) -> Any:
        self._mapped.pop((request.session, request.mapping_id), None)
        return self._release(request, **options)

    def _set_mapping_later(self, request: pb.SetMappingRequest, **options: Any) -> Any:
        return _Later(self._stub.SetMapping.future(request, **options), partial(self._learn_mapping, request))

    def _learn_mapping(self, request: pb.SetMappingRequest, response: pb.SetMappingResponse) -> None:
        # A request in short gets an answer for each of its targets.
        entries = [response.entries[i] for i in request.indices] if request.targets else response.entries
        digests = tuple(entry.digest for entry in entries)
        places = tuple(entry.slot if entry.HasField("slot") else None for entry in entries)
        self._mapped[request.session, request.mapping_id] = Mapped(response.generation, digests, places)
        self._digests[region.fingerprint(digests)] = digests

    def _forward(self, request: pb.ForwardRequest, **options: Any) -> pb.ForwardResponse:
        try:
            if self._plane == "stream":
                return self._streamed(request, **options)
            sites = self._items(request)
            if sites is None:
                return self._stub.Forward(request, **options)
            connection = self._connection(request.session, request.rank)
            with connection.lock:
                carry = self._over_direct if self._plane == "direct" else self._over_region
                response = carry(connection, request, sites)
        except Gone:
            response = None
        except Refused as refused:
            raise PlaneError(refused.error) from None
        if response is None:
            return self._stub.Forward(request, **options)
        self.carried[self._plane] += 1
        return response

    def _streamed(self, request: pb.ForwardRequest, **options: Any) -> pb.ForwardResponse:
        (response,) = self._stub.ForwardStream(iter([pb.ForwardStreamRequest(forward=request)]), **options)
        if response.WhichOneof("result") == "error":
            raise PlaneError(response.error)
        self.carried["stream"] += 1
        return response.forward

    def _items(self, request: pb.ForwardRequest) -> list[tuple[int, model_pb2.Site]] | None:
        """The site of each item, if the request can be said on a plane, which knows sites by their numbers."""
        model = self._models.get(request.session)
        if model is None or not request.items or not request.items[0].HasField("x"):
            return None
        index = {site.name: (number, site) for number, site in enumerate(model.sites)}
        rows, dtype = sum(request.row_counts), request.items[0].x.dtype
        found, x = [], request.items[0].x
        for item in request.items:
            x = item.x if item.HasField("x") else x
            if item.site not in index:
                return None
            number, site = index[item.site]
            adds = item.mode == pb.FORWARD_MODE_ADD
            sound = _is_plain(x, rows, site.in_features, dtype) and adds == item.HasField("base")
            if (
                not sound
                or item.mode not in (0, 1, 2)
                or (adds and not _is_plain(item.base, rows, site.out_features, dtype))
            ):
                return None
            found.append((number, site))
        return found if max(request.row_counts, default=0) < 1 << 32 else None

    def _over_region(
        self, connection: Connection, request: pb.ForwardRequest, sites: list[tuple[int, model_pb2.Site]]
    ) -> pb.ForwardResponse | None:
        arena, end, items, x_offset, outs = connection.arena, 0, [], 0, []
        rows, dtype = sum(request.row_counts), request.items[0].x.dtype
        item_bytes = slots.ITEM_BYTES[DTYPES[dtype]]

        def place(size: int, data: bytes = b"") -> int:
            nonlocal end
            offset, end = end, -(-(end + size) // region.ALIGNMENT) * region.ALIGNMENT
            if end > len(arena):
                raise Gone("larger than the arena")
            arena[offset : offset + len(data)] = data
            return offset

        for item, (number, site) in zip(request.items, sites, strict=True):
            if item.HasField("x"):
                x_offset = place(len(item.x.inline), item.x.inline)
            base = place(len(item.base.inline), item.base.inline) if item.HasField("base") else region.ABSENT
            size = rows * site.out_features * item_bytes
            outs.append((place(size), size, site.out_features))
            items.append(region.Item(number, x_offset, base, outs[-1][0]))
        call = region.Forward(
            request.mapping_id,
            request.generation,
            slots.DTYPES.index(DTYPES[dtype]),
            list(request.row_counts),
            items,
        ).pack()
        if len(call) > connection.geometry.payload_bytes:
            return None
        answer = connection.ask(region.Kind.FORWARD, call)
        outputs = [_message(dtype, rows, columns, arena[at : at + size]) for at, size, columns in outs]
        return self._response(connection, answer.generation, self._digests[answer.fingerprint], outputs)

    def _over_direct(
        self, connection: Connection, request: pb.ForwardRequest, sites: list[tuple[int, model_pb2.Site]]
    ) -> pb.ForwardResponse | None:
        """None when the server has to say what is wrong."""
        mapped = self._mapped.get((request.session, request.mapping_id))
        counts = list(request.row_counts)
        if mapped is None or mapped.generation != request.generation or len(counts) != len(mapped.slots):
            return None
        if len({item.site for item in request.items}) != len(request.items):
            return None
        from tests.planes.direct import DirectReader

        reader = DirectReader(connection, self._models[request.session])
        x, dtype, outputs = b"", request.items[0].x.dtype, []
        for item, (number, site) in zip(request.items, sites, strict=True):
            x = item.x.inline if item.HasField("x") else x
            base = item.base.inline if item.HasField("base") else None
            entries = list(zip(mapped.slots, counts, strict=True))
            out = reader.compute(mapped.generation, entries, number, (DTYPES[dtype], x, base))
            if out is None:
                return None
            outputs.append(_message(dtype, sum(counts), site.out_features, out))
        if not reader.is_right(mapped.generation, mapped.slots):
            return None
        return self._response(connection, reader.generation, mapped.digests, outputs)

    def _response(
        self, connection: Connection, generation: int, digests: tuple[str, ...], outputs: list[tensor_pb2.TensorRef]
    ) -> pb.ForwardResponse:
        version = layout_pb2.LayoutVersion(epoch=connection.epoch, generation=generation)
        return pb.ForwardResponse(layout=version, digests=digests, outputs=outputs)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._pool.shutdown()


class _Method:
    """A call and the same as a future."""

    def __init__(self, call: Callable[..., Any], future: Callable[..., Any]) -> None:
        self._call = call
        self.future = future

    def __call__(self, request: Any, **options: Any) -> Any:
        return self._call(request, **options)


class _Later:
    """A future whose result is told of before anybody has it."""

    def __init__(self, future: Any, learn: Callable[[Any], None]) -> None:
        self._future = future
        self._learn = learn

    def result(self, timeout: float | None = None) -> Any:
        response = self._future.result(timeout)
        self._learn(response)
        return response

    def __getattr__(self, name: str) -> Any:
        return getattr(self._future, name)


class _Opening:
    """A session's stream that tells what its first message said."""

    def __init__(self, call: Any, learn: Callable[[pb.SessionOpened], None]) -> None:
        self._call = call
        self._learn = learn

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        message = next(self._call)
        if message.WhichOneof("message") == "opened":
            self._learn(message.opened)
        return message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def _is_plain(tensor: tensor_pb2.TensorRef, rows: int, columns: int, dtype: int) -> bool:
    """Rows without gaps, of the shape and dtype that the plane takes for granted."""
    if tensor.dtype != dtype or dtype not in DTYPES or (tensor.rows, tensor.columns) != (rows, columns):
        return False
    size = rows * columns * slots.ITEM_BYTES[DTYPES[dtype]]
    return tensor.row_stride in (0, columns) and len(tensor.inline) == size


def _message(dtype: int, rows: int, columns: int, data: Any) -> tensor_pb2.TensorRef:
    return tensor_pb2.TensorRef(dtype=dtype, rows=rows, columns=columns, inline=bytes(data))
