"""At which sites an adapter has weights: asked for once, as a digest never changes what it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from slotcar.v1 import adapter_service_pb2

from slotcar_client.effects import Call, Plan
from slotcar_client.entries import Target
from slotcar_client.errors import InternalError

_MAX_KNOWN_ADAPTERS = 4096


class KnownSites(NamedTuple):
    """Sites of the model: those with weights of the adapter, and those that need the base model's output too."""

    adapted: frozenset[str]
    needing_base: frozenset[str]


NO_SITES = KnownSites(frozenset(), frozenset())


class AdapterSites:
    """By digest; the oldest are forgotten. `recovered` runs an attempt as the session's other calls are run."""

    def __init__(self, recovered: Callable[[Callable[[], Plan[Any]]], Plan[Any]]) -> None:
        self._recovered = recovered
        self._sites: dict[str, KnownSites] = {}

    def of_all(self, entries: Iterable[Target]) -> Plan[list[KnownSites]]:
        """Those of each entry of a mapping: "name@digest" or BASE."""
        sites = []
        for entry in entries:
            known = (yield from self.of(entry)) if isinstance(entry, str) else NO_SITES
            sites.append(known)
        return sites

    def of(self, ref: str) -> Plan[KnownSites]:
        """The sites of "name@digest"."""
        digest = ref.partition("@")[2]
        if digest not in self._sites:

            def attempt() -> Plan[adapter_service_pb2.GetAdapterResponse]:
                response: adapter_service_pb2.GetAdapterResponse = yield Call(
                    adapter_service_pb2.GetAdapterRequest(ref=ref)
                )
                return response

            adapter = (yield from self._recovered(attempt)).adapter
            if adapter.digest != digest:
                raise InternalError(f"GetAdapter({ref}) answered {adapter.digest}")
            while len(self._sites) >= _MAX_KNOWN_ADAPTERS:
                del self._sites[next(iter(self._sites))]
            self._sites[digest] = KnownSites(frozenset(adapter.sites), frozenset(adapter.sites_needing_base))
        return self._sites[digest]
