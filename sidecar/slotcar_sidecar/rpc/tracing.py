"""Says which RPC runs, for whatever is written about it; keeps its span, and tells of its end at debug level.

Invariant: a Forward has no line; one that has no span either, as those of a stream, passes by untouched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from slotcar_sidecar.core.call import CALL, Call
from slotcar_sidecar.rpc.handlers import around
from slotcar_sidecar.rpc.status import DETAILS_KEY

_log = logging.getLogger("slotcar.rpc")

_CODES = {code.value[0]: code.name for code in grpc.StatusCode}
_NO_LINE = frozenset({"Forward"})
_UNTOUCHED = frozenset({"ForwardStream"})


class CallSpan(Protocol):
    """The span of an RPC, or the place of one."""

    @property
    def trace(self) -> str:
        """The id of the trace that the RPC is in, "" for none."""

    @property
    def span_id(self) -> str:
        """Of the span that is kept, "" for none."""

    def end(self, code: str, reason: str) -> None:
        """The RPC has ended."""


Begin = Callable[[str, Sequence[tuple[str, Any]], str], CallSpan]
"""Called with the full method, the metadata and the adapter's ref, in the context of the RPC."""


class CallInterceptor(aio.ServerInterceptor):
    """The outermost, of slotcar's own services. `begin` is None where nothing is traced."""

    def __init__(self, begin: Begin | None = None) -> None:
        self._begin_span = begin

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method.removeprefix("/")
        name = method.rpartition("/")[2]
        # Without a span and a line there is nothing to be told of.
        untouched = _UNTOUCHED if self._begin_span is not None else _UNTOUCHED | _NO_LINE
        if handler is None or not method.startswith("slotcar.") or name in untouched:
            return handler  # type: ignore[no-any-return]
        return around(handler, partial(self._unary, method), partial(self._streaming, name))  # type: ignore[no-any-return]

    def _unary(self, method: str, handler: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        name = method.rpartition("/")[2]

        async def call(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            span = None
            if self._begin_span is not None:
                ref = getattr(request, "ref", None)
                headers: Any = context.invocation_metadata() or ()
                span = self._begin_span(method, headers, ref if isinstance(ref, str) else "")
            end = _begin(name, context, span)
            try:
                response = await handler(request, context)
            except BaseException:
                end("CANCELLED")
                raise
            end("")
            return response

        return call

    def _streaming(self, name: str, handler: Callable[[Any, Any], Awaitable[None]]) -> Any:
        """A stream lives as long as its session, or its reader: that is no span."""

        async def call(request: Any, context: aio.ServicerContext[Any, Any]) -> None:
            end = _begin(name, context, None)
            try:
                await handler(request, context)
            except BaseException:
                end("CANCELLED")
                raise
            end("")

        return call


def _begin(name: str, context: aio.ServicerContext[Any, Any], span: CallSpan | None) -> Callable[[str], None]:
    """The RPC is the one that runs, in its context; returns what tells of its end.

    That takes a code, or "" for that of the context, where refusals are. All that is raised is that the caller left.
    """
    CALL.set(Call(name, context.peer(), span.trace if span else "", span.span_id if span else ""))
    clock = asyncio.get_running_loop().time
    start = clock()

    def end(code: str) -> None:
        has_line = name not in _NO_LINE and _log.isEnabledFor(logging.DEBUG)
        if span is None and not has_line:
            return
        code = code or _CODES.get(_number(context.code()), "UNKNOWN")
        reason = "" if code == "OK" else _reason(context)
        if span is not None:
            span.end(code, reason)
        if has_line:
            fields = {"method": name, "seconds": round(clock() - start, 6), "reason": reason or code}
            _log.debug("call", extra={"fields": fields})

    return end


def _number(code: Any) -> int:
    """The context's code before it is set is 0, and may be gRPC's enumeration."""
    return int(code.value[0]) if isinstance(code, grpc.StatusCode) else int(code or 0)


def _reason(context: aio.ServicerContext[Any, Any]) -> str:
    """The row of the error table that the call was refused with, "" for none."""
    for key, value in context.trailing_metadata() or ():
        if key == DETAILS_KEY:
            info = error_details_pb2.ErrorInfo()
            try:
                if any(detail.Unpack(info) for detail in status_pb2.Status.FromString(value).details):
                    return str(info.reason)
            except DecodeError:
                return ""
    return ""
