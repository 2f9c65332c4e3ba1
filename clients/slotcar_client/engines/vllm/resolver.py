"""Finds the adapter of a model name that the engine does not know: whatever the sidecar has under it."""

from __future__ import annotations

from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver

from slotcar_client import verbs
from slotcar_client.engines.vllm.calls import Calls
from slotcar_client.engines.vllm.requests import named_request, version_ref
from slotcar_client.errors import AdapterNotFound, RequestInvalid


class SlotcarResolver(LoRAResolver):
    """vLLM asks it with the name that a request has as its model, `name` or `name@sha256:…`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:  # noqa: ARG002
        """A request for the version that the name has now; None for one that no adapter can have or has.

        Raises SlotcarError for anything else: an adapter is not unknown because the sidecar is away.
        """
        try:
            adapter = await self._calls.perform(verbs.get(lora_name))
        except (AdapterNotFound, RequestInvalid):
            return None
        return named_request(lora_name, version_ref(adapter.name, adapter.digest))
