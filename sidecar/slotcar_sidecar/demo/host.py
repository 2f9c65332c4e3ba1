"""The demo's host model, its adapters and its prompts: SmolLM2 with trained adapters, or a tiny model without it."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slotcar_sidecar.demo.model import smollm2_folder, tiny_llama_folder

ADAPTERS = ("capitals", "pirate", "numbered")
_TINY_RANK = 8


@dataclass(frozen=True)
class Host:
    """`folder` is the base model's, `root` has a folder for each of ADAPTERS."""

    folder: Path
    root: Path
    model: Any
    tokenizer: Any | None

    def encode(self, question: str) -> list[int]:
        """The prompt's tokens; for the tiny model, its bytes."""
        if self.tokenizer is None:
            return list(question.encode())
        chat = [{"role": "user", "content": question}]
        encoded = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text up to the end of the answer; for the tiny model, token numbers."""
        if self.tokenizer is None:
            return " ".join(map(str, tokens))
        end = self.tokenizer.eos_token_id
        answer = list(tokens[: tokens.index(end)]) if end in tokens else list(tokens)
        return " ".join(str(self.tokenizer.decode(answer, skip_special_tokens=True)).split())


def load_host(cache: Path, work: Path, *, tiny: bool) -> Host:
    """The model, converted into `cache` at first; a tiny model's adapters are made in `work`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(
        1
    )  # the sidecar computes beside it, and two OpenMP threads on a busy core wait for each other
    with contextlib.redirect_stderr(io.StringIO()):  # the progress bars of a conversion
        folder = tiny_llama_folder(cache) if tiny else smollm2_folder(cache)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    if tiny:
        root = work / "adapters"
        for seed, name in enumerate(ADAPTERS):
            _make_random_adapter(root / name, model, seed)
        return Host(folder, root, model, None)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return Host(folder, Path(__file__).with_name("adapters"), model, tokenizer)


def _make_random_adapter(folder: Path, model: torch.nn.Module, seed: int) -> None:
    """A PEFT adapter on q and v whose weights are large enough to change every answer."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "v_proj")) and isinstance(module, torch.nn.Linear):
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(_TINY_RANK, module.in_features, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(module.out_features, _TINY_RANK, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": _TINY_RANK, "lora_alpha": _TINY_RANK, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
