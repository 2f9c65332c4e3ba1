"""Two tensor-parallel ranks of a real vLLM have one session and one mapping, and repeat a step together."""

from __future__ import annotations

from pathlib import Path

import pytest
import slotcar_client

from tests.server import SidecarProcess
from tests.vllm.conftest import Models, StartEngine
from tests.vllm.stage import ADAPTERS, PROMPTS, peft_tokens

DECODED = 12
SCHEDULER = "slotcar_client.engines.vllm.scheduler.SlotcarAsyncScheduler"


@pytest.mark.full
def test_two_ranks_compute_what_peft_does_also_after_a_restart(
    models: Models, slotcar_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models["llama"]
    names = [None, *ADAPTERS]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    sidecar = SidecarProcess(tmp_path, folder / "adapters", slots=4).start()
    with (
        slotcar_engine(folder, sidecar, tensor_parallel_size=2, max_loras=4, scheduler_cls=SCHEDULER) as engine,
        slotcar_client.connect(sidecar.target, timeout_seconds=60) as client,
    ):
        versions = [
            name and f"{name}@{client.load(name, folder / 'adapters' / name, tier='host').digest}" for name in names
        ]
        requests = [engine.add(prompt, version, DECODED) for prompt, version in zip(PROMPTS, versions, strict=True)]
        engine.step_until(lambda: all(len(engine.tokens[request]) >= 3 for request in requests))
        [session] = client.sessions()
        assert (session.ranks, session.joined) == (2, (1,)), "rank 0 opens the session, which the others join"
        sidecar.kill()
        with sidecar.again():
            engine.finish()
        for request, name, prompt in zip(requests, names, PROMPTS, strict=True):
            assert engine.tokens[request] == peft_tokens("llama", folder, name, prompt, DECODED), name
