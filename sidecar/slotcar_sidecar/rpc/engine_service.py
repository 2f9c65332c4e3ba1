"""slotcar.v1.EngineService over the cache."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from grpc import aio
from slotcar.v1 import engine_service_pb2 as pb
from slotcar.v1 import engine_service_pb2_grpc
from slotcar.version import compatible

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.core.caller import CALLER
from slotcar_sidecar.core.calls import Computed, ForwardCall
from slotcar_sidecar.core.errors import RequestInvalid, ShuttingDown, VersionMismatch
from slotcar_sidecar.core.ids import AdapterRef, SessionId
from slotcar_sidecar.core.session import DEFAULT_GRACE_SECONDS, Session, SessionTerms
from slotcar_sidecar.rpc import convert, session_calls, status
from slotcar_sidecar.rpc.convert_forward import from_matrix, to_items
from slotcar_sidecar.rpc.convert_model import from_model, to_model
from slotcar_sidecar.rpc.ending import ended_by
from slotcar_sidecar.rpc.interceptors import ErrorInterceptor, readable

Context = aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a session is told about the server."""

    version: str
    max_message_bytes: int
    heartbeat_seconds: float
    planes: tuple[str, ...]


class EngineService(engine_service_pb2_grpc.EngineServiceServicer):
    """For the engine beside the sidecar."""

    def __init__(self, cache: AdapterCache, facts: ServerFacts, errors: ErrorInterceptor) -> None:
        self._cache = cache
        self._facts = facts
        self._errors = errors

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: Context
    ) -> AsyncIterator[pb.OpenSessionResponse]:
        self._check_version(request.client_version)
        session = self._open(request)
        attachment = session.attachment
        assert attachment is not None
        try:
            opened = self._opened(session, resumed=bool(request.resume_session))
            async for message in self._feed(opened, lambda: session.attachment == attachment, session):
                yield pb.OpenSessionResponse(**message)
        finally:
            self._cache.detach_session(session, attachment)

    def _open(self, request: pb.OpenSessionRequest) -> Session:
        model = to_model(request.model_spec) if request.HasField("model_spec") else None
        grace = convert.to_seconds("grace", request, request.grace)
        terms = SessionTerms(
            request.client_name,
            DEFAULT_GRACE_SECONDS if grace is None else grace,
            request.ranks or 1,
            request.reserved_slots,
            CALLER.get().name,
        )
        if request.resume_session:
            return self._cache.resume_session(SessionId(request.resume_session), model)
        return self._cache.open_session(terms, model)

    async def JoinSession(
        self, request: pb.JoinSessionRequest, context: Context
    ) -> AsyncIterator[pb.JoinSessionResponse]:
        self._check_version(request.client_version)
        session, attachment = self._cache.join_session(SessionId(request.session), request.rank)
        try:
            alive = lambda: session.joined.get(request.rank) == attachment  # noqa: E731
            async for message in self._feed(self._opened(session, resumed=False), alive, session):
                yield pb.JoinSessionResponse(**message)
        finally:
            self._cache.sessions.leave(session, request.rank, attachment)

    def _check_version(self, client_version: str) -> None:
        if not compatible(self._facts.version, client_version):
            raise VersionMismatch(found=client_version, wanted=self._facts.version)

    async def _feed(
        self, opened: pb.SessionOpened, is_alive: Callable[[], bool], session: Session
    ) -> AsyncIterator[dict[str, Any]]:
        """The fields of each message of a session's stream: `opened`, then layouts and heartbeats."""
        cache, clock = self._cache, self._cache.environment.clock
        layout = cache.layout
        yield {"version": convert.from_version(layout), "opened": opened}
        due = clock() + self._facts.heartbeat_seconds
        while is_alive() and session in cache.sessions:
            if cache.closed:
                raise ShuttingDown
            if cache.layout.slots != layout.slots:
                layout = cache.layout
                yield {"version": convert.from_version(layout), "layout": convert.from_layout(layout)}
            elif clock() >= due:
                yield {"version": convert.from_version(cache.layout), "heartbeat": pb.Heartbeat()}
            else:
                await cache.wait_for_change(due - clock())
                continue
            due = clock() + self._facts.heartbeat_seconds

    def _opened(self, session: Session, *, resumed: bool) -> pb.SessionOpened:
        cache, facts = self._cache, self._facts
        return pb.SessionOpened(
            session=str(session.session_id),
            resumed=resumed,
            server=pb.ServerInfo(
                version=facts.version,
                slots=cache.device.slots,
                max_rank=cache.device.max_rank,
                slot_dtype=convert.DTYPES[cache.device.slot_dtype],
                max_message_bytes=facts.max_message_bytes,
                max_response_bytes=cache.limits.max_response_bytes,
                planes=[convert.PLANES[plane] for plane in facts.planes if CALLER.get().may_use(plane)],
            ),
            model_spec=from_model(cache.model) if cache.model else None,
            layout=convert.from_layout(cache.layout),
            ranks=session.terms.ranks,
            reserved_slots=session.terms.reserved_slots,
        )

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Context) -> pb.CloseSessionResponse:
        self._cache.close_session(SessionId(request.session))
        return pb.CloseSessionResponse(layout=convert.from_version(self._cache.layout))

    async def HoldAdapter(self, request: pb.HoldAdapterRequest, context: Context) -> pb.HoldAdapterResponse:
        terms = convert.to_hold(request)
        hold = await self._cache.hold(terms, AdapterRef.parse(request.ref))
        tier = convert.from_hold_tier(hold)
        return pb.HoldAdapterResponse(
            digest=str(hold.digest), tier=tier, layout=convert.from_version(self._cache.layout)
        )

    async def ReleaseHold(self, request: pb.ReleaseHoldRequest, context: Context) -> pb.ReleaseHoldResponse:
        self._cache.release_hold(SessionId(request.session), request.hold_id)
        return pb.ReleaseHoldResponse(layout=convert.from_version(self._cache.layout))

    async def SetMapping(self, request: pb.SetMappingRequest, context: Context) -> pb.SetMappingResponse:
        return await session_calls.set_mapping(self._cache, request)

    async def ReleaseMapping(self, request: pb.ReleaseMappingRequest, context: Context) -> pb.ReleaseMappingResponse:
        return await session_calls.release_mapping(self._cache, request)

    async def Fence(self, request: pb.FenceRequest, context: Context) -> pb.FenceResponse:
        return await session_calls.fence(self._cache, request)

    async def Forward(self, request: pb.ForwardRequest, context: Context) -> pb.ForwardResponse:
        return await self._forward(request, "unary")

    async def ForwardStream(
        self, request_iterator: AsyncIterator[pb.ForwardStreamRequest], context: Context
    ) -> AsyncIterator[pb.ForwardStreamResponse]:
        async with ended_by(self._cache.closing):
            async for request in request_iterator:
                if self._cache.closed:
                    raise ShuttingDown
                try:
                    if not readable(request).HasField("forward"):
                        raise RequestInvalid("forward", found="nothing", wanted="a request")
                    yield pb.ForwardStreamResponse(forward=await self._forward(request.forward, "stream"))
                except Exception as error:  # the stream goes on after a refusal
                    yield pb.ForwardStreamResponse(
                        error=status.to_message(self._errors.counted("ForwardStream", error))
                    )

    async def _forward(self, request: pb.ForwardRequest, plane: str) -> pb.ForwardResponse:
        # Counted first: tens of millions of empty parts fit into one message, and each becomes an object.
        self._cache.limits.check_entries("row_counts", len(request.row_counts))
        model, limits = self._cache.model, self._cache.limits
        sites = len(model.sites) if model else limits.max_entries  # without a model, the session is found missing
        if len(request.items) > sites:
            raise RequestInvalid("items", found=f"{len(request.items)} of them", wanted=f"at most {sites}")
        call = ForwardCall(
            SessionId(request.session),
            request.mapping_id,
            request.generation,
            tuple(request.row_counts),
            to_items(request.items, model),
            plane,
            request.rank,
        )
        return _computed(await self._cache.forward(call))


def _computed(computed: Computed) -> pb.ForwardResponse:
    timing = pb.ForwardTiming(
        queue_nanos=int(computed.queue_seconds * 1e9), compute_nanos=int(computed.compute_seconds * 1e9)
    )
    return pb.ForwardResponse(
        layout=convert.from_version(computed.layout),
        digests=computed.digests,
        outputs=[from_matrix(matrix) for matrix in computed.outputs],
        timing=timing,
    )
