"""Names the parameter that LoRA weights of a module with several are for, as PEFT nests them: `target_parameters`.

PEFT wraps the module once for each targeted parameter, in the order in which the module has them, so that the first
one is innermost; the file's keys say only how deep a wrapper is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from slotcar_sidecar.core.errors import AdapterInvalid
from slotcar_sidecar.store.faults import CONFIG_FILE, WEIGHTS_FILE, invalid, shown, unsupported
from slotcar_sidecar.store.keys import Module

__all__ = ["parameters_of"]

_FIELD = "target_parameters"
# In the order in which the fused experts of transformers have them.
_ORDER = ("gate_up_proj", "down_proj")


def parameters_of(modules: Iterable[Module], targets: Sequence[str]) -> dict[str, str]:
    """By `Module.site`, the path of the parameter; a module without an entry is adapted as a whole.

    Raises AdapterInvalid where file and configuration disagree, AdapterUnsupported where the order is not known.
    """
    wrappers: dict[str, list[Module]] = {}
    for module in modules:
        wrappers.setdefault(module.name, []).append(module)
    by_leaf: dict[str, list[str]] = {}
    for target in targets:
        by_leaf.setdefault(target.rpartition(".")[2], []).append(target)
    result: dict[str, str] = {}
    for name, nested in wrappers.items():
        leaves = _leaves(name, by_leaf)
        if not leaves and len(nested) == 1 and nested[0].depth == 0:
            continue
        outermost_first = sorted(nested, key=lambda module: module.depth)
        if [module.depth for module in outermost_first] != list(range(len(leaves))):
            raise _disagree(outermost_first[-1], leaves)
        if len(leaves) > 1 and not set(leaves) <= set(_ORDER):
            raise unsupported(
                f"{_FIELD} has {shown(', '.join(leaves))} of {shown(name)}, and which of them a tensor is for is known "
                f"for {' and '.join(_ORDER)} only: train one of them",
                file=CONFIG_FILE,
                field=_FIELD,
                found=", ".join(leaves),
                wanted=" and ".join(_ORDER),
            )
        if len(leaves) > 1:
            leaves.sort(key=_ORDER.index, reverse=True)
        result |= {module.site: f"{name}.{leaf}" for module, leaf in zip(outermost_first, leaves, strict=True)}
    return result


def _leaves(name: str, by_leaf: Mapping[str, Sequence[str]]) -> list[str]:
    """The module's parameters that are targeted, by PEFT's rule: the whole path, or what follows one of its dots."""
    result = []
    for leaf, targets in by_leaf.items():
        path = f".{name}.{leaf}"
        if any(path.endswith(f".{target}") for target in targets):
            result.append(leaf)
    return result


def _disagree(module: Module, leaves: Sequence[str]) -> AdapterInvalid:
    said = shown(", ".join(leaves)) if leaves else "none"
    return invalid(
        f"{shown(module.a.key)} is nested {module.depth} deep, but of {shown(module.name)} {_FIELD} names {said}",
        file=WEIGHTS_FILE,
        field=_FIELD,
        tensor=module.a.key,
        found=f"{module.depth + 1} wrappers",
        wanted=f"{len(leaves)} parameters",
    )
