"""How a step's marks travel to the scheduler: as attributes of vLLM's output, which keeps them on its way."""

from __future__ import annotations

import copy
from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from slotcar_client.engines.vllm.step import Marks


def marked(output: Any, marks: Marks) -> Any:
    """The output with `slotcar_failed`, `slotcar_postponed` and `slotcar_slots`; one that is not ready, when it is."""
    if isinstance(output, AsyncModelRunnerOutput):
        return _MarkedLater(output, marks)
    return _marked(output, marks) if isinstance(output, ModelRunnerOutput) else output


class _MarkedLater(AsyncModelRunnerOutput):
    def __init__(self, output: AsyncModelRunnerOutput, marks: Marks) -> None:
        self._output = output
        self._marks = marks

    def get_output(self) -> ModelRunnerOutput:
        return _marked(self._output.get_output(), self._marks)


def _marked(output: ModelRunnerOutput, marks: Marks) -> ModelRunnerOutput:
    result = copy.copy(output)  # vLLM has one empty output for all steps
    result.slotcar_failed = marks.failed
    result.slotcar_postponed = marks.postponed
    result.slotcar_slots = marks.slots
    return result
