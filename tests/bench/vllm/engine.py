"""One vLLM engine in a process of its own, which decodes when it is told: `python -m tests.bench.vllm.engine SETTINGS`.

SETTINGS is an `Engine` as JSON. A line on standard input asks for one turn: so many decode steps of a full batch, whose
prompts were computed before the clock starts. The answer is one line, a `Turn`. At the end of the input it is done.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import IO, Any

from tests.bench.sides import cpu_nanoseconds

__all__ = ["LINEAR", "Engine", "Turn"]


LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What the adapters are on. Without being told, vLLM computes deltas of zero for the head too, which costs much."""


@dataclass(frozen=True)
class Engine:
    """What is decoded: `rows` sequences over these adapters, name to PEFT folder, in turn; none is the base model.

    `sidecar` is the process that computes for it too; `cache_bytes` is the room for keys and values. One that `settles`
    gives the system back, after a turn, what its allocator keeps for later: what is left is in use.
    """

    model: str
    adapters: dict[str, str]
    rank: int
    rows: int
    prompt_tokens: int
    cache_bytes: int
    sidecar: int | None = None
    settles: bool = False


@dataclass(frozen=True)
class Turn:
    """What each step took and the CPU time of all, in nanoseconds, and the tokens that each row got in the turn."""

    took: list[int]
    cpu: int
    tokens: list[list[int]]


class Decoding:
    """A vLLM engine and the requests that it gets again and again, under new ids."""

    def __init__(self, settings: Engine) -> None:
        from vllm import LLM

        count = len(settings.adapters)
        lora = {
            "enable_lora": True,
            "max_loras": count,
            "max_cpu_loras": count,
            "max_lora_rank": settings.rank,
            "lora_target_modules": list(LINEAR),
        }
        self._settings = settings
        self._processes = [os.getpid(), *([settings.sidecar] if settings.sidecar else [])]
        self._turns = 0
        self._engine: Any = LLM(
            model=settings.model,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=512,
            max_num_seqs=settings.rows,
            kv_cache_memory_bytes=settings.cache_bytes,
            disable_log_stats=True,
            **(lora if count else {}),
        ).llm_engine

    def turn(self, steps: int) -> Turn:
        """`steps` steps, each with a token for every row. The prompts, and the first token, are before them."""
        self._add_requests(steps + 1)
        tokens: dict[str, list[int]] = {}
        while len(tokens) < self._settings.rows:
            tokens |= self._step()
        took, clock = [], time.perf_counter_ns
        cpu = cpu_nanoseconds(*self._processes)
        for _ in range(steps):
            start = clock()
            latest = self._step()
            took.append(clock() - start)
            assert len(latest) == self._settings.rows, "a step without a token for each row is another step"
            tokens |= latest
        cpu = cpu_nanoseconds(*self._processes) - cpu
        assert not self._engine.has_unfinished_requests()
        if self._settings.settles:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
        return Turn(took, cpu, [tokens[request] for request in sorted(tokens)])

    def _step(self) -> dict[str, list[int]]:
        """One step; all tokens so far of the requests that have a new one."""
        return {output.request_id: list(output.outputs[0].token_ids) for output in self._engine.step()}

    def _add_requests(self, tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.lora.request import LoRARequest

        self._turns += 1
        greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        adapters = [
            LoRARequest(name, number, path) for number, (name, path) in enumerate(self._settings.adapters.items(), 1)
        ]
        for row in range(self._settings.rows):
            prompt = [100 + (37 * row + 11 * place) % 9000 for place in range(self._settings.prompt_tokens)]
            adapter = adapters[row % len(adapters)] if adapters else None
            self._engine.add_request(
                f"{self._turns}-{row:04}", TokensPrompt(prompt_token_ids=prompt), greedy, lora_request=adapter
            )


def answers(decoding: Decoding, requests: IO[str]) -> Iterator[Turn]:
    """A turn for each line, which says how many steps it has."""
    for line in requests:
        yield decoding.turn(int(line))


def main() -> None:
    # What vLLM prints goes elsewhere: this process's standard output is for answers alone.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        decoding = Decoding(Engine(**json.loads(sys.argv[1])))
        print("ready", file=out, flush=True)
        for turn in answers(decoding, sys.stdin):
            print(json.dumps(asdict(turn)), file=out, flush=True)


if __name__ == "__main__":
    main()
