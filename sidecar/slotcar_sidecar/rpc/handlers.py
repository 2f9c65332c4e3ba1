"""Puts a call of an interceptor's around a handler's own, whichever of gRPC's four kinds the handler is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

__all__ = ["around"]

Wrap = Callable[[Any], Any]
"""From the handler's own call to the one in its place."""


def around(handler: Any, unary: Wrap, streaming: Wrap, read: Wrap = lambda own: own) -> Any:
    """The same kind of handler: `unary` wraps a call with one answer, `streaming` one with many, `read` its reader."""
    kinds: tuple[Any, Any]
    if handler.response_streaming:
        call = streaming(handler.stream_stream or handler.unary_stream)
        kinds = grpc.unary_stream_rpc_method_handler, grpc.stream_stream_rpc_method_handler
    else:
        call = unary(handler.stream_unary or handler.unary_unary)
        kinds = grpc.unary_unary_rpc_method_handler, grpc.stream_unary_rpc_method_handler
    make = kinds[handler.request_streaming]
    return make(call, read(handler.request_deserializer), handler.response_serializer)
