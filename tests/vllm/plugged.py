"""slotcar's plug-in in this process, for as long as a test needs it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

import pytest
from slotcar_client.engines.vllm import plugin, versions
from vllm.lora.resolver import LoRAResolverRegistry


@contextlib.contextmanager
def plugged(target: str) -> Iterator[None]:
    """As in a process that vLLM makes engines in; afterwards vLLM is as it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLOTCAR_TARGET", target)
        patch.setattr(LoRAResolverRegistry, "resolvers", {})
        for hook in versions.FRONT_HOOKS:
            owner, _, name = hook.name.partition(".")
            place = getattr(importlib.import_module(hook.module), owner)
            patch.setattr(place, name, getattr(place, name))
        plugin.register()
        yield
