"""A model with a session attached computes what PEFT's own mixed batch computes, and base rows keep their bits."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import slotcar_client
import torch
from peft import PeftModel
from slotcar_client import BASE, Client, Mapping, Session
from slotcar_client.engines.transformers import _add, attach, model_spec
from transformers import PreTrainedModel

from tests.adapters import make_adapter, tiny_gpt2, tiny_llama, tiny_qwen2
from tests.server import SidecarProcess

# Three adapters whose sites differ: attention in part, everything, and the MLP of one layer with a rank pattern.
ADAPTERS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "sql": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
        "chat": {"r": 16, "target_modules": "all-linear"},
        "french": {
            "r": 8,
            "target_modules": ["gate_proj", "down_proj", "lm_head"],
            "layers_to_transform": [1],
            "use_rslora": True,
        },
    },
    "qwen2": {
        "sql": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
        "chat": {"r": 16, "target_modules": "all-linear"},
        "french": {"r": 8, "target_modules": ["up_proj", "o_proj"], "rank_pattern": {"o_proj": 3}},
    },
    "gpt2": {
        "sql": {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True},
        "chat": {"r": 16, "target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True},
        "french": {"r": 8, "target_modules": ["c_fc"], "fan_in_fan_out": True},
    },
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {"llama": tiny_llama, "qwen2": tiny_qwen2, "gpt2": tiny_gpt2}
BATCH = ["sql", "__base__", "chat", "french", "sql"]
ENTRIES = [BASE if name == "__base__" else name for name in BATCH]


@dataclass
class Stage:
    """A sidecar with three adapters of one kind of model, and PEFT with the same three."""

    kind: str
    client: Client
    peft: PeftModel

    def model(self) -> PreTrainedModel:
        return MODELS[self.kind]()


@pytest.fixture(scope="module", params=list(MODELS))
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    kind, root = request.param, tmp_path_factory.mktemp("adapters")
    model = MODELS[kind]()
    for seed, (name, settings) in enumerate(ADAPTERS[kind].items()):
        make_adapter(root / name, model, seed=seed, lora_alpha=16, **settings)
    adapted = PeftModel.from_pretrained(copy.deepcopy(model), str(root / "sql"), adapter_name="sql")
    for name in ("chat", "french"):
        adapted.load_adapter(str(root / name), adapter_name=name)
    with (
        SidecarProcess(tmp_path_factory.mktemp("s"), root, slots=3) as sidecar,
        slotcar_client.connect(sidecar.target, timeout_seconds=60) as client,
        client.session("shape", model_spec=model_spec(model)),
    ):
        for name in ADAPTERS[kind]:
            client.load(name, root / name)
        yield Stage(kind, client, adapted.eval())


@pytest.fixture
def session(stage: Stage) -> Iterator[Session]:
    with stage.client.session("test", model_spec=model_spec(stage.model())) as session:
        yield session


@pytest.fixture
def calls(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The sites of every Forward of the session, and ("SetMapping",) for each of those."""
    seen: list[tuple[str, ...]] = []
    forward, set_mapping = session.forward, session._set_mapping

    def count_forward(inputs: dict[str, torch.Tensor], **rest: Any) -> dict[str, torch.Tensor]:
        seen.append(tuple(inputs))
        return forward(inputs, **rest)

    def count_set_mapping(*args: Any) -> Mapping:
        seen.append(("SetMapping",))
        return set_mapping(*args)

    monkeypatch.setattr(session, "forward", count_forward)
    monkeypatch.setattr(session, "_set_mapping", count_set_mapping)
    return seen


def prompts(batch: int = len(BATCH), length: int = 6) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(3))


def logits(model: Any, ids: torch.Tensor, **rest: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=ids, **rest).logits
        return result


def generate(model: Any, ids: torch.Tensor, **rest: Any) -> torch.Tensor:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokens: torch.Tensor = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
            **rest,
        )
        return tokens


def test_logits_are_pefts_and_base_rows_keep_their_bits(stage: Stage, session: Session) -> None:
    model, ids = stage.model(), prompts()
    wanted, plain = logits(stage.peft, ids, adapter_names=BATCH), logits(model, ids)
    with attach(model, session):
        assert torch.equal(logits(model, ids), plain), "without rows it is the base model"
        with session.rows(ENTRIES):
            found = [logits(model, ids) for _ in range(2)]
        assert torch.equal(logits(model, ids), plain), "after rows it is the base model"
    for result in found:
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())
        assert torch.equal(result[1], plain[1])
        for row in (0, 2, 3, 4):
            assert not torch.allclose(result[row], plain[row], atol=1e-3)


