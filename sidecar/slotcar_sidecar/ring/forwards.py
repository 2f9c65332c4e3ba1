"""The Forwards of one channel: a client sends the same ones again and again, so each is prepared once.

Invariant: the bytes of a payload name every input of the index work but the mapping, and the prepared call carries its
mapping; it is used only while that is the session's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from slotcar.shm import region, slots

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.cache.threads import PreparedForward, ThreadForwards
from slotcar_sidecar.core.calls import ForwardCall
from slotcar_sidecar.core.errors import RequestInvalid, SiteUnknown
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.tensor import ITEM_BYTES, Matrix
from slotcar_sidecar.ring.channel import Channel

_MOST_PREPARED = 512  # a decode step of a large model has about 130
_MOST_BYTES = 1 << 20  # of payloads, so that long ones cannot make it large


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
    view = _tensors(channel, slots.DTYPES[request.dtype], sum(request.row_counts))
    inputs: dict[tuple[int, int], Matrix] = {}
    items = []
    for index, item in enumerate(request.items):
        field = f"items[{index}]"
        if item.site >= len(model.sites):
            raise SiteUnknown(f"{field}.site", str(item.site))
        site = model.sites[item.site]
        # Tensors without rows may lie at one place though they have different widths.
        x = item.x_offset, site.in_features
        if x not in inputs:
            inputs[x] = view(f"{field}.x_offset", *x)
        base = None
        if item.base_offset != region.NO_BASE:
            base = view(f"{field}.base_offset", item.base_offset, site.out_features)
        out = view(f"{field}.out_offset", item.out_offset, site.out_features)
        items.append(ForwardItem(site.name, inputs[x], base, out))
    return tuple(items)


def _tensors(channel: Channel, dtype: str, rows: int) -> Callable[[str, int, int], Matrix]:
    """Makes a matrix of `rows` rows at an offset of the arena; raises RequestInvalid for one that is not inside."""

    def view(field: str, offset: int, columns: int) -> Matrix:
        end = offset + rows * columns * ITEM_BYTES[dtype]
        if offset % region.ALIGNMENT or end > len(channel.arena):
            wanted = f"a multiple of {region.ALIGNMENT}, and {end - offset} bytes below {len(channel.arena)}"
            raise RequestInvalid(field, found=offset, wanted=wanted)
        return Matrix(dtype, rows, columns, columns, channel.arena[offset:end])

    return view
