"""vLLM's punica wrapper over slotcar: each call adds a layer's deltas in place; rows without an adapter are untouched.

The wrapper gets no layer's name. What it gets as the layer's stacked tensors is a `Layer`, which knows its sites.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase

from slotcar_client.engines.vllm.deltas import Layer


class PunicaWrapper(PunicaWrapperBase):
    """Has no state of its own: which rows are whose says the step, before its layers run."""

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device)
        # An embedding looks up x + these: each token's own id, from the table that stands for its A.
        self._embeddings_indices.zero_()

    def update_metadata(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing: rows have versions, which vLLM's indices cannot say."""

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Layer,
        _lora_b_stacked: Layer,
        _scale: float,
        _output_slices: tuple[int, ...],
        **_kwargs: Any,
    ) -> torch.Tensor:
        """y += the deltas at the layer's sites for x."""
        return _added(lora_a_stacked, y, x)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Layer,
        _lora_b_stacked: Layer,
        _scale: float,
        **_kwargs: Any,
    ) -> torch.Tensor:
        """y [samples, vocabulary] += the deltas of the head for x."""
        return _added(lora_a_stacked, y, x)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: Layer, **_kwargs: Any
    ) -> torch.Tensor:
        """y += the deltas of the embedding for x, the ids of tokens."""
        return _added(lora_b_stacked, y, x)

    def _not_here(self, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        """For layers that are refused when the model is wrapped: fully sharded ones, classifiers and experts."""
        raise NotImplementedError("slotcar has no LoRA for this layer")

    add_shrink = add_expand = apply_lora_full_linear = _not_here


def _added(layer: Layer, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        torch.ops.slotcar.add_delta(y, x, layer.number)
    else:
        layer.add(y, x)
    return y
