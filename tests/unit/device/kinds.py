"""A model with sites of every kind, adapters for it as files have them, and the truth of each row in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from slotcar_kernels.buffers import buffer_from_tensor, tensor_from_buffer
from slotcar_sidecar.core.adapter import SiteLora
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.model import ModelSpec, Site, SitePart
from slotcar_sidecar.core.tensor import Matrix

from tests.fakes.weights import FakeWeights, weights_of_parts

TOKENS, WIDTH, HEADS, INNER, EXPERTS = 13, 24, 16, 40, 3
QKV = tuple(SitePart(f"layer.{name}_proj", out) for name, out in (("q", HEADS), ("k", 8), ("v", 8)))


def sites(copies: int = 1) -> list[Site]:
    """All kinds; `copies` ranks share each key and value head."""
    qkv = (QKV[0], *(SitePart(part.name, part.out_features, copies) for part in QKV[1:]))
    gate_up = (SitePart("layer.experts.*.gate_proj", INNER), SitePart("layer.experts.*.up_proj", INNER))
    return [
        Site("embed", TOKENS, WIDTH, "embedding"),
        Site("layer.down_proj", INNER, WIDTH, shard="row"),
        Site("layer.experts.down_proj", INNER, WIDTH, "experts", (), EXPERTS, "row"),
        Site("layer.experts.gate_up_proj", WIDTH, 2 * INNER, "experts", gate_up, EXPERTS, "column"),
        Site("layer.qkv_proj", WIDTH, HEADS + 16, "linear", qkv, 0, "column"),
        Site("lm_head", WIDTH, TOKENS),
    ]


MODEL = ModelSpec.of(sites())


def lora(site: str, rank: int, shape: tuple[int, int], **rest: object) -> SiteLora:
    return SiteLora(site, rank, 0.5 + rank, *shape, **rest)  # type: ignore[arg-type]


PLAIN = weights_of_parts([lora("layer.k_proj", 3, (WIDTH, 8)), lora("lm_head", 17, (WIDTH, TOKENS))], seed=1)
FUSED = weights_of_parts(
    [
        lora("embed", 5, (TOKENS, WIDTH), kind="embedding"),
        lora("layer.experts.down_proj", 4, (INNER, WIDTH), kind="experts", experts=EXPERTS),
        lora("layer.experts.gate_up_proj", 2, (WIDTH, 2 * INNER), kind="experts", experts=EXPERTS),
        lora("layer.qkv_proj", 6, (WIDTH, HEADS + 16), has_gain=True, has_bias=True),
    ],
    seed=2,
)
APART = weights_of_parts(
    [
        lora("layer.down_proj", 18, (INNER, WIDTH), has_gain=True, has_bias=True),
        lora("layer.experts.0.up_proj", 3, (WIDTH, INNER)),
        lora("layer.experts.2.gate_proj", 7, (WIDTH, INNER)),
        lora("layer.experts.2.up_proj", 1, (WIDTH, INNER)),
        lora("layer.q_proj", 9, (WIDTH, HEADS), has_bias=True),
        lora("layer.v_proj", 2, (WIDTH, 8), has_gain=True),
        lora("lm_head", 4, (WIDTH, TOKENS)),
    ],
    seed=3,
)
A, B, C = SlotId(0), SlotId(1), SlotId(2)
SLOTS = {A: PLAIN, B: FUSED, C: APART}
ENTRIES: tuple[tuple[SlotId | None, int], ...] = ((C, 2), (None, 1), (B, 3), (A, 1), (C, 3), (B, 2))
OWNERS = tuple(None if slot is None else SLOTS[slot] for slot, count in ENTRIES for _ in range(count))
ROWS = len(OWNERS)


def to_matrix(tensor: torch.Tensor) -> Matrix:
    if tensor.dtype == torch.int32:
        return Matrix("int32", len(tensor), 1, 1, tensor.numpy().tobytes())
    dtype, rows, columns, data = buffer_from_tensor(tensor)
    return Matrix(dtype, rows, columns, columns, data)


def to_tensor(matrix: Matrix) -> torch.Tensor:
    return tensor_from_buffer(matrix.dtype, matrix.rows, matrix.columns, matrix.row_stride, matrix.data)


@dataclass(frozen=True)
class Given:
    """The tensors of one site, of all ranks together."""

    site: Site
    x: torch.Tensor | None
    aux: torch.Tensor | None
    y: torch.Tensor

    @classmethod
    def at(cls, site: Site, dtype: torch.dtype = torch.float32) -> Given:
        generator = torch.Generator().manual_seed(len(site.name))
        x = None if site.kind == "embedding" else torch.randn(ROWS, site.in_features, generator=generator).to(dtype)
        count = {"embedding": TOKENS, "experts": EXPERTS}.get(site.kind)
        aux = None
        if count is not None:
            aux = torch.randint(count, (ROWS, 1), generator=generator, dtype=torch.int32)
        return cls(site, x, aux, torch.randn(ROWS, site.out_features, generator=generator).to(dtype))

    def item(self, *, adds: bool, rank: int = 0, ranks: int = 1) -> ForwardItem:
        """For a rank: its part of x, its part of y as it computes it."""
        x, y = self.x, self.y_of(rank, ranks)
        if x is not None and self.site.shard == "row":
            x = x.chunk(ranks, 1)[rank].contiguous()
        aux = self.aux if self.aux is not None else None if adds else y
        return ForwardItem(
            self.site.name,
            None if x is None else to_matrix(x),
            to_matrix(y) if adds else None,
            aux=None if aux is None else to_matrix(aux),
            out_dtype="float32" if x is None and not adds else None,
        )

    def y_of(self, rank: int, ranks: int) -> torch.Tensor:
        """The base's output on a rank; the ranks of a row-sharded site have summands of it, here with equal shares."""
        if self.site.shard == "row":
            return self.y / ranks
        if self.site.shard == "column":
            return columns_of(self.site, self.y, rank, ranks)
        return self.y


