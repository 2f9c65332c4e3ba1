"""slotcar.v1.AdapterService over the cache."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from grpc import aio
from slotcar.v1 import adapter_pb2, adapter_service_pb2_grpc
from slotcar.v1 import adapter_service_pb2 as pb

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.core.calls import LoadCall
from slotcar_sidecar.core.errors import RequestInvalid, ShuttingDown
from slotcar_sidecar.core.events import MAX_REPLAY
from slotcar_sidecar.core.ids import AdapterRef
from slotcar_sidecar.core.layout import Layout
from slotcar_sidecar.core.residency import Resident
from slotcar_sidecar.rpc import convert
from slotcar_sidecar.rpc.paging import Pager

Context = aio.ServicerContext[Any, Any]


class AdapterService(adapter_service_pb2_grpc.AdapterServiceServicer):
    """For operators, routers and engines."""

    def __init__(self, cache: AdapterCache, pager: Pager[tuple[Resident, bool]], heartbeat_seconds: float) -> None:
        self._cache = cache
        self._pager = pager
        self._heartbeat_seconds = heartbeat_seconds

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        call = LoadCall(
            AdapterRef.parse(request.ref),
            request.source or None,
            convert.to_on_conflict(request.on_conflict),
            request.keep,
        )
        loaded = await self._cache.load(call)
        return pb.LoadAdapterResponse(
            adapter=self._adapter(loaded.resident),
            report=convert.from_report(loaded.resident.adapter, loaded.model, self._cache.device.slot_dtype),
            layout=convert.from_version(loaded.layout),
            already_resident=loaded.already_resident,
        )

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
            items = tuple((resident, self._is_in_host(resident)) for resident in self._cache.residency.describe_all())
            page = self._pager.first(items, self._cache.layout, request.page_size)
        assert isinstance(page.extra, Layout)
        return pb.ListAdaptersResponse(
            adapters=[convert.from_resident(resident, in_host=in_host) for resident, in_host in page.items],
            next_page_token=page.next_token,
            layout=convert.from_layout(page.extra),
        )

    async def EstimateAdapter(self, request: pb.EstimateAdapterRequest, context: Context) -> pb.EstimateAdapterResponse:
        if not request.source:
            raise RequestInvalid("source", found="nothing", wanted="a directory or file:// URI")
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

    async def WatchEvents(
        self, request: pb.WatchEventsRequest, context: Context
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        cache, events = self._cache, self._cache.events
        wanted = max(events.next_number - min(request.replay, MAX_REPLAY), events.first_number)
        yield pb.WatchEventsResponse(layout=convert.from_version(cache.layout))
        while not cache.closed:
            for event in events.since(wanted):
                yield pb.WatchEventsResponse(
                    event=convert.from_event(event),
                    layout=convert.from_version(cache.layout),
                    missed=event.number - wanted,
                )
                wanted = event.number + 1
            if wanted == events.next_number:
                await cache.wait_for_change(self._heartbeat_seconds)
        raise ShuttingDown

    def _described(self, ref: AdapterRef) -> adapter_pb2.Adapter:
        return self._adapter(self._cache.residency.describe(ref))

    def _adapter(self, resident: Resident) -> adapter_pb2.Adapter:
        return convert.from_resident(resident, in_host=self._is_in_host(resident), sites=True)

    def _is_in_host(self, resident: Resident) -> bool:
        return resident.adapter.digest in self._cache.tiers.host
