"""The museum of faults that users of systems like this one reported in public, and where each is shown.

A row has its references, the fault in a few words, the tests that show that it cannot happen here, and, if it can only
be met in part or not yet, the capability that it comes with. Tests are named by their functions, which are in
`tests/unit/museum/`, in the module that is named by the row's heading.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = ("kernels", "sidecar", "clients")
TO_SEE_IT_FAIL = "To see it fail: "


@dataclass(frozen=True)
class Later:
    """The capability with which a fault can be met."""

    capability: str


def later(capability: str) -> Later:
    return Later(capability)


@dataclass(frozen=True)
class Fault:
    """One row: who reported what, and what of it is shown, by whom."""

    references: tuple[str, ...]
    what: str
    tests: tuple[str, ...]
    later: str


def fault(references: str, what: str, *evidence: str | Later) -> Fault:
    tests = tuple(each for each in evidence if isinstance(each, str))
    capabilities = [each.capability for each in evidence if isinstance(each, Later)]
    return Fault(tuple(references.split(", ")), what, tests, "; ".join(capabilities))


WRONG_WEIGHTS = (
    fault(
        "vllm#47724",
        "a slot changes under a mapping that does not, and another tenant's adapter is used",
        "test_a_layout_that_changes_under_an_unchanged_mapping",
    ),
    fault(
        "vllm#47725",
        "the same ids are back in the same slots with other bytes: A→C→A, or a reload in place",
        "test_the_same_ids_come_back_in_the_same_slots",
        "test_a_reload_under_one_name_leaves_a_mapping_its_bytes",
    ),
    fault(
        "sglang#7426",
        "an adapter without a module has that of the adapter that was in its slot before",
        "test_an_adapter_without_a_module_does_not_inherit_the_evicted_ones",
    ),
    fault(
        "vllm-metal#464, TGI#2505, peft#2090",
        "an adapter that is unknown or not there is served by the base model or another adapter",
        "test_an_adapter_that_is_not_there_is_neither_the_base_model_nor_another",
    ),
    fault(
        "vllm#7169",
        "two loads, from two places, under one id of the caller's choice",
        "test_two_loads_under_one_name_from_two_places",
    ),
    fault(
        "vllm#15090, sglang#28371",
        "the end of a long mapping's index is still read for the short one after it",
        "test_a_short_batch_after_a_long_one_reads_no_stale_index",
        "test_a_late_call_for_a_mapping_reads_nothing_of_the_one_after_it",
    ),
    fault(
        "vllm#42008",
        "rows of the base model change because adapters are loaded",
        "test_rows_of_the_base_model_keep_their_bits",
    ),
    fault(
        "vllm#50278",
        "split-K atomics: the same call gives other bits",
        "test_the_same_call_gives_the_same_bits",
        later("kernels for a GPU: what they sum with atomics"),
    ),
    fault(
        "vllm#51122, vllm#51121",
        "metadata of all tokens for a part of them, or of more rows than the tensor has: an illegal access",
        "test_rows_and_counts_that_disagree_are_refused",
        later("kernels for a GPU: accesses that only it can make"),
    ),
)

RESIDENCY = (
    fault(
        "vllm-metal#641",
        "the registered are counted for the resident, and the first adapter blocks all others for ever",
        "test_more_names_than_slots",
    ),
    fault(
        "vllm#14495, sglang#23141",
        "a batch with more adapters than slots ends the server, or is applied by half",
        "test_a_batch_that_needs_more_adapters_than_slots",
        "test_a_batch_that_needs_more_adapters_than_slots_is_not_loaded_by_half",
    ),
    fault(
        "vllm#54839, vllm#42207",
        "an unload forgets the name and keeps the memory",
        "test_unload_gives_the_memory_back",
        "test_the_last_to_let_go_gives_the_memory_back",
    ),
    fault(
        "sglang#36894",
        "an unload waits for ever after a request was aborted",
        "test_unload_does_not_hang_after_an_abort",
        "test_no_call_waits_for_what_was_unloaded_or_behind_what_was_aborted",
    ),
    fault(
        "sglang#31808, sglang#34205",
        "reference counters drift: negative, leaked, released twice",
        "test_pins_do_not_drift",
        "test_holds_do_not_drift",
    ),
    fault(
        "sglang#9084",
        "an unload fits between the look-up and the pin",
        "test_no_unload_fits_between_the_lookup_and_the_pin",
        "test_a_name_that_moves_during_a_load_is_looked_up_again",
        "test_no_unload_fits_between_the_lookup_and_the_hold",
    ),
    fault(
        "sglang#13349",
        "loads block compute, and N adapters in N/2 slots thrash",
        "test_a_load_does_not_block_compute",
        "test_twice_as_many_adapters_as_slots_take_turns",
    ),
    fault(
        "TensorRT-LLM#6510",
        "an adapter that was evicted cannot come back, as its source was forgotten",
        "test_an_evicted_adapter_comes_back",
        "test_an_evicted_upload_comes_back",
    ),
)

RELOAD_AND_NAMES = (
    fault(
        "vllm#42125, sglang#8263",
        "new bytes under an old name, and caches that know the name alone serve the old",
        "test_new_bytes_under_an_old_name_are_never_the_old",
        "test_new_bytes_that_are_uploaded_under_an_old_name_are_never_the_old",
    ),
    fault(
        "SkyRL#2250",
        "the scale is folded into staged weights, and once more after they were evicted",
        "test_scaling_is_applied_once_however_often_a_slot_is_filled",
    ),
    fault(
        "SkyRL#2129",
        "a reload takes the old away first, and one that fails leaves neither",
        "test_a_failed_reload_leaves_the_old",
        "test_a_reload_without_a_file_or_without_room_leaves_the_old",
    ),
    fault(
        "SkyRL#1606",
        "a flag for one reload stays, and the disk is read at every step",
        "test_the_source_is_not_read_again_at_every_step",
    ),
)

CHECKPOINTS = (
    fault("sglang#40835, mlx-vlm#845", "rsLoRA is √r too weak; alpha is taken for alpha/r", "test_scaling_is_pefts"),
    fault(
        "rank_pattern and alpha_pattern (no report)",
        "ranks and alphas by pattern are ignored",
        "test_patterns_of_ranks_and_alphas_are_obeyed",
    ),
    fault(
        "vllm#34186, vllm#55193",
        "keys with another prefix match nothing: no effect, and an OK",
        "test_keys_that_match_nothing_are_not_a_success",
    ),
    fault(
        "lorax (by reading), sglang#25913",
        "a layer that is missing takes its module type with it; q and k without v are an error of the server",
        "test_a_layer_or_a_projection_that_is_missing_takes_nothing_with_it",
        later("packed sites: q and k of a packed qkv, without v"),
    ),
    fault("vllm#51409", "one A for a packed qkv is an error of the server", later("packed sites: one A fanned out")),
    fault(
        "vllm#32599, sglang#17096",
        "the base model's head, embedding or added tokens are saved inside the adapter",
        "test_weights_of_the_base_model_inside_an_adapter_are_refused_by_name",
        later("embedding and lm_head LoRA: which of such tensors are served"),
    ),
    fault(
        "SceneWorks#1271",
        "of several safetensors in the folder one from the middle of the training is taken",
        "test_only_the_file_of_the_right_name_is_read",
    ),
    fault(
        "vllm#2847, TensorRT-LLM#2434, vllm#5036",
        "a rank above the maximum, another dtype or odd sizes end the engine and not the call",
        "test_rank_dtype_and_odd_sizes_harm_the_call_at_most",
        "test_what_does_not_fit_the_slots_takes_none",
    ),
    fault(
        "vllm#31994, sglang#24420",
        "fully sharded ranks below the maximum are interleaved with zeros; more shards than kv heads overrun",
        "test_ranks_share_a_site_evenly_or_the_model_is_refused",
    ),
)

KERNELS = (
    fault(
        "vllm#53028",
        "row × stride overflows 32 bits",
        "test_offsets_beyond_31_bits",
        later("kernels for a GPU: their own index arithmetic"),
    ),
    fault("vllm#49327", "a rank below or above a block", "test_ranks_around_a_block"),
    fault("sglang#28371 (graphs)", "a grid is baked when a graph is captured", later("CUDA graphs: captured grids")),
    fault(
        "sglang#27087",
        "padded ranks hold values of an evicted adapter",
        "test_padded_ranks_hold_nothing_of_the_evicted_adapter",
    ),
    fault("sglang#7785", "rank 0 or an empty segment divides by zero", "test_empty_segments_and_rank_0"),
    fault("vllm#36187", "an input that is not contiguous", "test_rows_that_are_not_next_to_each_other"),
)

LIFE_AND_DEATH = (
    fault(
        "LMCache#5265",
        "a client dies with pins or mapped memory: its slot is lost, or it cannot come back",
        "test_a_client_that_dies_with_pins",
        "test_a_client_that_dies_with_all_that_it_can_have",
        "test_a_client_that_comes_back_finds_what_it_had",
        later("regions: memory that both sides map"),
    ),
    fault(
        "cilium#38654",
        "a server that was restarted uses a version number again, and clients skip what is new",
        "test_a_restarted_server_reuses_a_number",
        "test_a_client_notices_the_number_of_another_life",
    ),
    fault(
        "Triton server#3207, Triton server#7688",
        "to unregister what is in flight is a crash, or it is in use for ever",
        "test_unload_while_in_flight",
        "test_unload_while_in_flight_with_nobody_waiting_for_the_slot",
        "test_a_fence_ends_with_the_last_kernel_that_its_caller_gave_up",
        later("regions: unregistered while in use"),
    ),
    fault(
        "gateway-api-inference-extension#584",
        "one bad adapter blocks the reconciliation of the others",
        "test_one_bad_adapter_does_not_hold_up_the_rest",
        "test_one_bad_adapter_in_a_set_does_not_hold_up_who_waits_behind",
        "test_bad_uploads_do_not_hold_up_a_good_one",
        later("declarative sync: a file of adapters that must be there"),
    ),
    fault(
        "grpc#36009",
        "every exception is INTERNAL, and an intended abort looks like a crash",
        "test_a_refusal_is_its_own_reason_and_no_crash",
    ),
    fault("istio#51883", "a sidecar that was never ready blocks the pod's end", later("Kubernetes: a native sidecar")),
    fault("istio#60649", "it drains at preStop while the engine still works", later("Kubernetes: a native sidecar")),
    fault("kuma#3293", "an injector that is down leaves pods without the sidecar", later("Kubernetes: the injector")),
    fault("vault-helm#736", "an injector injects itself", later("Kubernetes: the injector")),
    fault("dapr#6350", "a second webhook undoes the injection", later("Kubernetes: the injector")),
    fault(
        "vault#15389",
        "a certificate was rotated and not loaded again",
        "test_a_certificate_that_was_rotated_is_loaded",
    ),
)

SECURITY = (
    fault(
        "vllm#46287",
        "names with `../`, absolute or through a link lead out of the root",
        "test_no_name_and_no_source_leads_outside",
        "test_no_name_of_an_upload_leads_outside",
    ),
    fault(
        "TensorRT-LLM#13391",
        "a pickle runs code",
        "test_a_pickle_runs_nothing",
        "test_a_pickle_in_an_upload_runs_nothing",
    ),
    fault(
        "vllm (by reading)",
        "a path that does not exist is a download",
        "test_a_path_that_does_not_exist_is_no_download",
        later("sources in a hub: allowed by their scheme alone, never by a missing path"),
    ),
    fault("kubeai (by reading)", "what to delete is built from a name", "test_an_unload_deletes_no_file"),
)

CATALOGUE: Mapping[str, tuple[Fault, ...]] = {
    "test_wrong_weights": WRONG_WEIGHTS,
    "test_residency": RESIDENCY,
    "test_reload_and_names": RELOAD_AND_NAMES,
    "test_checkpoints": CHECKPOINTS,
    "test_kernels": KERNELS,
    "test_life_and_death": LIFE_AND_DEATH,
    "test_security": SECURITY,
}

# A class and one of its functions or fields.
_PLACE = re.compile(r"\b([A-Z][A-Za-z]+)\.(_*[a-z]\w*)")


def shown_in(section: str) -> dict[str, FunctionType]:
    """The tests that a module of the museum has, by name."""
    module = importlib.import_module(f"tests.unit.museum.{section}")
    functions = inspect.getmembers(module, inspect.isfunction)
    return {name: each for name, each in functions if name.startswith("test_") and each.__module__ == module.__name__}


@cache
def places() -> frozenset[str]:
    """Every Class.function and Class.field of the product."""
    found = set()
    for path in (path for root in SOURCES for path in (REPOSITORY / root).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{name}" for name in _members(node)}
    return frozenset(found)


def _members(node: ast.ClassDef) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield each.name
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
            yield each.attr
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id


def test_every_heading_is_a_module_of_the_museum() -> None:
    assert {path.stem for path in (Path(__file__).parent / "museum").glob("test_*.py")} == CATALOGUE.keys()


def test_every_reference_is_there_once() -> None:
    references = [reference for rows in CATALOGUE.values() for row in rows for reference in row.references]
    assert sorted(references) == sorted(set(references))
    form = re.compile(r"\S.*#\d+( \(\w+\))?|\S.* \((by reading|no report)\)")
    assert [reference for reference in references if not form.fullmatch(reference)] == []


def test_every_fault_is_shown_or_has_the_capability_that_it_comes_with() -> None:
    rows = [row for rows in CATALOGUE.values() for row in rows]
    assert [row for row in rows if not row.tests and not row.later] == []
    assert [row.later for row in rows if row.later and not re.fullmatch(r"[^:;]+: .+", row.later)] == []


@pytest.mark.parametrize("section", CATALOGUE)
def test_every_test_named_exists_and_every_test_is_named(section: str) -> None:
    named = [test for row in CATALOGUE[section] for test in row.tests]
    assert sorted(named) == sorted(shown_in(section))


@pytest.mark.parametrize("section", CATALOGUE)
def test_every_test_says_which_fault_it_shows_and_how_it_fails(section: str) -> None:
    tests = shown_in(section)
    for row in CATALOGUE[section]:
        for name in row.tests:
            text = " ".join((tests[name].__doc__ or "").split())
            assert text.startswith(f"{', '.join(row.references)}. "), name
            says, _, mutant = text.partition(TO_SEE_IT_FAIL)
            assert len(says) > len(", ".join(row.references)) + 10, name
            assert mutant, name
            gone = {".".join(place) for place in _PLACE.findall(mutant)} - places()
            assert not gone, f"{name} names {gone}"
