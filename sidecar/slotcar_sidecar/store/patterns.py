"""Gives each module its rank or alpha by PEFT's pattern rule, in bounded time.

Python's `re` backtracks, and a configuration is written by a stranger: so a pattern is built from an allow-list of
parts, and matched only if the ways in which it could backtrack are few.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from slotcar_sidecar.core.errors import AdapterUnsupported
from slotcar_sidecar.store.faults import CONFIG_FILE, invalid, shown, unsupported

T = TypeVar("T")

_MAX_LENGTH = 500
_MAX_GROUPS_OPEN = 10
_MAX_COST = 10**7
_MAX_TOTAL_COST = 2 * 10**9
# What one match costs however short the name is, in the unit of `_cost`.
_COST_OF_CALL = 500
_ATOM = r"[^\\^$*+?{}\[\]()|\s]|\\[.\-_dDwW]|\[\^?[A-Za-z0-9_.\-]+\]"
_TOKEN = re.compile(rf"(?P<open>\((?:\?:)?)|(?P<close>\))|(?P<bar>\|)|(?P<anchor>[\^$])|(?:{_ATOM})(?P<many>[*+?]\??)?")


@dataclass(frozen=True, slots=True)
class ByModule(Generic[T]):
    """The value per module, and the patterns that gave none."""

    values: Mapping[str, T]
    unused: tuple[str, ...]


def values_by_pattern(field: str, patterns: Mapping[str, T], default: T, modules: Sequence[str]) -> ByModule[T]:
    """The value of the first pattern k, in order, with re.match(rf"(.*\\.)?({k})$", module), or `default`.

    Raises AdapterInvalid for what is no regular expression and AdapterUnsupported for one that could take too long,
    naming `field`. Source: peft.utils.other.get_pattern_key.
    """
    longest = max(map(len, modules), default=0)
    costs = [_cost(field, pattern, longest) + _COST_OF_CALL for pattern in patterns]
    if sum(costs) * len(modules) > _MAX_TOTAL_COST:
        raise _too_slow(field, f"{len(patterns)} patterns for {len(modules)} modules")
    compiled = {pattern: _compiled(field, pattern) for pattern in patterns}
    # PEFT, when no pattern matches, still looks the module up by its name.
    first = {
        module: next((pattern for pattern, matcher in compiled.items() if matcher.match(module)), module)
        for module in modules
    }
    used = set(first.values())
    return ByModule(
        values={module: patterns.get(pattern, default) for module, pattern in first.items()},
        unused=tuple(pattern for pattern in patterns if pattern not in used),
    )


def _compiled(field: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, RecursionError, OverflowError) as error:
        raise invalid(
            f"{field} has the pattern {shown(pattern)}, which is no regular expression: {shown(str(error))}",
            file=CONFIG_FILE,
            field=field,
            found=pattern,
            wanted="a regular expression",
        ) from error


def _cost(field: str, pattern: str, longest: int) -> int:
    """Bounds the ways to match `pattern` against a name: n per loop and for PEFT's prefix, 2 per `?`, k per group of k.

    Raises AdapterUnsupported if they are too many, or if the pattern has a part that is not on the allow-list, such as
    a group under a quantifier.
    """
    position, loops, ways, bars = 0, 1, 1, [0]
    while position < len(pattern) and len(bars) <= _MAX_GROUPS_OPEN:
        token = _TOKEN.match(pattern, position)
        if token is None:
            break
        position = token.end()
        if token["open"]:
            bars.append(0)
        elif token["bar"]:
            bars[-1] += 1
        elif token["close"] and len(bars) > 1:
            ways *= bars.pop() + 1
        elif token["many"]:
            loops, ways = (loops, 2 * ways) if token["many"][0] == "?" else (loops + 1, ways)
    cost: int = ways * (bars[0] + 1) * (longest + 1) ** loops
    if position < len(pattern) or len(pattern) > _MAX_LENGTH or cost > _MAX_COST:
        raise _too_slow(field, pattern)
    return cost


def _too_slow(field: str, found: str) -> AdapterUnsupported:
    return unsupported(
        f"{field} has {shown(found)}, which might take too long to match: name the modules instead",
        file=CONFIG_FILE,
        field=field,
        found=found,
        wanted="names of modules, or patterns with few loops and alternatives",
    )
