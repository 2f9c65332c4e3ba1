"""The LoRA of fused experts and of their router: the rows of adapters are computed once more, with the deltas inside.

Between the two matrices of an expert is an activation, and behind a router's a choice: a delta cannot be added to what
comes out. Rows without an adapter keep the bits that the model gave them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["experts_output", "router_output"]

# The delta of a site: of rows [n, features] and, for experts, each row's expert; None where nobody has one.
Delta = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor | None]


def experts_output(
    experts: nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, delta: Delta
) -> torch.Tensor:
    """[n, hidden]: Σ over the chosen experts of weight · down(gate(x Wᵀ + delta)) + delta.

    hidden: [n, hidden]; chosen, weights: [n, k], the experts of each row. delta gets n · k rows, k for each of n.
    """
    count = chosen.shape[-1]
    x, numbers = hidden.repeat_interleave(count, 0), chosen.reshape(-1)
    inner = _projected(experts, "gate_up_proj", x, numbers, delta)
    apply_gate: Callable[[torch.Tensor], torch.Tensor] = experts._apply_gate  # type: ignore[assignment]
    outputs = _projected(experts, "down_proj", apply_gate(inner), numbers, delta) * weights.reshape(-1, 1)
    return outputs.view(-1, count, outputs.shape[-1]).sum(1)


def _projected(experts: nn.Module, leaf: str, x: torch.Tensor, numbers: torch.Tensor, delta: Delta) -> torch.Tensor:
    """x W_eᵀ + delta, with the expert e of each row."""
    matrices = getattr(experts, leaf)
    result = x.new_empty(len(x), matrices.shape[1])
    for number in sorted(set(numbers.tolist())):
        rows = numbers == number
        result[rows] = functional.linear(x[rows], matrices[number])
    added = delta(leaf, x, numbers)
    return result if added is None else result + added


class _WithDelta(TorchFunctionMode):
    """Adds to what `linear` gives for one weight."""

    def __init__(self, weight: torch.Tensor, delta: torch.Tensor) -> None:
        self._weight = weight
        self._delta = delta

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is functional.linear and len(args) > 1 and args[1] is self._weight:
            return output + self._delta.view_as(output)
        return output


def router_output(router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], delta: torch.Tensor) -> Any:
    """What the router gives with `delta` added to its logits."""
    weight = router.weight
    assert isinstance(weight, torch.Tensor)
    with _WithDelta(weight, delta):
        return router.forward(*args, **kwargs)
