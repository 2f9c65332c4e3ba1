"""Tokens per second of SmolLM2-135M: `python -m tests.bench.e2e [--quick|--smoke]`.

32 sequences decode in one batch, over 8 adapters of rank 16 on all linear layers; times are of one step, one token for
each. The model without adapters; PEFT's mixed batch; the model with `attach` over each plane of a sidecar; and `attach`
over the same kernels in this process. All start from the same keys and values, and all with adapters give the same
tokens. torch has one thread on each side. Without SmolLM2, and with --smoke, the model is a tiny random one.

LoRA is only a part of a step, so nothing can be faster than PEFT by more than PEFT's step over the base model's: the
case has that as `bound`, and PEFT's share for LoRA as `lora_share` (Amdahl).
"""

from __future__ import annotations

import contextlib
import copy
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from peft import PeftModel
from slotcar_client import Session
from slotcar_client.engines.transformers import attach, model_spec
from slotcar_client.values import LayoutVersion
from slotcar_client.values import Mapping as Mapped
from slotcar_kernels.cpu import lora_forward
from slotcar_kernels.plan import Plan, plan_rows
from slotcar_sidecar.demo.model import smollm2_available, smollm2_folder, tiny_llama_folder
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from tests.bench.harness import Peer, Record, Took
from tests.bench.sides import Side, Turn, in_turns, repeated
from tests.bench.sizes import Size, size_wanted
from tests.bench.slots import PrivateSlots
from tests.bench.stage import PLANES, Site, adapter_weights, serving, write_adapter

ROWS = 32
ADAPTERS = 8
RANK = 16
PROMPT_TOKENS = 12
NAMES = tuple(f"a{number}" for number in range(ADAPTERS))
ENTRIES = tuple(NAMES[row % ADAPTERS] for row in range(ROWS))
_CACHE = Path(__file__).resolve().parents[2] / ".cache" / "slotcar"

Forward = Callable[..., Any]


class InProcess:
    """What `attach` needs of a session, in this process: the least that an engine could do with the kernels."""

    model_spec = None

    def __init__(self, slots: PrivateSlots) -> None:
        self._slots = slots
        self._follower: Callable[[Mapped | None], None] = lambda mapping: None
        self._plans: dict[tuple[int, ...], Plan] = {}
        version = LayoutVersion("in process", 1)
        self._mapping = Mapped(1, version, ENTRIES, MappingProxyType({}), None)

    def follow_rows(self, follower: Callable[[Mapped | None], None]) -> None:
        self._follower = follower

    def unfollow_rows(self) -> None:
        pass

    def sites_of(self, mapping: Mapped) -> tuple[frozenset[str], ...]:
        return (frozenset(self._slots.sites),) * len(mapping.entries)

    def sites_needing_base(self, mapping: Mapped) -> tuple[frozenset[str], ...]:
        return (frozenset(),) * len(mapping.entries)

    @contextlib.contextmanager
    def rows(self, entries: Sequence[str]) -> Iterator[Mapped]:
        self._follower(self._mapping)
        yield self._mapping
        self._follower(None)

    def forward(
        self, inputs: Mapping[str, torch.Tensor], row_counts: tuple[int, ...], *, mapping: Mapped
    ) -> dict[str, torch.Tensor]:
        plan = self._plans.get(row_counts)
        if plan is None:
            slots = [NAMES.index(str(entry)) for entry in mapping.entries]
            plan = self._plans[row_counts] = plan_rows(list(zip(slots, row_counts, strict=True)))
        x = next(iter(inputs.values()))
        sites = [self._slots.sites[site] for site in inputs]
        outs = {site: torch.empty(len(x), self._slots.sites[site].out_features, dtype=x.dtype) for site in inputs}
        lora_forward(plan, x, sites, list(outs.values()))
        return outs


class Decoding:
    """One way to decode; each step starts from the keys and values after the prompts, and is thus the same."""

    def __init__(self, forward: Forward, prompts: torch.Tensor) -> None:
        self._forward = forward
        self._cache: Any = DynamicCache()
        self._next = self._logits(prompts).argmax(-1, keepdim=True)
        self._start = [(layer.keys, layer.values) for layer in self._cache.layers]

    def step(self) -> torch.Tensor:
        """The logits of the next token of every sequence, and the token itself, as a server would want it."""
        for layer, (keys, values) in zip(self._cache.layers, self._start, strict=True):
            layer.keys, layer.values = keys, values
        logits = self._logits(self._next)
        logits.argmax(-1, keepdim=True)
        return logits

    @torch.no_grad()
    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._forward(input_ids=ids, past_key_values=self._cache, logits_to_keep=1).logits[:, -1]
        return logits


