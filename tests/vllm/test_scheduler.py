"""vLLM's schedulers with slotcar's part, against what workers say: failed and postponed requests, and fewer slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from slotcar_client.engines.vllm import scheduler as ours
from slotcar_client.engines.vllm.requests import version_request
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.adapters import tiny_llama

BLOCK = 16
BLOCKS = 64
PROMPT = list(range(2 * BLOCK + 3))
GONE = "ADAPTER_NOT_FOUND: sql is gone"
VERSIONS = {name: version_request(f"{name}@sha256:{letter * 64}") for name, letter in zip("abc", "def", strict=True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture(params=[False, True], ids=["scheduler", "async"])
def scheduler(request: pytest.FixtureRequest, folder: Path) -> Any:
    """One of both with three adapters at once, whose workers have said nothing yet."""
    return make_scheduler(folder, request.param)


def make_scheduler(folder: Path, asynchronous: bool) -> Any:
    arguments = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=256, enable_lora=True, max_loras=3
    )
    config: VllmConfig = arguments.create_engine_config()
    config.scheduler_config.async_scheduling = asynchronous
    config.cache_config.num_gpu_blocks = BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    init_none_hash(sha256)
    kind = ours.SlotcarAsyncScheduler if asynchronous else ours.SlotcarScheduler
    return kind(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )


def add(scheduler: Any, name: str, adapter: str | None, pooling: bool = False, client: int = 0) -> Request:
    """A request for one of the versions, or for the base model; all have one prompt."""
    request = Request(
        request_id=name,
        prompt_token_ids=PROMPT,
        sampling_params=None if pooling else SamplingParams(max_tokens=8, ignore_eos=True),
        pooling_params=PoolingParams(task="embed") if pooling else None,
        lora_request=VERSIONS[adapter] if adapter else None,
        client_index=client,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )
    scheduler.add_request(request)
    return request


def answer(scheduler: Any, output: SchedulerOutput, **said: Any) -> dict[int, EngineCoreOutputs]:
    """The workers computed the step, token 7 for each request, and say `slotcar_…`."""
    names = list(output.num_scheduled_tokens)
    done = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[7] for _ in names],
        pooler_output=None,
    )
    for key, value in said.items():
        setattr(done, f"slotcar_{key}", value)
    return scheduler.update_from_output(output, done)


def step(scheduler: Any, **said: Any) -> dict[str, EngineCoreOutput]:
    outputs = answer(scheduler, scheduler.schedule(), **said)
    return {output.request_id: output for found in outputs.values() for output in found.outputs}


def free_blocks(scheduler: Any) -> int:
    return scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def cached_tokens(scheduler: Any, request: Request) -> int:
    """How many tokens of the prompt the prefix cache has for it."""
    return scheduler.kv_cache_manager.get_computed_blocks(request)[1]


def test_without_a_word_of_the_workers_it_is_vllms_own(scheduler: Any) -> None:
    for name, adapter in (("1", "a"), ("2", "b"), ("3", None)):
        add(scheduler, name, adapter)
    assert {name: output.new_token_ids for name, output in step(scheduler).items()} == {"1": [7], "2": [7], "3": [7]}


def test_the_workers_learn_every_version_that_is_wanted(scheduler: Any) -> None:
    for name, adapter in (("1", "a"), ("2", None), ("3", "b"), ("4", "b")):
        add(scheduler, name, adapter)
    scheduler.lora_config.max_loras = 1
    output = scheduler.schedule()
    assert set(output.num_scheduled_tokens) == {"1", "2"}
    assert output.slotcar_versions == {VERSIONS["a"].lora_name, VERSIONS["b"].lora_name}
    answer(scheduler, output, failed={"1": GONE})
    assert scheduler.schedule().slotcar_versions == {VERSIONS["b"].lora_name}


def test_a_failed_request_ends_with_its_reason_and_without_its_token(scheduler: Any) -> None:
    free = free_blocks(scheduler)
    add(scheduler, "1", "a")
    add(scheduler, "2", "b", client=3)
    outputs = answer(scheduler, scheduler.schedule(), failed={"2": GONE})
    (good,), (failed,) = outputs[0].outputs, outputs[3].outputs
    assert (good.request_id, good.new_token_ids, good.finish_reason) == ("1", [7], None)
    assert (failed.request_id, failed.new_token_ids, failed.finish_reason) == ("2", [], FinishReason.ERROR)
    assert failed.stop_reason == f"slotcar {GONE}"
    assert list(scheduler.requests) == ["1"]
    assert step(scheduler)["1"].new_token_ids == [7]
    scheduler.finish_requests("1", RequestStatus.FINISHED_ABORTED)
    assert free_blocks(scheduler) == free


def test_later_tokens_of_a_failed_request_are_dropped_too(scheduler: Any) -> None:
    add(scheduler, "1", "a")
    step(scheduler)
    assert step(scheduler, failed={"1": GONE})["1"].new_token_ids == []
    assert step(scheduler) == {}


def test_the_kv_of_a_failed_request_is_never_found_again(scheduler: Any) -> None:
    add(scheduler, "1", "a")
    step(scheduler, failed={"1": GONE})
    assert cached_tokens(scheduler, add(scheduler, "2", "a")) == 0


def test_the_kv_of_a_good_request_is_found_by_its_version_alone(scheduler: Any) -> None:
    add(scheduler, "1", "a")
    step(scheduler)
    assert cached_tokens(scheduler, add(scheduler, "2", "a")) == 2 * BLOCK
    assert cached_tokens(scheduler, add(scheduler, "3", "b")) == 0
    assert cached_tokens(scheduler, add(scheduler, "4", None)) == 0


def test_who_shares_blocks_with_a_failed_request_fails_with_it(folder: Path) -> None:
    """With a step under way, the next one finds the blocks of a request before they are computed."""
    scheduler = make_scheduler(folder, asynchronous=True)
    add(scheduler, "1", "a")
    first = scheduler.schedule()
    add(scheduler, "2", "a")
    add(scheduler, "3", "b")
    second = scheduler.schedule()
    failed = answer(scheduler, first, failed={"1": GONE})[0].outputs
    assert {output.request_id for output in failed} == {"1", "2"}
    assert {output.stop_reason for output in failed} == {f"slotcar {GONE}"}
    assert [output.request_id for output in answer(scheduler, second)[0].outputs] == ["3"]


def test_a_request_that_ended_meanwhile_cannot_fail(scheduler: Any) -> None:
    add(scheduler, "1", "a")
    output = scheduler.schedule()
    scheduler.finish_requests("1", RequestStatus.FINISHED_ABORTED)
    assert not any(found.outputs for found in answer(scheduler, output, failed={"1": GONE}).values())


def test_a_failed_pooling_request_has_an_output_of_its_kind(scheduler: Any) -> None:
    add(scheduler, "1", "a", pooling=True)
    output = step(scheduler, failed={"1": GONE})["1"]
    assert output.pooling_output is not None
    assert output.finish_reason == FinishReason.ERROR


def test_a_postponed_request_computes_its_step_again(scheduler: Any) -> None:
    add(scheduler, "1", "a")
    request = add(scheduler, "2", "b")
    assert set(step(scheduler, postponed=frozenset("2"))) == {"1"}
    assert (request.status, request.output_token_ids[:]) == (RequestStatus.PREEMPTED, [])
    assert cached_tokens(scheduler, request) == 0
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"1": 1, "2": len(PROMPT)}
    answer(scheduler, output)
    assert request.output_token_ids[:] == [7]


def test_a_postponed_decode_goes_on_where_it_was(scheduler: Any) -> None:
    request = add(scheduler, "1", "a")
    step(scheduler)
    assert step(scheduler, postponed=frozenset("1")) == {}
    assert request.output_token_ids[:] == [7]
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"1": len(PROMPT) + 1}
    assert output.scheduled_cached_reqs.all_token_ids == {"1": [*PROMPT, 7]}
    answer(scheduler, output)
    assert request.output_token_ids[:] == [7, 7]


def test_a_step_has_no_more_adapters_than_slots(scheduler: Any) -> None:
    for name, adapter in (("1", "a"), ("2", "b"), ("3", "c"), ("4", "b"), ("5", None)):
        add(scheduler, name, adapter)
    output = scheduler.schedule()
    assert set(output.num_scheduled_tokens) == set("12345")
    answer(scheduler, output, slots=2)
    output = scheduler.schedule()
    assert set(output.num_scheduled_tokens) == set("1245")
    assert scheduler.requests["3"].status == RequestStatus.PREEMPTED
    answer(scheduler, output, slots=3)
    assert "3" in scheduler.schedule().num_scheduled_tokens


@pytest.mark.parametrize(("slots", "limit"), [(0, 1), (-1, 1), (1, 1), (2, 2), (9, 3)])
def test_the_limit_is_between_one_and_what_is_configured(scheduler: Any, slots: int, limit: int) -> None:
    add(scheduler, "0", None)
    step(scheduler, slots=slots)
    for name, adapter in (("1", "a"), ("2", "b"), ("3", "c")):
        add(scheduler, name, adapter)
    assert len(scheduler.schedule().num_scheduled_tokens) == 1 + limit


def test_every_request_ends_while_slots_come_and_go(scheduler: Any) -> None:
    requests = [add(scheduler, str(number), "abc"[number % 3]) for number in range(9)]
    for number in range(200):
        if not scheduler.has_unfinished_requests():
            break
        step(scheduler, slots=number % 4)
    assert [len(request.output_token_ids) for request in requests] == [8] * 9
