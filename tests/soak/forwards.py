"""Forwards as a soak asks for them: random sites, counts, modes and dtypes, with inputs that can be found again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from slotcar.v1 import engine_service_pb2 as pb
from slotcar.v1 import tensor_pb2

from tests.soak.plan import SITES, Pools

_COUNTS = (0, 1, 1, 3, 8, 24, 64)
_WIDE_COUNTS = (0, 60, 200)
_WIDE = ("wide",)
_GROUPS = (("attn.q", "attn.k", "attn.v"), ("attn.o",), ("mlp.up",), ("mlp.down",), ("attn.q", "mlp.down"))
_WIRE = {"float32": tensor_pb2.DTYPE_FLOAT32, "float16": tensor_pb2.DTYPE_FLOAT16}


@dataclass(frozen=True, slots=True)
class Known:
    """A mapping as SetMapping answered it."""

    epoch: str
    session: str
    mapping_id: int
    generation: int
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """A Forward that was sent: its request, and what a record needs to recompute it."""

    request: pb.ForwardRequest
    facts: dict[str, Any]
    items: tuple[tuple[str, bool], ...]

    def record(self, answer: pb.ForwardResponse, plane: str) -> tuple[dict[str, Any], bytes]:
        """Facts and payload of the answer's record."""
        facts = self.facts | {
            "plane": plane,
            "digests": list(answer.digests),
            "answer_epoch": answer.layout.epoch,
            "answer_generation": answer.layout.generation,
        }
        return facts, b"".join(output.inline for output in answer.outputs)

    def fault(self, answer: pb.ForwardResponse) -> str:
        """What of the answer's shape is not as it was asked for; "" if nothing."""
        rows = sum(self.facts["counts"])
        wanted = [(_WIRE[self.facts["dtype"]], rows, SITES[site][1]) for site, _ in self.items]
        found = [(output.dtype, output.rows, output.columns) for output in answer.outputs]
        return "" if found == wanted else f"outputs are {found}, not {wanted}"


def ask(random: random.Random, pools: Pools, known: Known, rank: int, *, is_wide: bool = False) -> Asked:
    """A random Forward for a mapping; a wide one takes a while, so that slots change under its kernels."""
    counts = [random.choice(_WIDE_COUNTS if is_wide else _COUNTS) for _ in known.digests]
    rows, dtype = sum(counts), "float16" if random.random() < 0.15 else "float32"
    start = random.randint(0, len(pools.x) - rows)
    group = _WIDE if is_wide else random.choice(_GROUPS)
    items = tuple((site, random.random() < 0.3) for site in random.sample(group, random.randint(1, len(group))))
    request = pb.ForwardRequest(
        session=known.session,
        mapping_id=known.mapping_id,
        generation=known.generation,
        row_counts=counts,
        items=_items(items, pools, slice(start, start + rows), dtype),
        rank=rank,
    )
    facts = {
        "epoch": known.epoch,
        "session": known.session,
        "mapping_id": known.mapping_id,
        "generation": known.generation,
        "counts": counts,
        "rank": rank,
        "x": start,
        "dtype": dtype,
        "items": items,
    }
    return Asked(request, facts, items)


def _items(items: Sequence[tuple[str, bool]], pools: Pools, rows: slice, dtype: str) -> list[pb.ForwardItem]:
    made, before = [], 0
    for site, is_added in items:
        inputs, outputs = SITES[site]
        item = pb.ForwardItem(site=site, mode=pb.FORWARD_MODE_ADD if is_added else pb.FORWARD_MODE_DELTA)
        if inputs != before:
            item.x.CopyFrom(_tensor(pools.x[rows, :inputs], dtype))
        if is_added:
            item.base.CopyFrom(_tensor(pools.base[rows, :outputs], dtype))
        made.append(item)
        before = inputs
    return made


def _tensor(values: np.ndarray, dtype: str) -> tensor_pb2.TensorRef:
    rows, columns = values.shape
    data = np.ascontiguousarray(values, dtype=dtype).tobytes()
    return tensor_pb2.TensorRef(dtype=_WIRE[dtype], rows=rows, columns=columns, inline=data)
