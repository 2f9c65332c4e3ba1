"""The Forwards of one channel: a client sends the same ones again and again, so each is prepared once.

Invariant: the bytes of a payload name every input of the index work but the mapping, and the prepared call carries its
mapping; it is used only while that is the session's.
"""

from __future__ import annotations

from collections import OrderedDict

from slotcar.shm import region, slots

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.cache.threads import PreparedForward, ThreadForwards
from slotcar_sidecar.core.calls import ForwardCall
from slotcar_sidecar.core.errors import RequestInvalid, SiteUnknown
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.tensor import INDEX_DTYPE, ITEM_BYTES, Matrix
from slotcar_sidecar.ring.channel import Channel

_MOST_PREPARED = 512  # a decode step of a large model has about 130
_MOST_BYTES = 1 << 20  # of payloads, so that long ones cannot make it large
_INDEX_BYTES = 4


class ChannelForwards:
    """Used by the channel's thread alone."""

    def __init__(self, channel: Channel, forwards: ThreadForwards, cache: AdapterCache) -> None:
        self.channel = channel
        self._forwards = forwards
        self._cache = cache
        self._prepared: OrderedDict[bytes, tuple[PreparedForward, int]] = OrderedDict()
        self._bytes = 0

    def prepared(self, payload: bytes) -> tuple[PreparedForward, int]:
        """The Forward that the payload asks for, and the fingerprint of its mapping. Raises SlotcarError."""
        found = self._prepared.get(payload)
        if found is None or not found[0].is_of_now:
            return self._prepare(payload)
        self._prepared.move_to_end(payload)
        return found

    def forget(self) -> None:
        """Lets go of the arena."""
        self._prepared.clear()
        self._bytes = 0

    def _prepare(self, payload: bytes) -> tuple[PreparedForward, int]:
        newest = self._newest()
        if newest is not None and not newest[0].is_of_now:
            # Whoever has a new mapping does not send again what it sent for the one before.
            for stale in [known for known, (call, _) in self._prepared.items() if not call.is_of_now]:
                self._drop(stale)
        call = self._forwards.prepare(to_call(payload, self.channel, self._cache))
        made = call, self._fingerprint(call)
        while len(self._prepared) >= _MOST_PREPARED or self._bytes > _MOST_BYTES:
            self._drop(next(iter(self._prepared)))
        self._prepared[payload] = made
        self._bytes += len(payload)
        return made

    def _drop(self, payload: bytes) -> None:
        del self._prepared[payload]
        self._bytes -= len(payload)

    def _fingerprint(self, call: PreparedForward) -> int:
        newest = self._newest()
        if newest is not None and newest[0].mapping is call.mapping:
            return newest[1]
        return region.fingerprint(call.mapping.digests)

    def _newest(self) -> tuple[PreparedForward, int] | None:
        """The one that was used last."""
        return next(reversed(self._prepared.values()), None)


def to_call(payload: bytes, channel: Channel, cache: AdapterCache) -> ForwardCall:
    """What a payload asks for, with its tensors in the arena. Raises RequestInvalid or SiteUnknown."""
    try:
        request = region.Forward.unpack(payload)
    except region.BadRegion as error:
        raise RequestInvalid("payload", found=str(error), wanted="a Forward") from None
    cache.limits.check_entries("row_counts", len(request.row_counts))
    if request.dtype >= len(slots.DTYPES):
        raise RequestInvalid("dtype", found=request.dtype, wanted=f"less than {len(slots.DTYPES)}")
    # Without a model the call is refused for that, or for its session or mapping.
    items = _items(request, channel, cache.model) if cache.model is not None else ()
    return ForwardCall(
        channel.terms.session.session_id,
        request.mapping_id,
        request.generation,
        tuple(request.row_counts),
        items,
        "ring",
        channel.terms.rank,
    )


def _items(request: region.Forward, channel: Channel, model: ModelSpec) -> tuple[ForwardItem, ...]:
    if len(request.items) > len(model.sites):
        raise RequestInvalid("items", found=f"{len(request.items)} of them", wanted=f"at most {len(model.sites)}")
    for index, item in enumerate(request.items):
        if item.site >= len(model.sites):
            raise SiteUnknown(f"items[{index}].site", str(item.site))
    tensors = _Tensors(channel, slots.DTYPES[request.dtype], sum(request.row_counts))
    return tuple(
        _item(f"items[{index}]", item, tensors, model.sites[item.site].name, model)
        for index, item in enumerate(request.items)
    )


def _item(field: str, item: region.Item, tensors: _Tensors, site: str, model: ModelSpec) -> ForwardItem:
    """The arena's tensors have the shapes that the site wants; whether it wants them is the core's to say."""
    in_features, out_features = model.rank_features(site)
    return ForwardItem(
        site,
        tensors.shared(f"{field}.x_offset", item.x_offset, in_features),
        tensors.maybe(f"{field}.base_offset", item.base_offset, out_features),
        tensors.at(f"{field}.out_offset", item.out_offset, out_features),
        _aux(field, item, tensors, out_features),
        tensors.dtype,
    )


def _aux(field: str, item: region.Item, tensors: _Tensors, out_features: int) -> Matrix | None:
    if item.aux not in tuple(region.Aux):
        raise RequestInvalid(f"{field}.aux", found=item.aux, wanted=f"at most {max(region.Aux)}")
    if (item.aux == region.Aux.NONE) != (item.aux_offset == region.ABSENT):
        raise RequestInvalid(f"{field}.aux_offset", found=item.aux_offset, wanted="one exactly when there is an aux")
    if item.aux == region.Aux.INDICES:
        return tensors.at(f"{field}.aux_offset", item.aux_offset, 1, INDEX_DTYPE)
    return tensors.maybe(f"{field}.aux_offset", item.aux_offset, out_features)


class _Tensors:
    """Matrices of `rows` rows in the arena. Each raises RequestInvalid for an offset that is not inside."""

    def __init__(self, channel: Channel, dtype: str, rows: int) -> None:
        self.dtype = dtype
        self._arena = channel.arena
        self._rows = rows
        self._shared: dict[tuple[int, int], Matrix | None] = {}

    def at(self, field: str, offset: int, columns: int, dtype: str = "") -> Matrix:
        dtype = dtype or self.dtype
        end = offset + self._rows * columns * (_INDEX_BYTES if dtype == INDEX_DTYPE else ITEM_BYTES[dtype])
        if offset % region.ALIGNMENT or end > len(self._arena):
            wanted = f"a multiple of {region.ALIGNMENT}, and {end - offset} bytes below {len(self._arena)}"
            raise RequestInvalid(field, found=offset, wanted=wanted)
        return Matrix(dtype, self._rows, columns, columns, self._arena[offset:end])

    def maybe(self, field: str, offset: int, columns: int) -> Matrix | None:
        return None if offset == region.ABSENT else self.at(field, offset, columns)

    def shared(self, field: str, offset: int, columns: int) -> Matrix | None:
        """The same object for the same place; tensors without rows may be there with different widths."""
        if (offset, columns) not in self._shared:
            self._shared[offset, columns] = self.maybe(field, offset, columns)
        return self._shared[offset, columns]
