"""Which version of its adapter a request computes with: fixed here, before the engine's queue.

A name becomes a digest in one call of the request's own, and the engine's workers hold that digest before the request
is queued: a replace in between can neither change it nor take its bytes away. `_held` has the versions that the workers
are believed to hold, no more than they keep beside those of unfinished requests. Invariant: a wrong belief costs calls,
never a version: the workers look for what the request names, and a request that they refuse so is admitted again.

The logic is written once, as coroutines: vLLM's asynchronous engine awaits them, its synchronous one runs them with
calls that block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from slotcar_client import verbs
from slotcar_client.effects import Plan
from slotcar_client.engines.vllm.failures import slotcar_error
from slotcar_client.engines.vllm.requests import Asked, engine_id, version_ref
from slotcar_client.errors import AdapterNotFound

# A name that comes with a source is loaded into host memory; the engine's mapping brings it into a slot.
LOAD_TIER = "host"

# How often a request is admitted whose name moves each time before the workers have its version.
TRIES = 8

# Performs a plan of the adapter service.
Perform = Callable[[Plan[Any]], Awaitable[Any]]
# Has the engine's workers hold a version.
Hold = Callable[[str], Awaitable[None]]


class Admission:
    """The versions of one engine's requests, as one front end of it admits them."""

    def __init__(self, perform: Perform, hold: Hold, held_versions: int) -> None:
        """held_versions: how many versions the workers hold for this front end beside those in use."""
        self._perform = perform
        self._hold = hold
        self._limit = held_versions
        self._held: OrderedDict[str, None] = OrderedDict()
        self._loaded: set[Asked] = set()
        self._ids: dict[int, str] = {}

    async def admit(self, asked: Asked, *, anew: bool = False) -> str:
        """The version that the request computes with, held by the workers. Raises SlotcarError, or what the hold does.

        If the version is gone before the workers have it, the name has moved on: the newer one is as good.
        anew: its source is loaded, and the workers are asked, even if both was done before.
        """
        version = await self._resolve(asked, anew)
        if anew:
            self._held.pop(version, None)
        for again in reversed(range(TRIES)):
            if version in self._held:
                break
            try:
                await self._hold(version)
            except Exception as error:
                is_gone = isinstance(slotcar_error(error), AdapterNotFound)
                if not (is_gone and asked.by_name and again):
                    raise
                version = await self._version(asked.name)
            else:
                self._held[version] = None
        self._held.move_to_end(version)
        while len(self._held) > self._limit:
            self._held.popitem(last=False)
        return version

    def remember_id(self, lora_id: int, version: str) -> None:
        """`lora_id` is what the user calls it by."""
        self._ids[lora_id] = version

    def engine_id(self, lora_id: int) -> int:
        """The engine's id for the one that a user gave, which may be the engine's already."""
        version = self._ids.get(lora_id)
        return lora_id if version is None else engine_id(version)

    def forget(self, lora_id: int) -> None:
        """The workers hold it no longer."""
        for version in [version for version in self._held if engine_id(version) == self.engine_id(lora_id)]:
            del self._held[version]

    async def _resolve(self, asked: Asked, anew: bool) -> str:
        """The version that is asked for, as of now. Raises AdapterNotFound and what a load raises."""
        if asked.fixed:
            return asked.ref
        if asked.source and (anew or asked.replace or asked not in self._loaded):
            return await self._load(asked)
        try:
            return await self._version(asked.name)
        except AdapterNotFound:
            if not asked.source:
                raise
            return await self._load(asked)

    async def _version(self, name: str) -> str:
        return version_ref(name, (await self._perform(verbs.get(name))).digest)

    async def _load(self, asked: Asked) -> str:
        request = verbs.load_request(asked.name, asked.source, None, replace=asked.replace, tier=LOAD_TIER)
        report = await self._perform(verbs.load(request))
        self._loaded.add(asked)
        return version_ref(asked.name, report.digest)
