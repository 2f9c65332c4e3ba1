"""How a Forward travels: one module per plane, all with the same meaning."""

from __future__ import annotations

from slotcar_client.errors import RequestInvalid
from slotcar_client.rpc import Rpc
from slotcar_client.transports.base import Transport
from slotcar_client.transports.stream import StreamTransport
from slotcar_client.transports.unary import UnaryTransport

_TRANSPORTS: dict[str, type[StreamTransport] | type[UnaryTransport]] = {
    "auto": StreamTransport,
    "stream": StreamTransport,
    "unary": UnaryTransport,
}


def make_transport(name: str, rpc: Rpc) -> Transport:
    """The transport of that name; "auto" is the fastest that both sides have. Raises RequestInvalid."""
    if name not in _TRANSPORTS:
        wanted = ", ".join(_TRANSPORTS)
        raise RequestInvalid(
            f"transport is {name!r}, wanted one of {wanted}", field="transport", found=name, wanted=wanted
        )
    return _TRANSPORTS[name](rpc)
