"""Takes hold of a method of vLLM: once, however often it is asked, with the original within reach."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Method = Callable[..., Any]
_MARK = "_slotcar"


def wrap(owner: type, name: str, make: Callable[[Method], Method]) -> None:
    """`owner.name` becomes what `make` makes of it, unless it is that already."""
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _MARK, True)
    setattr(owner, name, wrapper)
