"""A decode step of 128 Forwards on ring and direct: `python -m tests.bench.step [--quick|--smoke]`.

32 layers with hidden size 4096: q, k and v share an x, gate and up do, o and down have their own, so a layer makes four
calls over seven sites. 8 rows use 8 adapters of rank 16. A step reads all adapters once, more than a gigabyte in
float32, so that every weight comes from memory.

The peers are the same kernels in this process, over slots in private anonymous memory and in shared-memory pages that
only this process has. At best each call is prepared once, for tensors that stay where they are; prepared per call, for
outputs of its own, it does what an engine must whose tensors are new in each layer, as ours does. Their results are
compared bit for bit with ours. CPU times are those of all processes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from slotcar_client import Session
from slotcar_kernels import cpu
from slotcar_kernels.plan import plan_rows

from tests.bench.harness import Call, Record, Took
from tests.bench.sides import Turn, in_turns, repeated
from tests.bench.sizes import Size, size_wanted
from tests.bench.slots import KINDS, PrivateSlots
from tests.bench.stage import Site, adapter_weights, serving, write_adapter

PLANES = ("ring", "direct")
ADAPTERS = 8
RANK = 16
COPIES = 5
"""How often the weights are in memory: slots of the sidecar and of each peer, files, and what is being read."""


@dataclass(frozen=True)
class Model:
    """The shape of a decoder; `calls` has the sites of each Forward of a step."""

    layers: int
    hidden: int
    intermediate: int

    @property
    def calls(self) -> list[tuple[Site, ...]]:
        return [call for layer in range(self.layers) for call in self._layer(f"model.layers.{layer}")]

    @property
    def sites(self) -> list[Site]:
        return [site for call in self.calls for site in call]

    def _layer(self, prefix: str) -> Iterator[tuple[Site, ...]]:
        hidden, intermediate = self.hidden, self.intermediate
        yield tuple(Site(f"{prefix}.self_attn.{name}_proj", hidden, hidden) for name in "qkv")
        yield (Site(f"{prefix}.self_attn.o_proj", hidden, hidden),)
        yield tuple(Site(f"{prefix}.mlp.{name}_proj", hidden, intermediate) for name in ("gate", "up"))
        yield (Site(f"{prefix}.mlp.down_proj", intermediate, hidden),)

    def adapters_bytes(self, dtype: torch.dtype) -> int:
        values = sum(site.in_features + site.out_features for site in self.sites)
        return ADAPTERS * RANK * values * dtype.itemsize

    def halved(self) -> Model:
        return Model(self.layers, self.hidden // 2, self.intermediate // 2)


def model_for(size: Size, dtype: torch.dtype) -> Model:
    """Llama 2 7B, or one of half its width, and so on, where memory is short."""
    model = size.pick(Model(1, 64, 96), Model(32, 4096, 11008), Model(32, 4096, 11008))
    while COPIES * model.adapters_bytes(dtype) > _available_bytes():
        model = model.halved()
    return model


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


class Step:
    """The inputs of a step, and how each side makes it; activations are few and stay in the caches, as in an engine."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        self._calls = model.calls
        widths = {site.in_features for site in model.sites}
        self._x = {(call, width): torch.randn(ADAPTERS, width).to(dtype) for call in range(4) for width in widths}

    def inputs(self, number: int) -> tuple[tuple[Site, ...], torch.Tensor]:
        """The sites of call `number` and their x."""
        sites = self._calls[number]
        return sites, self._x[number % 4, sites[0].in_features]

    def on(self, session: Session) -> Call:
        """Over a session's plane; returns the outputs of the last call."""
        calls = [
            dict.fromkeys((site.name for site in sites), x) for sites, x in map(self.inputs, range(len(self._calls)))
        ]

        def call() -> list[torch.Tensor]:
            for inputs in calls:
                outputs = session.forward(inputs)
            return list(outputs.values())

        return call

    def over(self, slots: PrivateSlots) -> Call:
        """In this process, prepared once."""
        plan = plan_rows([(slot, 1) for slot in range(ADAPTERS)])
        prepared, outs = [], []
        for sites, x in map(self.inputs, range(len(self._calls))):
            outs = [torch.empty(ADAPTERS, site.out_features, dtype=x.dtype) for site in sites]
            prepared.append(cpu.prepare(plan, x, [slots.sites[site.name] for site in sites], outs))

        def call() -> list[torch.Tensor]:
            for each in prepared:
                each()
            return outs

        return call

    def anew(self, slots: PrivateSlots) -> Call:
        """In this process, prepared per call."""
        plan = plan_rows([(slot, 1) for slot in range(ADAPTERS)])
        calls = [
            ([slots.sites[site.name] for site in sites], x) for sites, x in map(self.inputs, range(len(self._calls)))
        ]

        def call() -> list[torch.Tensor]:
            for sites, x in calls:
                outs = [torch.empty(len(x), site.out_features, dtype=x.dtype) for site in sites]
                cpu.lora_forward(plan, x, sites, outs)
            return outs

        return call


def run(size: Size, dtype: torch.dtype) -> None:
    """Prints a record for each plane and kind of memory."""
    model = model_for(size, dtype)
    slots = {kind: PrivateSlots(model.sites, ADAPTERS, RANK, dtype, kind) for kind in KINDS}
    step, name = Step(model, dtype), str(dtype).removeprefix("torch.")
    room = math.ceil(2 * model.adapters_bytes(dtype) / ADAPTERS) + (1 << 20)
    extra = ("--dtype", name, "--host-bytes", str(room))
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(serving(model.sites, slots=ADAPTERS, rank=RANK, extra=extra))
        sessions = stack.enter_context(stage.sessions("step", PLANES))
        for slot in range(ADAPTERS):
            weights = adapter_weights(model.sites, rank=RANK, dtype=dtype, seed=slot)
            for each in slots.values():
                each.fill(slot, weights)
            stage.client.load(f"a{slot}", write_adapter(stage.root / f"a{slot}", weights))
        for session in sessions.values():
            session.set_mapping([(f"a{slot}", 1) for slot in range(ADAPTERS)])
        calls = {plane: step.on(session) for plane, session in sessions.items()}
        calls |= {f"{kind}, once": step.over(each) for kind, each in slots.items()}
        calls["shared, per call"] = step.anew(slots["shared"])
        _check_alike([call() for call in calls.values()])  # type: ignore[misc]
        turns = {side: Turn(repeated(call, [stage.pid]), 1) for side, call in calls.items()}
        times = in_turns(turns, size.pick(1, 15, 40))
    case = {**asdict(model), "calls": len(model.calls), "rows": ADAPTERS, "adapters": ADAPTERS, "rank": RANK}
    for plane in sessions:
        for peer in (side for side in calls if side not in sessions):
            _print({**case, "dtype": name, "plane": plane}, peer, times)


def _print(case: dict[str, Any], peer: str, times: Mapping[str, Sequence[Took]]) -> None:
    """Direct has targets for both kinds of memory, the ring for shared pages."""
    plane, (kind, prepared) = case["plane"], peer.split(", ")
    case = {**case, "peer_memory": kind, "peer_prepared": prepared}
    if prepared == "once" and (plane == "direct" or kind == "shared"):
        case["target"] = True
    Record.of("step", case, ("slotcar", times[plane]), ("in-process", times[peer])).printed()


def _check_alike(results: Sequence[Sequence[torch.Tensor]]) -> None:
    """The same kernels over the same bytes give the same bits."""
    first, *others = results
    for other in others:
        assert all(map(torch.equal, first, other))


def main() -> None:
    size = size_wanted(__doc__)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        run(size, dtype)


if __name__ == "__main__":
    main()
