"""A transformers model with a real sidecar beside it computes what PEFT computes, for every adapter of the corpus."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import slotcar_client
import torch
from slotcar_client import BASE
from slotcar_client.engines.transformers import attach, model_spec
from slotcar_sidecar.rpc.convert_model import to_model

from tests.corpus.build import make, peft_outputs
from tests.corpus.models import model_of, outputs_of
from tests.corpus.variants import REWRITTEN, SUPPORTED, Variant
from tests.server import SidecarProcess
from tests.tolerances import TOLERANCES

# Position embeddings are no site of an attached model.
NOT_ATTACHED = {"token and position embeddings"}
VARIANTS = {name: each for name, each in {**SUPPORTED, **REWRITTEN}.items() if name not in NOT_ATTACHED}
MODELS = ["llama", "qwen2", "gpt2", "phi3", "mixtral", "qwen2-moe"]
FAST_MODEL = "phi3"
# Of these the plain model gives a row other bits when another row of its batch chooses other experts.
WITH_EXPERTS = {"mixtral", "qwen2-moe"}


def variants_of(model: str) -> dict[str, Variant]:
    return {name: each for name, each in VARIANTS.items() if each.recipe.model == model}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == FAST_MODEL else [pytest.mark.full]) for name in MODELS]
)
def test_logits_are_pefts(name: str, tmp_path: Path) -> None:
    model, base, root = model_of(name), tmp_path / "base", tmp_path / "adapters"
    root.mkdir()
    model.save_pretrained(base)
    spec = model_spec(model, embeddings=True, tied_head=True, experts=True)
    (base / "sites.json").write_text(json.dumps(to_model(spec).to_dict()), encoding="utf-8")
    extra = ("--base-model", str(base), "--model-spec", str(base / "sites.json"))
    plain = outputs_of(model)
    with (
        SidecarProcess(tmp_path, root, slots=2, max_rank=96, extra=extra) as sidecar,
        slotcar_client.connect(sidecar.target, timeout_seconds=60) as client,
        client.session("corpus", model_spec=spec) as session,
        attach(model, session),
    ):
        for number, (variant_name, variant) in enumerate(variants_of(name).items()):
            client.load(str(number), make(variant.recipe, root / str(number)))
            original = make(replace(variant.recipe, edit=None, shards=1), tmp_path / f"original-{number}")
            wanted = peft_outputs(original, model_of(name))
            with session.rows([str(number), BASE]):
                found = outputs_of(model)
            assert_close(found[0], wanted[0], variant_name)
            if name in WITH_EXPERTS:
                assert_close(found[1], plain[1], variant_name)
            else:
                assert torch.equal(found[1], plain[1]), variant_name


def assert_close(found: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    relative, absolute = TOLERANCES[torch.float32]
    torch.testing.assert_close(found, wanted, rtol=relative, atol=absolute, msg=lambda text: f"{name}: {text}")
