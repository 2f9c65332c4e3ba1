"""Greedy decoding of several sequences in one batch, where a step computes one token of each or nothing at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache


class Decoder:
    """Prompts of different lengths are padded on the left; `tokens` has what each sequence got so far."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, prompts))
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self._model = model
        self._cache: Any = DynamicCache()
        self._next = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        self._mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])

    @torch.inference_mode()
    def step(self) -> None:
        """One more token for every sequence. When the model raises, nothing has changed: the step can be repeated."""
        before = [(layer.keys, layer.values) for layer in self._cache.layers]
        positions = (self._mask.cumsum(1) - 1).clamp(min=0)[:, -self._next.shape[1] :]
        try:
            logits = self._model(
                input_ids=self._next,
                attention_mask=self._mask,
                position_ids=positions,
                past_key_values=self._cache,
                logits_to_keep=1,
            ).logits
        except Exception:
            self._restore(before)
            raise
        self._next = logits[:, -1].argmax(-1, keepdim=True)
        self._mask = torch.cat([self._mask, torch.ones_like(self._next)], 1)
        for sequence, token in zip(self.tokens, self._next[:, 0].tolist(), strict=True):
            sequence.append(token)

    def keep(self, index: int) -> None:
        """Goes on with one sequence alone."""
        self.tokens = [self.tokens[index]]
        self._next, self._mask = self._next[[index]], self._mask[[index]]
        self._cache.batch_select_indices(torch.tensor([index]))

    def _restore(self, before: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Puts back each layer's keys and values; a step makes new tensors and leaves the old as they were."""
        if not before:
            self._cache = DynamicCache()
        for layer, (keys, values) in zip(self._cache.layers, before, strict=False):
            layer.keys, layer.values = keys, values
