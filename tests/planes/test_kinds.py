"""Sites of every kind on every plane, for each rank: what the client gives is what the adapters' files say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import slotcar_client
import torch
from slotcar.shm import region
from slotcar_client import BASE, Client, Session, errors
from slotcar_client.effects import ForwardCall
from slotcar_client.session import RankSession
from slotcar_client.transports import shapes

from tests.planes import kinds
from tests.planes.kinds import EXPERTS, HIDDEN, INNER, TOKENS
from tests.planes.stub import PLANES
from tests.server import SidecarProcess

ENTRIES = ["packed", BASE, "biased", "whole"]
COUNTS = (2, 1, 3, 2)
ROWS = sum(COUNTS)

Tensors = dict[str, dict[str, torch.Tensor]]
Served = tuple[Client, dict[str, str], Tensors]


@dataclass
class Stage:
    """Two ranks of a session, over one plane; `refs` are the adapters by digest, `tensors` those of their files."""

    client: Client
    ranks: tuple[Session, RankSession]
    refs: dict[str, str]
    tensors: Tensors

    def map(self, *names: object) -> None:
        entries = [name if name is BASE else self.refs[str(name)] for name in names]
        for session in self.ranks:
            session.set_mapping(entries)

    def rows_of(self, names: Sequence[object], counts: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """For each row the tensors of its adapter, none for BASE."""
        pairs = zip(names, counts, strict=True)
        return [{} if name is BASE else self.tensors[str(name)] for name, count in pairs for _ in range(count)]


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("adapters")
    tensors = kinds.write_adapters(root)
    with (
        SidecarProcess(
            tmp_path_factory.mktemp("s"), root, slots=6, extra=("--planes", "stream,ring,direct")
        ) as sidecar,
        slotcar_client.connect(sidecar.target, timeout_seconds=60) as client,
        client.session("shape", model_spec=kinds.model()),
    ):
        refs = {name: f"{name}@{client.load(name, root / name).digest}" for name in tensors}
        yield client, refs, tensors


@pytest.fixture(params=PLANES)
def stage(request: pytest.FixtureRequest, served: Served) -> Iterator[Stage]:
    client, refs, tensors = served
    with (
        client.session("engine", model_spec=kinds.model(), ranks=2, transport=request.param) as first,
        client.join(first.session_id, 1, transport=request.param) as second,
    ):
        assert (first.transport, second.transport) == (request.param, request.param)
        yield Stage(client, (first, second), refs, tensors)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()) + 1e-6)


def test_packed_parts_of_each_rank(stage: Stage) -> None:
    """Missing parts are zero; a part with copies is whole in both ranks."""
    stage.map(*ENTRIES)
    x, rows = random(1, ROWS, HIDDEN), stage.rows_of(ENTRIES, COUNTS)
    parts = [kinds.packed_delta(tensors, row[None]) for tensors, row in zip(rows, x, strict=True)]
    whole = [torch.cat([of_row[part] for of_row in parts]) for part in range(3)]
    for rank, session in enumerate(stage.ranks):
        close(session.forward({"attn.qkv": x}, COUNTS)["attn.qkv"], kinds.of_rank(whole, rank))


def test_the_ranks_outputs_of_a_row_shard_sum_up_to_the_delta_with_one_bias(stage: Stage) -> None:
    stage.map(*ENTRIES)
    x, rows = random(2, ROWS, HIDDEN), stage.rows_of(ENTRIES, COUNTS)
    wanted = torch.cat([kinds.linear_delta(t, "attn.o", row[None], HIDDEN) for t, row in zip(rows, x, strict=True)])
    halves = [x[:, : HIDDEN // 2].contiguous(), x[:, HIDDEN // 2 :]]
    found = [s.forward({"attn.o": half}, COUNTS)["attn.o"] for s, half in zip(stage.ranks, halves, strict=True)]
    close(found[0] + found[1], wanted)
    assert not (found[0] + found[1])[2].any(), "the row of the base model"


def test_base_is_added_and_its_bits_kept_for_the_base_model(stage: Stage) -> None:
    stage.map(*ENTRIES)
    x, base, rows = random(3, ROWS, HIDDEN), random(4, ROWS, 40), stage.rows_of(ENTRIES, COUNTS)
    base[2, 0] = -0.0
    parts = [kinds.packed_delta(tensors, row[None]) for tensors, row in zip(rows, x, strict=True)]
    delta = kinds.of_rank([torch.cat([of_row[part] for of_row in parts]) for part in range(3)], 1)
    found = stage.ranks[1].forward({"attn.qkv": x}, COUNTS, {"attn.qkv": base})["attn.qkv"]
    close(found, base.double() + delta)
    assert torch.equal(found[2].view(torch.int32), base[2].view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_embedding_has_ids(stage: Stage, dtype: torch.dtype) -> None:
    stage.map("tokens", BASE, "packed")
    ids = torch.tensor([0, TOKENS - 1, 7, 3, 3], dtype=dtype)
    found = stage.ranks[0].forward({}, (2, 1, 2), aux={"embed": ids})["embed"]
    close(found[:2], kinds.token_delta(stage.tensors["tokens"], ids[:2]))
    assert not found[2:].any()
    base = random(5, 5, HIDDEN).half()
    added = stage.ranks[1].forward({}, (2, 1, 2), {"embed": base}, aux={"embed": ids})["embed"]
    assert added.dtype == torch.float16
    torch.testing.assert_close(added.float(), base.float() + found, rtol=2e-3, atol=2e-3)
    assert torch.equal(added[2:], base[2:])


def test_experts_of_each_row(stage: Stage) -> None:
    stage.map("experts", BASE, "old")
    experts = torch.tensor([0, 2, 1, 1, 2, 0, 1])
    counts = (3, 1, 3)
    x, inner = random(6, 7, HIDDEN), random(7, 7, INNER)
    sites = {"moe.experts.gate_up_proj": x, "moe.experts.down_proj": inner}
    found = stage.ranks[0].forward(sites, counts, aux=dict.fromkeys(sites, experts))
    tensors = stage.tensors["experts"]
    close(found["moe.experts.gate_up_proj"][:3], kinds.expert_delta(tensors, x[:3], experts[:3], down=False))
    close(found["moe.experts.down_proj"][:3], kinds.expert_delta(tensors, inner[:3], experts[:3], down=True))
    assert not found["moe.experts.down_proj"][3:].any()
    assert not found["moe.experts.gate_up_proj"][3].any()
    old = found["moe.experts.gate_up_proj"][4:]
    assert not old[:, :INNER].any(), "it has nothing for w1"
    for row, expert in enumerate(experts[4:].tolist()):
        wanted = kinds.linear_delta(stage.tensors["old"], f"old.experts.{expert}.w3", x[4 + row : 5 + row], INNER)
        close(old[row : row + 1, INNER:], wanted)


def test_kinds_in_one_call(stage: Stage) -> None:
    stage.map("packed", "tokens", "experts")
    x, numbers = random(8, 3, HIDDEN), torch.tensor([1, 2, 0])
    found = stage.ranks[0].forward(
        {"plain": x, "attn.qkv": x, "moe.experts.gate_up_proj": x},
        (1, 1, 1),
        aux={"embed": numbers, "moe.experts.gate_up_proj": numbers},
    )
    assert list(found) == ["plain", "attn.qkv", "moe.experts.gate_up_proj", "embed"]
    close(found["plain"][:1], kinds.linear_delta(stage.tensors["packed"], "plain", x[:1], INNER))
    close(found["embed"][1:2], kinds.token_delta(stage.tensors["tokens"], numbers[1:2]))
    close(
        found["moe.experts.gate_up_proj"][2:],
        kinds.expert_delta(stage.tensors["experts"], x[2:], numbers[2:], down=False),
    )


def test_no_rows_of_any_kind(stage: Stage) -> None:
    stage.map("packed")
    none = torch.empty(0, dtype=torch.int64)
    found = stage.ranks[0].forward(
        {"attn.qkv": torch.empty(0, HIDDEN), "moe.experts.down_proj": torch.empty(0, INNER)},
        (0,),
        aux={"embed": none, "moe.experts.down_proj": none},
    )
    assert {site: tuple(out.shape) for site, out in found.items()} == {
        "attn.qkv": (0, 40),
        "moe.experts.down_proj": (0, HIDDEN),
        "embed": (0, HIDDEN),
    }


X = torch.ones(2, HIDDEN)
IDS = torch.tensor([0, 1])
REFUSED = {
    "an id above": ({}, {"embed": torch.tensor([0, TOKENS])}, errors.RequestInvalid, "aux of embed"),
    "an id below": ({}, {"embed": torch.tensor([-1, 0])}, errors.RequestInvalid, "aux of embed"),
    "an id above 32 bits": ({}, {"embed": torch.tensor([0, 1 << 32])}, errors.RequestInvalid, "aux of embed"),
    "ids as floats": ({}, {"embed": torch.tensor([0.0, 1.0])}, errors.ShapeMismatch, "aux of embed"),
    "ids as bytes": ({}, {"embed": IDS.to(torch.uint8)}, errors.ShapeMismatch, "aux of embed"),
    "too few ids": ({}, {"embed": IDS[:1]}, errors.ShapeMismatch, "aux of embed"),
    "ids in columns": ({}, {"embed": IDS[None]}, errors.ShapeMismatch, "aux of embed"),
    "an expert that there is not": (
        {"moe.experts.gate_up_proj": X},
        {"moe.experts.gate_up_proj": torch.tensor([0, EXPERTS])},
        errors.RequestInvalid,
        "aux of moe.experts.gate_up_proj",
    ),
    "experts without x": (
        {},
        {"moe.experts.gate_up_proj": IDS},
        errors.RequestInvalid,
        "x of moe.experts.gate_up_proj",
    ),
    "an embedding with x": ({"embed": X}, {"embed": IDS}, errors.RequestInvalid, "x of embed"),
    "experts without aux": (
        {"moe.experts.gate_up_proj": X, "plain": X},
        {"plain": torch.ones(2, INNER)},
        errors.RequestInvalid,
        "aux of moe.experts.gate_up_proj",
    ),
    "a base output of another width": (
        {"plain": X},
        {"plain": torch.ones(2, INNER + 1)},
        errors.ShapeMismatch,
        "aux of plain",
    ),
    "a base output of another dtype": (
        {"plain": X},
        {"plain": torch.ones(2, INNER).half()},
        errors.ShapeMismatch,
        "aux of plain",
    ),
    "ids for a linear site": ({"plain": X}, {"plain": IDS}, errors.ShapeMismatch, "aux of plain"),
    "a site that there is not": ({}, {"other": IDS}, errors.SiteUnknown, ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_it_is_sent(stage: Stage, name: str) -> None:
    inputs, aux, kind, field = REFUSED[name]
    stage.map("packed")
    with pytest.raises(kind) as refused:
        stage.ranks[0].forward(inputs, (2,), aux=aux)
    assert getattr(refused.value, "field", "") == field or refused.value.metadata.get("field", "") == field
    assert stage.ranks[0].forward({"plain": X}, (2,))["plain"].any(), "the session goes on"


@pytest.mark.parametrize("site", ["embed", "moe.experts.gate_up_proj"])
def test_an_aux_that_is_missing_is_refused(stage: Stage, site: str) -> None:
    """Here the server may be who says so."""
    stage.map("packed")
    with pytest.raises(errors.RequestInvalid):
        stage.ranks[0].forward({site: X}, (2,))


def spoil_aux(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[shapes.Place], None]) -> None:
    """Changes what is in the arena behind the client's back, as a client may that means no good."""
    fill = shapes.Place.fill

    def filled(place: shapes.Place, call: ForwardCall) -> shapes.Devices:
        devices = fill(place, call)
        spoil(place)
        return devices

    monkeypatch.setattr(shapes.Place, "fill", filled)