def test_generate_gives_pefts_tokens_with_one_mapping(
    stage: Stage, session: Session, calls: list[tuple[str, ...]]
) -> None:
    model, ids = stage.model(), prompts()
    wanted = generate(stage.peft, ids, adapter_names=BATCH)
    with attach(model, session), session.rows(ENTRIES):
        found = generate(model, ids)
    assert torch.equal(found, wanted)
    assert calls.count(("SetMapping",)) == 1
    assert session.recoveries == {}


def test_inference_mode_is_the_same(stage: Stage, session: Session) -> None:
    model, ids = stage.model(), prompts()
    with torch.inference_mode(), attach(model, session), session.rows(ENTRIES):
        for _ in range(2):
            found = model(ids).logits
    wanted = logits(stage.peft, ids, adapter_names=BATCH)
    torch.testing.assert_close(found.clone(), wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


def test_a_layer_makes_one_call_per_input(stage: Stage, session: Session, calls: list[tuple[str, ...]]) -> None:
    model, ids = stage.model(), prompts(1)
    with attach(model, session), session.rows(["chat"]):
        logits(model, ids)
        first = len(calls)
        logits(model, ids)
    second = calls[first:]
    targeted = stage.client.get("chat").sites
    assert sorted(site for sites in second for site in sites) == sorted(targeted)
    if stage.kind == "gpt2":
        assert len(second) == len(targeted)
        return
    names = [tuple(site.rpartition(".")[2] for site in sites) for sites in second]
    layer = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]
    assert names == layer * 2


def test_sites_without_weights_make_no_call(stage: Stage, session: Session, calls: list[tuple[str, ...]]) -> None:
    model, ids = stage.model(), prompts(2)
    with attach(model, session), session.rows([BASE, BASE]):
        plain = logits(model, ids)
    assert calls == [("SetMapping",)]
    assert torch.equal(plain, logits(model, ids))
    with attach(model, session), session.rows(["french", BASE]):
        logits(model, ids)
    asked = {site for sites in calls[2:] for site in sites}
    assert asked == set(stage.client.get("french").sites)


def test_bfloat16_models(stage: Stage, session: Session) -> None:
    model, ids = stage.model(), prompts()
    with attach(model, session), session.rows(ENTRIES):
        wanted = logits(model, ids)
    half = stage.model().to(torch.bfloat16)
    plain = logits(half, ids)
    with attach(half, session), session.rows(ENTRIES):
        found = logits(half, ids)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=0.1, atol=0.05 * wanted.abs().max().item())
    assert torch.equal(found[1], plain[1])


def test_row_counts_serve_packed_batches(stage: Stage, session: Session) -> None:
    """Sequences of a row each in one [1, rows, hidden]: what engines that pack their batches do."""
    model = stage.model()
    name, module = next((n, m) for n, m in model.named_modules() if n in stage.client.get("sql").sites)
    site = next(s for s in model_spec(model).sites if s.name == name)
    x = torch.randn(4, site.in_features)
    plain = module(x)
    with attach(model, session):
        with session.rows([("sql", 3), (BASE, 1)]) as mapping:
            delta = session.forward({name: x}, mapping=mapping)[name]
            for shaped in (x, x.view(1, 4, -1)):
                found = module(shaped).view(4, -1)
                assert torch.equal(found[:3], plain[:3] + delta[:3])
                assert torch.equal(found[3], plain[3])
            with pytest.raises(slotcar_client.ShapeMismatch, match="5 rows"):
                module(torch.randn(5, site.in_features))
        with session.rows(["sql"]), pytest.raises(slotcar_client.ShapeMismatch, match="row counts"):
            module(x)


def test_a_batch_of_another_size_is_refused(stage: Stage, session: Session) -> None:
    model = stage.model()
    with attach(model, session), session.rows(["chat", BASE]):
        with pytest.raises(slotcar_client.ShapeMismatch, match="batch of 3, wanted 2 sequences"):
            logits(model, prompts(3))
        logits(model, prompts(2))


def test_detach_leaves_the_model_as_it_was(stage: Stage, session: Session) -> None:
    model = stage.model()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    attachment = attach(model, session)
    with session.rows(["chat"]):
        logits(model, prompts(1))
    attachment.detach()
    attachment.detach()
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    assert not any(module._forward_hooks for module in model.modules())
    attach(model, session).detach()


def test_a_forgotten_block_can_be_refused(stage: Stage, session: Session) -> None:
    model, ids = stage.model(), prompts(1)
    plain = logits(model, ids)
    with attach(model, session, require_rows=True):
        with session.rows([BASE]):
            assert torch.equal(logits(model, ids), plain)
        with pytest.raises(slotcar_client.MappingNotFound, match="outside"):
            logits(model, ids)
    assert torch.equal(logits(model, ids), plain)


