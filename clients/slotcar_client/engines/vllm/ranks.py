"""The tensor-parallel processes of one engine: they take the same steps, and one of them decides for all.

Invariant: every rank gets the same answer of each call, so that no rank waits in a collective that another left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from slotcar_client.errors import InternalError, SlotcarError

T = TypeVar("T")


class Ranks(Protocol):
    """What a step asks of the other ranks."""

    @property
    def rank(self) -> int:
        """Of this process; 0 decides."""

    @property
    def size(self) -> int:
        """How many there are."""

    def decided(self, decide: Callable[[], T]) -> T:
        """What `decide` gives at rank 0, or the SlotcarError that it raises, at every rank."""

    def any(self, flag: bool) -> bool:
        """Whether it is so at one of them."""


class Alone:
    """The only process of its engine."""

    rank = 0
    size = 1

    def decided(self, decide: Callable[[], T]) -> T:
        return decide()

    def any(self, flag: bool) -> bool:
        return flag


class Group:
    """The processes of a group that talks over the CPU."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group
        self._first = dist.get_global_rank(group, 0)

    def decided(self, decide: Callable[[], T]) -> T:
        box: list[Any] = [None, None]
        if self.rank == 0:
            try:
                box[0] = decide()
            except SlotcarError as error:
                box[1] = error
            except Exception as error:  # the others wait for an answer
                box[1] = InternalError(f"{type(error).__name__}: {error}")
        dist.broadcast_object_list(box, src=self._first, group=self._group)
        answer, failure = box
        if failure is not None:
            raise failure
        result: T = answer
        return result

    def any(self, flag: bool) -> bool:
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flags.item())
