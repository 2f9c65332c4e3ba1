"""What a call of the client does, as a plan: a generator that yields effects and is sent their answers.

A plan holds all of the logic and does no I/O; a face performs the effects: `slotcar_client` with threads,
`slotcar_client.aio` with asyncio. An effect that fails is thrown into the plan at the place that asked for it. Between
two effects a plan runs alone; while an effect that `lends` the session is under way, other plans of it may run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Mapping as ReadOnlyDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from google.protobuf.message import Message
from slotcar.v1 import engine_service_pb2

from slotcar_client.errors import SlotcarError
from slotcar_client.values import Mapping

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """One unary RPC, which the type of its request names; the answer is the response.

    timeout_seconds: by default the deadline of the channel's calls. wait_seconds: how long the server may queue the
    call; it comes on top of the deadline.
    """

    request: Message
    timeout_seconds: float | None = None
    wait_seconds: float = 0.0

    @property
    def lends(self) -> bool:
        return self.wait_seconds > 0


@dataclass(frozen=True, slots=True, eq=False)
class ForwardCall:
    """What a caller wants computed: {site: x [rows, in_features]}, and {site: base [rows, out_features]} to add to.

    aux: {site: indices [rows], or the base model's output}; out_dtype: of the result where no other tensor says it.
    """

    inputs: ReadOnlyDict[str, torch.Tensor]
    row_counts: tuple[int, ...]
    base: ReadOnlyDict[str, torch.Tensor] | None = None
    aux: ReadOnlyDict[str, torch.Tensor] | None = None
    out_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """A Forward over the session's transport, for a mapping as it is now; the answer is {site: output}."""

    call: ForwardCall
    mapping: Mapping
    opened: engine_service_pb2.SessionOpened
    rank: int = 0
    lends: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Open:
    """A stream that takes the place of the session's stream; the answer is its SessionOpened."""

    request: engine_service_pb2.OpenSessionRequest | engine_service_pb2.JoinSessionRequest
    lends: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """Tells the transport which session it is for, from now on."""

    opened: engine_service_pb2.SessionOpened
    lends: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Lets time pass; fails with SessionClosed as soon as the session is closed."""

    seconds: float
    lends: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Stale:
    """Tells `on_stale` that the mapping is about to be set again because of the error."""

    mapping: Mapping
    error: SlotcarError
    lends: ClassVar[bool] = True


Effect: TypeAlias = Call | Forward | Open | Use | Wait | Stale
Plan: TypeAlias = Generator[Effect, Any, T]
# How a plan goes on: to its next effect, or to its end as StopIteration with the result.
Advance: TypeAlias = Callable[[], Effect]


def run(plan: Plan[T], perform: Callable[[Effect], Any]) -> T:
    """The result of a plan whose effects nobody else has to wait for."""
    advance: Advance = partial(next, plan)
    try:
        while True:
            advance = performed(plan, perform, advance())
    except StopIteration as end:
        result: T = end.value
        return result


def performed(plan: Plan[T], perform: Callable[[Effect], Any], effect: Effect) -> Advance:
    """Performs the effect; returns how the plan goes on."""
    try:
        return partial(plan.send, perform(effect))
    except BaseException as error:  # the plan decides, also about an interrupt
        return partial(plan.throw, error)
