"""Tiny models with adapters, and real vLLM engines on the CPU, in this process.

vLLM's attention on CPUs needs heads of 32, so the models are not those of the other suites.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from slotcar_client.engines.vllm.requests import version_request
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest

from tests.adapters import make_adapter

WORKER = "slotcar_client.engines.vllm.worker.SlotcarCPUWorker"
_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}

# One sees the attention in part, one everything but the embedding, the last ones the MLP of one layer, and both ends.
ADAPTERS: dict[str, dict[str, Any]] = {
    "sql": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "chat": {"r": 16, "target_modules": "all-linear"},
    "french": {"r": 8, "target_modules": ["gate_proj", "down_proj"], "layers_to_transform": [1], "use_rslora": True},
    "ends": {"r": 4, "target_modules": ["embed_tokens", "lm_head"]},
}
PROMPTS = [[7, 3, 11, 200, 5], [250, 1, 99], [42] * 9, [13, 14, 15, 16], [180, 20, 33, 8, 8, 8]]


def llama() -> LlamaForCausalLM:
    """Whose head is its own."""
    return _seeded(LlamaForCausalLM, LlamaConfig(**_SHAPE, tie_word_embeddings=False))


def qwen2() -> Qwen2ForCausalLM:
    """With biases on q, k and v that are not zero, and a head that is tied to the embedding."""
    model = _seeded(Qwen2ForCausalLM, Qwen2Config(**_SHAPE, tie_word_embeddings=True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.linspace(-0.1, 0.1, len(parameter)))
    return model


MODELS: dict[str, Callable[[], PreTrainedModel]] = {"llama": llama, "qwen2": qwen2}


def _seeded(model: type[Any], config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model(config).eval()


def save(kind: str, folder: Path) -> Path:
    """The model under `folder`/model, and its adapters under `folder`/adapters, each with a second version."""
    model = MODELS[kind]()
    model.save_pretrained(str(folder / "model"))
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        if kind == "qwen2" and name == "ends":
            continue  # PEFT would train the one weight that both ends share
        make_adapter(folder / "adapters" / name, model, seed=seed, lora_alpha=16, **settings)
        make_adapter(folder / "adapters" / f"{name}-2", model, seed=seed + 100, lora_alpha=16, **settings)
    return folder


def peft_tokens(kind: str, folder: Path, name: str | None, prompt: Sequence[int], count: int) -> list[int]:
    """What PEFT decodes greedily after the prompt, with that adapter or none."""
    model: Any = MODELS[kind]()
    if name is not None:
        model = PeftModel.from_pretrained(model, str(folder / "adapters" / name)).eval()
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


class Engine:
    """One vLLM engine. Requests are (prompt, adapter), an adapter being a LoRARequest, `name@digest` or None."""

    def __init__(self, model: Path, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "enable_lora": True,
            "max_loras": 2,
            "max_lora_rank": 16,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 128,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 32 << 20,
            "enable_prefix_caching": False,
        }
        self.llm = LLM(str(model), **(defaults | settings))
        self._number = 0
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, Any] = {}
        """The last output of each request that ended."""

    @property
    def runner(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def generate(self, requests: Sequence[tuple[Sequence[int], Any]], count: int = 8) -> list[list[int]]:
        """The tokens of each request, all in one batch."""
        names = [self.add(prompt, adapter, count) for prompt, adapter in requests]
        self.finish()
        return [self.tokens[name] for name in names]

    def logprobs(self, requests: Sequence[tuple[Sequence[int], Any]], count: int = 4) -> list[list[dict[int, float]]]:
        """{token: logprob} of the best tokens, for each token of each request."""
        names = [self.add(prompt, adapter, count, logprobs=20) for prompt, adapter in requests]
        self.finish()
        return [
            [{token: found.logprob for token, found in step.items()} for step in self.ended[name].outputs[0].logprobs]
            for name in names
        ]

    def add(self, prompt: Sequence[int], adapter: Any, count: int = 8, **sampling: Any) -> str:
        """Queues a request; returns its id."""
        self._number += 1
        name = f"r{self._number}"
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, **sampling)
        lora = version_request(adapter) if isinstance(adapter, str) else adapter
        self.tokens[name] = []
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, params, lora_request=lora)
        return name

    def step(self) -> None:
        for output in self.llm.llm_engine.step():
            name = output.request_id.partition("-")[0]
            self.tokens[name] = list(output.outputs[0].token_ids)
            if output.finished:
                self.ended[name] = output

    def step_until(self, done: Callable[[], bool]) -> None:
        while not done():
            assert self.llm.llm_engine.has_unfinished_requests(), "the requests ended before"
            self.step()

    def finish(self) -> None:
        """Steps until every request has ended."""
        while self.llm.llm_engine.has_unfinished_requests():
            self.step()


@contextlib.contextmanager
def engine(model: Path, **settings: Any) -> Iterator[Engine]:
    """vLLM as it is, or with `worker_cls=WORKER` slotcar's."""
    made = Engine(model, **settings)
    try:
        yield made
    finally:
        made.llm.llm_engine.engine_core.shutdown()
        del made.llm
        gc.collect()
        cleanup_dist_env_and_memory()


def own_lora(folder: Path, name: str, number: int) -> LoRARequest:
    """For vLLM's own LoRA."""
    return LoRARequest(name, number, str(folder / "adapters" / name))
