"""What one entry asks of the cache: to load what is wanted, or to look what is at its source."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.core.bindings import OnConflict
from slotcar_sidecar.core.calls import LoadCall
from slotcar_sidecar.core.desired import Cause, Loaded, Looked, Refused, Seen, Want, Wanted
from slotcar_sidecar.core.errors import InternalError, ShuttingDown, SlotcarError, SlotsExhausted
from slotcar_sidecar.core.ids import AdapterName, AdapterRef, Digest

_log = logging.getLogger("slotcar")


class CacheWorld:
    """Implements core.desired.World over the cache."""

    def __init__(self, cache: AdapterCache) -> None:
        self._cache = cache

    @property
    def now(self) -> float:
        return self._cache.environment.clock()

    @property
    def model_known(self) -> bool:
        return self._cache.model is not None

    def seen(self, name: AdapterName) -> Seen | None:
        names = self._cache.residency.names
        digest = names.get(name)
        return None if digest is None else Seen(digest, names.is_kept(name))

    def room(self, wanted: Wanted) -> int:
        slots, kept = self._cache.residency.slots, len(self._cache.residency.names.kept)
        room = 0 if slots.queue else slots.available()
        keeps = min(len(slots) - 1, len(slots) - slots.reserved_slots) - kept
        return min(room, keeps) if wanted is Wanted.KEEP else room


class Steps:
    """Each ends with an outcome, whatever happens, unless the server shuts down."""

    def __init__(self, cache: AdapterCache, world: CacheWorld) -> None:
        self._cache = cache
        self._world = world

    def is_remote(self, want: Want) -> bool:
        """Whether its source may be slow."""
        with contextlib.suppress(SlotcarError):
            return self._cache.tiers.is_remote(want.source)
        return False

    async def look(self, want: Want) -> Looked:
        """Which bytes are at the source now."""
        return Looked(await self._version(want))

    async def load(self, want: Want) -> Loaded | Refused:
        """Loads what is wanted, as far as it is not there. Raises ShuttingDown."""
        before = await self._version(want)
        try:
            return await self._loaded(want)
        except ShuttingDown:
            raise
        except SlotcarError as error:
            # What was there at both ends was refused; otherwise nobody knows which bytes were.
            version = before if await self._version(want) == before else None
            return Refused(Cause.of(error), version, self._world.room(want.state))
        except Exception:
            _log.exception("the declared adapter %s cannot be loaded", want.name)
            return Refused(Cause.of(InternalError()), before)

    async def _version(self, want: Want) -> Hashable:
        tiers = self._cache.tiers
        try:
            return await tiers.version(await tiers.canonical(want.source))
        except (SlotcarError, OSError):
            return None

    async def _loaded(self, want: Want) -> Loaded:
        cache = self._cache
        in_slot = want.in_slot and cache.model is not None
        keep = in_slot and want.state is Wanted.KEEP
        digest = await self._digest_here(want)
        if digest is None:
            ref, source = AdapterRef(want.name, want.digest), want.source
        elif in_slot and cache.residency.readable_slot(digest) is None:
            ref, source = AdapterRef(want.name, digest), None
        else:
            if keep:
                cache.keep(AdapterRef(want.name, digest))
            return Loaded(digest, in_slot)
        try:
            loaded = await cache.load(LoadCall(ref, source, OnConflict.REPLACE, keep, in_slot, want.on_disk))
        except SlotsExhausted:
            await self._name(want)
            raise
        return Loaded(loaded.resident.adapter.digest, loaded.resident.slot is not None)

    async def _digest_here(self, want: Want) -> Digest | None:
        """The digest that the name has, if that is what is wanted, whoever loaded it."""
        uri = await self._cache.tiers.canonical(want.source)
        names = self._cache.residency.names
        digest = names.get(want.name)
        if digest is None:
            return None
        is_wanted = digest == want.digest if want.digest else names.source_of(AdapterRef(want.name)) == uri
        return digest if is_wanted else None

    async def _name(self, want: Want) -> None:
        """An adapter that finds no slot has its name all the same, so that mappings can ask for it."""
        if self._cache.residency.names.get(want.name) is None:
            with contextlib.suppress(SlotcarError):
                await self._cache.load(LoadCall(AdapterRef(want.name, want.digest), want.source, in_slot=False))
