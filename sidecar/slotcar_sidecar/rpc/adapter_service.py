"""slotcar.v1.AdapterService over the cache."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

from grpc import aio
from slotcar.v1 import adapter_pb2, adapter_service_pb2_grpc
from slotcar.v1 import adapter_service_pb2 as pb

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.core.bindings import Resident
from slotcar_sidecar.core.caller import CALLER
from slotcar_sidecar.core.calls import LoadCall, Loaded, PrefetchCall
from slotcar_sidecar.core.errors import (
    AdapterNotFound,
    CapacityExceeded,
    RequestInvalid,
    ShuttingDown,
    SourceDenied,
    SourceUnavailable,
)
from slotcar_sidecar.core.events import MAX_REPLAY
from slotcar_sidecar.core.ids import AdapterRef
from slotcar_sidecar.core.layout import Layout
from slotcar_sidecar.core.ports import Upload
from slotcar_sidecar.core.reconcile import DesiredStatus, EntryStatus, FileStatus
from slotcar_sidecar.rpc import convert, convert_desired, convert_state, visible
from slotcar_sidecar.rpc.ending import ended_by
from slotcar_sidecar.rpc.interceptors import readable
from slotcar_sidecar.rpc.paging import Pager

Context = aio.ServicerContext[Any, Any]

_MAX_SILENCE_SECONDS = 30.0
_LEAST_BYTES_PER_SECOND = 64 << 10


class AdapterService(adapter_service_pb2_grpc.AdapterServiceServicer):
    """For operators, routers and engines."""

    def __init__(
        self,
        cache: AdapterCache,
        heartbeat_seconds: float,
        desired: Callable[[], DesiredStatus],
        max_watchers: int = 256,
    ) -> None:
        self._cache = cache
        self._desired = desired
        clock, new_id = cache.environment.clock, cache.environment.new_id
        self._pager: Pager[tuple[Resident, adapter_pb2.Tier.ValueType]] = Pager(clock, new_id)
        self._session_pager: Pager[pb.SessionStatus] = Pager(clock, new_id)
        self._desired_pager: Pager[EntryStatus] = Pager(clock, new_id)
        self._heartbeat_seconds = heartbeat_seconds
        self._max_watchers = max_watchers
        self._watchers = 0

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        call = LoadCall(
            AdapterRef.parse(request.ref),
            request.source or None,
            convert.to_on_conflict(request.on_conflict),
            request.keep,
            hold=convert.to_hold(request.hold, "hold.") if request.HasField("hold") else None,
            **convert.to_target("target_tier", request.target_tier),
        )
        with _naming_source(request.source):
            loaded = await self._cache.load(self._of_known(call))
        hold_tier = convert.from_hold_tier(loaded.hold) if loaded.hold else adapter_pb2.TIER_UNSPECIFIED
        return pb.LoadAdapterResponse(**self._loaded(loaded), hold_tier=hold_tier)

    def _of_known(self, call: LoadCall) -> LoadCall:
        """Layouts show every digest: one that the caller knows no name of is not to be had by it, but from its source.

        Raises AdapterNotFound.
        """
        caller, digest = CALLER.get(), call.ref.digest
        if digest is None or not caller.is_limited:
            return call
        if any(map(caller.sees, self._cache.residency.names.known_as(digest))):
            return call
        if call.source is None:
            raise AdapterNotFound(call.ref)
        return dataclasses.replace(call, must_read=True)

    async def LoadAdapterStream(
        self, request_iterator: AsyncIterator[pb.LoadAdapterStreamRequest], context: Context
    ) -> pb.LoadAdapterStreamResponse:
        parts = aiter(request_iterator)
        async with ended_by(self._cache.closing):
            header = await self._next_part(parts)
            if header is None or not header.HasField("header"):
                raise RequestInvalid("part", found=_part(header), wanted="the header first")
            call = convert.to_upload_call(header.header)
            sizes = header.header.config_bytes, header.header.weights_bytes
            with self._cache.upload(*sizes) as upload:
                await self._receive(parts, upload, sum(sizes))
                loaded = await self._load_upload(dataclasses.replace(call, upload=upload))
        return pb.LoadAdapterStreamResponse(**self._loaded(loaded))

    async def _receive(
        self, parts: AsyncIterator[pb.LoadAdapterStreamRequest], upload: Upload, size_bytes: int
    ) -> None:
        """Takes all parts; few uploads may be under way, so none may take for ever."""
        longest = _MAX_SILENCE_SECONDS + size_bytes / _LEAST_BYTES_PER_SECOND
        try:
            async with asyncio.timeout(longest):
                while (request := await self._next_part(parts)) is not None:
                    if request.HasField("config"):
                        upload.add_config(request.config)
                    elif request.HasField("weights"):
                        upload.add_weights(request.weights)
                    else:
                        raise RequestInvalid("part", found=_part(request), wanted="config or weights")
        except TimeoutError:
            wanted = f"{_LEAST_BYTES_PER_SECOND} bytes per second or more"
            raise RequestInvalid("part", found=f"too little within {longest:.0f} s", wanted=wanted) from None

    async def _next_part(self, parts: AsyncIterator[pb.LoadAdapterStreamRequest]) -> pb.LoadAdapterStreamRequest | None:
        """The next message, None at the end; a sender that falls silent is given up."""
        try:
            async with asyncio.timeout(_MAX_SILENCE_SECONDS):
                return cast(pb.LoadAdapterStreamRequest, readable(await anext(parts)))
        except StopAsyncIteration:
            return None
        except TimeoutError:
            found = f"nothing for {_MAX_SILENCE_SECONDS:g} s"
            raise RequestInvalid("part", found=found, wanted="the next chunk") from None

    async def _load_upload(self, call: LoadCall) -> Loaded:
        """Loads what came whole; a refusal of what the header says names the field in the header."""
        try:
            return await self._cache.load(call)
        except RequestInvalid as error:
            if error.field not in pb.UploadHeader.DESCRIPTOR.fields_by_name:
                raise
            raise error.at(f"header.{error.field}") from None

    def _loaded(self, loaded: Loaded) -> dict[str, Any]:
        """The fields of the answer to either kind of load."""
        return {
            "adapter": self._adapter(loaded.resident),
            "report": convert.from_report(
                loaded.resident.adapter, loaded.model, self._cache.device.slot_dtype, loaded.warnings
            ),
            "layout": convert.from_version(loaded.layout),
            "already_resident": loaded.already_resident,
        }

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        unloaded = self._cache.unload(AdapterRef.parse(request.ref), force=request.force)
        return pb.UnloadAdapterResponse(
            digest=str(unloaded.digest),
            slot_state=convert.from_slot_state(unloaded.slot_state),
            pins_ended=unloaded.pins_ended,
            layout=convert.from_version(self._cache.layout),
        )

    async def KeepAdapter(self, request: pb.KeepAdapterRequest, context: Context) -> pb.KeepAdapterResponse:
        ref = AdapterRef.parse(request.ref)
        self._cache.keep(ref)
        return pb.KeepAdapterResponse(adapter=self._described(ref), layout=convert.from_version(self._cache.layout))

    async def ReleaseKeep(self, request: pb.ReleaseKeepRequest, context: Context) -> pb.ReleaseKeepResponse:
        ref = AdapterRef.parse(request.ref)
        self._cache.release_keep(ref)
        return pb.ReleaseKeepResponse(adapter=self._described(ref), layout=convert.from_version(self._cache.layout))

    async def GetAdapter(self, request: pb.GetAdapterRequest, context: Context) -> pb.GetAdapterResponse:
        ref = AdapterRef.parse(request.ref)
        return pb.GetAdapterResponse(adapter=self._described(ref), layout=convert.from_version(self._cache.layout))

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        if request.page_token:
            page = self._pager.next(request.page_token, request.page_size)
        else:
            residents = filter(lambda each: CALLER.get().sees(each.name), self._cache.residency.describe_all())
            items = tuple((resident, self._tier(resident)) for resident in residents)
            page = self._pager.first(items, self._cache.layout, request.page_size)
        assert isinstance(page.extra, Layout)
        return pb.ListAdaptersResponse(
            adapters=[convert.from_resident(resident, tier=tier) for resident, tier in page.items],
            next_page_token=page.next_token,
            layout=convert.from_layout(page.extra),
        )

    async def ListDesired(self, request: pb.ListDesiredRequest, context: Context) -> pb.ListDesiredResponse:
        if request.page_token:
            page = self._desired_pager.next(request.page_token, request.page_size)
        else:
            desired = self._desired()
            entries = tuple(each for each in desired.entries if CALLER.get().sees(each.name))
            page = self._desired_pager.first(entries, (desired.file, self._cache.layout), request.page_size)
        file, layout = cast(tuple[FileStatus | None, Layout], page.extra)
        return pb.ListDesiredResponse(
            file=convert_desired.from_file(visible.declaring_file(file)) if file else None,
            adapters=map(convert_desired.from_entry, page.items),
            next_page_token=page.next_token,
            layout=convert.from_version(layout),
        )

    async def EstimateAdapter(self, request: pb.EstimateAdapterRequest, context: Context) -> pb.EstimateAdapterResponse:
        if not request.source:
            raise RequestInvalid("source", found="nothing", wanted="a directory or file:// URI")
        with _naming_source(request.source):
            estimate = await self._cache.estimate(request.source)
        refusal = estimate.refusal
        return pb.EstimateAdapterResponse(
            digest=str(estimate.adapter.digest),
            report=convert.from_report(estimate.adapter, estimate.model, self._cache.device.slot_dtype),
            fits=refusal is None,
            why_not=f"{refusal.reason}: {refusal.message}" if refusal else "",
            device_bytes=estimate.device_bytes,
            layout=convert.from_version(self._cache.layout),
        )

    async def PrefetchAdapters(
        self, request: pb.PrefetchAdaptersRequest, context: Context
    ) -> pb.PrefetchAdaptersResponse:
        self._cache.limits.check_entries("refs", len(request.refs))
        refs = [AdapterRef.parse(text, f"refs[{index}]") for index, text in enumerate(request.refs)]
        target = convert.to_target("target_tier", request.target_tier)
        ends = await self._cache.prefetch(PrefetchCall(refs, **target))
        return pb.PrefetchAdaptersResponse(
            adapters=[
                pb.PrefetchedAdapter(
                    ref=str(end.ref),
                    adapter=convert.from_resident(end.resident, tier=self._tier(end.resident))
                    if end.resident
                    else None,
                    why_not=f"{end.refusal.reason}: {end.refusal.message}" if end.refusal else "",
                )
                for end in ends
            ],
            layout=convert.from_version(self._cache.layout),
        )

    async def GetCapacity(self, request: pb.GetCapacityRequest, context: Context) -> pb.GetCapacityResponse:
        return convert_state.from_capacity(visible.capacity(self._cache.capacity()), self._cache.layout)

    async def ListSessions(self, request: pb.ListSessionsRequest, context: Context) -> pb.ListSessionsResponse:
        if request.page_token:
            page = self._session_pager.next(request.page_token, request.page_size)
        else:
            cache, now = self._cache, self._cache.environment.clock()
            items = tuple(
                convert_state.from_session(session, cache.residency, cache.running(session), now)
                for session in cache.sessions
                if visible.session(session)
            )
            page = self._session_pager.first(items, cache.layout, request.page_size)
        assert isinstance(page.extra, Layout)
        layout = convert.from_layout(page.extra)
        return pb.ListSessionsResponse(sessions=page.items, next_page_token=page.next_token, layout=layout)

    async def EndSession(self, request: pb.EndSessionRequest, context: Context) -> pb.EndSessionResponse:
        ended = self._cache.end_session(request.session)
        return pb.EndSessionResponse(ended=ended, layout=convert.from_version(self._cache.layout))

    async def WatchEvents(
        self, request: pb.WatchEventsRequest, context: Context
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        cache, events = self._cache, self._cache.events
        wanted = max(events.next_number - min(request.replay, MAX_REPLAY), events.first_number)
        replayed = sum(visible.event(event) is not None for event in events.since(wanted))
        missed = 0
        with self._watching():
            yield pb.WatchEventsResponse(layout=convert.from_version(cache.layout), replayed=replayed)
            while not cache.closed:
                for event in events.since(wanted):
                    missed, wanted = missed + event.number - wanted, event.number + 1
                    seen = visible.event(event)
                    if seen is None:
                        continue
                    layout = convert.from_version(cache.layout)
                    yield pb.WatchEventsResponse(event=convert.from_event(seen), layout=layout, missed=missed)
                    missed = 0
                if wanted == events.next_number:
                    await cache.wait_for_change(self._heartbeat_seconds)
            raise ShuttingDown

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Raises CapacityExceeded when as many watch as may."""
        if self._watchers >= self._max_watchers:
            raise CapacityExceeded(
                f"{self._watchers} streams of events are open already: end one",
                found=self._watchers,
                wanted=f"fewer than {self._max_watchers}",
            )
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1

    def _described(self, ref: AdapterRef) -> adapter_pb2.Adapter:
        return self._adapter(self._cache.residency.describe(ref))

    def _adapter(self, resident: Resident) -> adapter_pb2.Adapter:
        return convert.from_resident(resident, tier=self._tier(resident), sites=True, model=self._cache.model)

    def _tier(self, resident: Resident) -> adapter_pb2.Tier.ValueType:
        """The fastest tier that has the adapter."""
        if resident.slot is not None:
            return adapter_pb2.TIER_DEVICE
        digest, tiers = resident.adapter.digest, self._cache.tiers
        if digest in tiers.host:
            return adapter_pb2.TIER_HOST
        if digest in tiers.disk:
            return adapter_pb2.TIER_DISK
        return adapter_pb2.TIER_SOURCE if resident.source else adapter_pb2.TIER_GONE


@contextlib.contextmanager
def _naming_source(source: str) -> Iterator[None]:
    """A refusal of the source that the request names is one of its field."""
    try:
        yield
    except (SourceDenied, SourceUnavailable) as error:
        raise (error.at("source") if source else error) from None


def _part(request: pb.LoadAdapterStreamRequest | None) -> str:
    return (request.WhichOneof("part") if request is not None else None) or "nothing"