def columns_of(site: Site, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What a rank has of a site's outputs: of each part the shard that it shares with its neighbours."""
    pieces = whole.split([part.out_features for part in site.modules], 1)
    shards = [
        piece.chunk(ranks // part.copies, 1)[rank // part.copies]
        for piece, part in zip(pieces, site.modules, strict=True)
    ]
    return torch.cat(shards, 1).contiguous()


def deltas(given: Given, owners: Sequence[FakeWeights | None] = OWNERS) -> torch.Tensor:
    """float64 [rows, out]: each row by its own adapter, module by module, from the tensors of the file alone."""
    out = torch.zeros(len(owners), given.site.out_features, dtype=torch.float64)
    for row, weights in enumerate(owners):
        for part in weights.adapter.parts if weights is not None else ():
            assert weights is not None
            start = _start(given.site, part.site, given.aux[row] if given.aux is not None else None)
            if start is not None:
                columns = slice(start, start + part.out_features)
                out[row, columns] += _delta(weights, part, given, row, columns)
    return out


def _start(site: Site, module: str, aux: torch.Tensor | None) -> int | None:
    """Where the module's outputs begin; None where it is elsewhere in the model, or another expert than the row's."""
    if module == site.name:
        return 0
    start = 0
    for part in site.parts:
        if module == (part.name if aux is None else part.name.replace("*", str(int(aux)))):
            return start
        start += part.out_features
    return None


def _delta(weights: FakeWeights, part: SiteLora, given: Given, row: int, columns: slice) -> torch.Tensor:
    a, b = weights.a[part.site].double(), weights.b[part.site].double()
    if part.kind == "experts":
        assert given.aux is not None
        expert = int(given.aux[row])
        a = a.view(EXPERTS, part.rank, part.in_features)[expert]
        b = b.view(part.out_features, part.rank, EXPERTS)[..., expert]
    if part.kind == "embedding":
        assert given.aux is not None
        inner = a[:, int(given.aux[row])]
    else:
        assert given.x is not None
        inner = a @ given.x[row].double()
    delta = part.scale * (b @ inner)
    vectors = weights.vectors.get(part.site)
    if vectors is not None and vectors.gain is not None:
        gain = vectors.gain.double()
        delta = (1 + gain) * delta + gain * given.y[row, columns].double()
    if vectors is not None and vectors.bias is not None:
        delta = delta + vectors.bias.double()
    return delta