def test_a_session_has_one_attached_model(stage: Stage, session: Session) -> None:
    model, other = stage.model(), stage.model()
    with attach(model, session):
        with pytest.raises(slotcar_client.RequestInvalid):
            attach(other, session)
        assert not any(module._forward_hooks for module in other.modules())


def test_attach_within_rows_takes_part_in_them(stage: Stage, session: Session) -> None:
    model, ids = stage.model(), prompts(1)
    with session.rows(["chat"]), attach(model, session):
        inside = logits(model, ids)
    with attach(model, session), session.rows(["chat"]):
        assert torch.equal(logits(model, ids), inside)
    assert not torch.equal(logits(model, ids), inside)


def test_an_unknown_adapter_is_never_the_base_model(stage: Stage, session: Session) -> None:
    with attach(stage.model(), session), pytest.raises(slotcar_client.AdapterNotFound), session.rows(["nope"]):
        raise AssertionError("the block must not run")


def test_a_site_that_the_model_lacks_is_not_dropped_in_silence(stage: Stage, session: Session) -> None:
    model = stage.model()
    layers = model.transformer.h if stage.kind == "gpt2" else model.model.layers
    del layers[1]
    with attach(model, session):
        with pytest.raises(slotcar_client.ModelMismatch, match=r"\.1\."), session.rows(["chat"]):
            raise AssertionError("the block must not run")
        with session.rows([BASE]):
            logits(model, prompts(1))


def test_a_model_of_another_shape_is_refused(stage: Stage, session: Session) -> None:
    model = stage.model()
    name = model_spec(model).sites[0].name
    model.set_submodule(name, torch.nn.Linear(8, 8))
    with pytest.raises(slotcar_client.ModelMismatch, match="8, 8"):
        attach(model, session)


def test_sites_are_the_linear_layers_but_not_a_tied_head(stage: Stage) -> None:
    model = stage.model()
    spec = model_spec(model)
    names = {site.name for site in spec.sites}
    assert ("lm_head" in names) == (stage.kind == "llama")
    shapes = {site.name: (site.in_features, site.out_features) for site in spec.sites}
    if stage.kind == "gpt2":
        assert shapes["transformer.h.0.mlp.c_fc"] == (64, 256)
    else:
        assert shapes["model.layers.0.mlp.gate_proj"] == (64, 128)
        assert shapes["model.layers.1.self_attn.k_proj"] == (64, 32)
    assert len(names) == (8 if stage.kind == "gpt2" else 14 + (stage.kind == "llama"))


def test_a_fault_in_a_pass_leaves_nothing_for_the_next(
    stage: Stage, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = stage.model(), prompts(1)
    with attach(model, session), session.rows(["chat"]):
        wanted = logits(model, ids)
        logits(model, ids)
        forward, count = session.forward, 0

        def fail(*args: Any, **rest: Any) -> dict[str, torch.Tensor]:
            nonlocal count
            count += 1
            if count == 3:
                raise slotcar_client.Unavailable("away")
            return forward(*args, **rest)

        monkeypatch.setattr(session, "forward", fail)
        with pytest.raises(slotcar_client.Unavailable):
            logits(model, ids)
        assert torch.equal(logits(model, ids), wanted)


def test_rows_without_an_adapter_keep_minus_zero() -> None:
    output = torch.tensor([[-0.0, 1.0], [-0.0, 1.0]])
    result = _add(output, torch.zeros(2, 2), [slice(1, 2)])
    assert torch.equal(torch.signbit(result), torch.tensor([[True, False], [False, False]]))
    assert torch.signbit(output[1, 0]), "the base output itself is not written"


@pytest.mark.parametrize("order", ["compile, warm up, attach", "compile, attach", "attach, compile"])
def test_a_compiled_model_has_its_adapters(stage: Stage, session: Session, order: str) -> None:
    model, ids = stage.model(), prompts()
    steps: dict[str, Callable[[], object]] = {
        "compile": lambda: model.compile(backend="eager"),
        "warm up": lambda: logits(model, ids),
        "attach": lambda: attach(model, session),
    }
    for step in order.split(", "):
        steps[step]()
    with session.rows(ENTRIES):
        found = logits(model, ids)
    wanted = logits(stage.peft, ids, adapter_names=BATCH)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


def test_a_layer_whose_weight_is_read_and_that_is_not_called_is_no_site() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.MultiheadAttention(8, 2))
    assert [site.name for site in model_spec(model).sites] == ["0"]