@pytest.mark.parametrize("stage", ["ring"], indirect=True)
@pytest.mark.parametrize("number", [-1, EXPERTS, TOKENS, -(1 << 31), (1 << 31) - 1])
def test_indices_in_a_shared_arena_are_checked_where_they_are_read(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The call is prepared by then, and was right before."""
    stage.map("tokens", "experts")
    x, ids = random(9, 2, INNER), torch.tensor([1, 2])
    sound = {"inputs": {"moe.experts.down_proj": x}, "aux": {"moe.experts.down_proj": ids, "embed": ids}}
    session = stage.ranks[0]
    before = session.forward(**sound, row_counts=(1, 1))
    with monkeypatch.context() as patch:
        spoil_aux(patch, lambda place: [aux.tensor.fill_(number) for aux in place.auxs].clear())
        with pytest.raises(errors.RequestInvalid) as refused:
            session.forward(**sound, row_counts=(1, 1))
    assert "aux" in str(refused.value)
    after = session.forward(**sound, row_counts=(1, 1))
    assert all(torch.equal(before[site], after[site]) for site in before)


ABSENT = region.ABSENT
SPOILT: dict[str, Callable[[region.Item], region.Item]] = {
    "nothing": lambda item: item._replace(aux=0, aux_offset=ABSENT),
    "nothing, at a place": lambda item: item._replace(aux=0),
    "something, at no place": lambda item: item._replace(aux_offset=ABSENT),
    "the base's output": lambda item: item._replace(aux=2),
    "an unknown kind": lambda item: item._replace(aux=3),
    "out of line": lambda item: item._replace(aux_offset=item.aux_offset + 4),
    "behind the arena": lambda item: item._replace(aux_offset=(1 << 64) - 64),
    "an x at an embedding": lambda item: item._replace(x_offset=0),
}


@pytest.mark.parametrize("stage", ["ring"], indirect=True)
@pytest.mark.parametrize("name", SPOILT)
def test_an_item_whose_aux_is_not_sound_is_refused_by_the_server(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    stage.map("tokens")
    session, ids = stage.ranks[0], torch.tensor([1, 2])
    with monkeypatch.context() as patch:
        at = region.Item.at
        patch.setattr(region.Item, "at", lambda item, start: SPOILT[name](at(item, start)))
        with pytest.raises((errors.RequestInvalid, errors.ShapeMismatch)):
            session.forward({}, (2,), aux={"embed": ids})
    session.set_mapping([stage.refs["tokens"]])
    close(session.forward({}, (2,), aux={"embed": ids})["embed"], kinds.token_delta(stage.tensors["tokens"], ids))
