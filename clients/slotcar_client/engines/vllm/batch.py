"""Which version each request of a runner is for: fixed when the request is scheduled first, for as long as it lives.

So a request that was preempted comes back to the weights it began with, whatever its id stands for by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Mapping as ReadOnlyDict
from typing import Any

from vllm.lora.request import LoRARequest

from slotcar_client.engines.vllm.adapters import EngineAdapters
from slotcar_client.engines.vllm.rows import Scheduled
from slotcar_client.errors import SlotcarError


class Requests:
    """The unfinished requests of one runner that have an adapter."""

    def __init__(self) -> None:
        self._refs: dict[str, str | SlotcarError] = {}

    def begin(self, finished: Iterable[str], wanted: Iterable[str], adapters: EngineAdapters) -> None:
        """A step begins; these requests are over, and these versions are wanted by requests that do not run yet."""
        for request_id in finished:
            self._refs.pop(request_id, None)
        adapters.use({*wanted, *(ref for ref in self._refs.values() if isinstance(ref, str))})

    def scheduled(
        self,
        input_batch: Any,
        counts: tuple[Sequence[int], Sequence[int]],
        states: ReadOnlyDict[str, Any],
        adapters: EngineAdapters,
    ) -> tuple[list[Scheduled], dict[str, SlotcarError]]:
        """The requests of a step, in order, and those without a version, with the reason.

        counts: rows of each request in the layers and in the head. states: the runner's, by request.
        """
        batch, refused = [], {}
        numbers = input_batch.request_lora_mapping
        for index, (request_id, tokens, samples) in enumerate(zip(input_batch.req_ids, *counts, strict=True)):
            ref: str | SlotcarError | None = None
            if numbers[index] > 0:
                ref = self._refs.get(request_id)
                if ref is None:
                    ref = self._refs[request_id] = _admitted(states[request_id].lora_request, adapters)
            if isinstance(ref, SlotcarError):
                refused[request_id], ref = ref, None
            batch.append(Scheduled(request_id, ref, int(tokens), int(samples)))
        return batch, refused


def _admitted(request: LoRARequest, adapters: EngineAdapters) -> str | SlotcarError:
    try:
        return adapters.admit(request)
    except SlotcarError as error:
        return error
