"""For which sites an adapter has weights: asked for once, as a digest never changes what it stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slotcar.v1 import adapter_service_pb2

from slotcar_client.effects import Call, Plan
from slotcar_client.errors import InternalError

_MAX_KNOWN_ADAPTERS = 4096


class AdapterSites:
    """By digest; the oldest are forgotten. `recovered` runs an attempt as the session's other calls are run."""

    def __init__(self, recovered: Callable[[Callable[[], Plan[Any]]], Plan[Any]]) -> None:
        self._recovered = recovered
        self._sites: dict[str, frozenset[str]] = {}

    def of(self, ref: str) -> Plan[frozenset[str]]:
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
            self._sites[digest] = frozenset(adapter.sites)
        return self._sites[digest]