@dataclass(frozen=True)
class Host:
    """The model, its adapters' weights, and prompts."""

    name: str
    model: Any
    sites: list[Site]
    weights: Sequence[Mapping[str, tuple[torch.Tensor, torch.Tensor]]]
    prompts: torch.Tensor


def make_host(size: Size) -> Host:
    real = size > Size.SMOKE and smollm2_available()
    logging.disable_progress_bar()
    folder = smollm2_folder(_CACHE) if real else tiny_llama_folder(_CACHE)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    sites = [Site(site.name, site.in_features, site.out_features) for site in model_spec(model).sites]
    weights = [adapter_weights(sites, rank=RANK, dtype=torch.float32, seed=seed) for seed in range(ADAPTERS)]
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(4, model.config.vocab_size, (ROWS, PROMPT_TOKENS), generator=generator)
    return Host("SmolLM2-135M" if real else "tiny", model, sites, weights, prompts)


def peft_forward(host: Host, root: Path) -> Forward:
    """PEFT's mixed batch, over a copy of the model."""
    first, *rest = NAMES
    model = PeftModel.from_pretrained(shared_copy(host.model), str(root / first), adapter_name=first)
    for name in rest:
        model.load_adapter(str(root / name), adapter_name=name)
    model.eval()
    return lambda **inputs: model(**inputs, adapter_names=list(ENTRIES))


def shared_copy(model: Any) -> Any:
    """Modules of its own, for hooks of its own, over the same weights."""
    weights = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(each): each for each in weights})


def adapted(host: Host, session: Session | InProcess, stack: contextlib.ExitStack) -> Decoding:
    """The model with a session's deltas; what `attach` learns of it, it learns here."""
    model = shared_copy(host.model)
    stack.enter_context(attach(model, session))  # type: ignore[arg-type]
    with session.rows(ENTRIES):
        return Decoding(model, host.prompts)


def within_rows(session: Session | InProcess, side: Side) -> Side:
    """The side, whose calls are made under a mapping that is set before them."""

    def mapped(calls: int) -> list[Took]:
        with session.rows(ENTRIES):
            return side(calls)

    return mapped


def run(size: Size) -> None:
    """Prints a record for each plane, and for the kernels in this process, against each peer."""
    host = make_host(size)
    slots = PrivateSlots(host.sites, ADAPTERS, RANK, torch.float32, "shared")
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(serving(host.sites, slots=ADAPTERS, rank=RANK))
        for slot, (name, weights) in enumerate(zip(NAMES, host.weights, strict=True)):
            slots.fill(slot, weights)
            stage.client.load(name, write_adapter(stage.root / name, weights))
        peft = Decoding(peft_forward(host, stage.root), host.prompts)
        sides = {"base": repeated(Decoding(host.model, host.prompts).step), "peft": repeated(peft.step)}
        sessions: dict[str, Session | InProcess] = {"in-process": InProcess(slots)}
        sessions |= stack.enter_context(stage.sessions("e2e", PLANES))
        for name, session in sessions.items():
            decoding = adapted(host, session, stack)
            with session.rows(ENTRIES):
                _check_close(decoding.step(), peft.step())
            sides[name] = within_rows(session, repeated(decoding.step, [stage.pid]))
        steps = size.pick(1, 1, 4)
        times = in_turns({name: Turn(side, steps) for name, side in sides.items()}, size.pick(1, 15, 40))
    for name in sessions:
        for peer in ("in-process", "peft", "base"):
            if peer != name:
                _record(host, name, peer, times).printed()


def _check_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """The logits are PEFT's, as far as float32 goes through so many layers."""
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item())


def _record(host: Host, plane: str, peer: Peer, times: Mapping[str, Sequence[Took]]) -> Record:
    step = {side: statistics.median(each.wall for each in taken) for side, taken in times.items()}
    case: dict[str, Any] = {"model": host.name, "rows": ROWS, "adapters": ADAPTERS, "rank": RANK, "plane": plane}
    case["tokens_per_s"], case["peer_tokens_per_s"] = (round(ROWS * 1e6 / step[side], 1) for side in (plane, peer))
    if peer == "peft":
        case["lora_share"] = round(1 - step["base"] / step["peft"], 3)
        case["bound"] = round(step["peft"] / step["base"], 2)
    if plane == "direct" and peer != "base":
        case["target"] = True
    return Record.of("e2e", case, ("slotcar", times[plane]), (peer, times[peer]))


def main() -> None:
    size = size_wanted(__doc__)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    run(size)


if __name__ == "__main__":
    main()
