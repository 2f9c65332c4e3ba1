"""Sorts a file's tensors by the modules that they belong to; every tensor has a place or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from slotcar_sidecar.core.errors import AdapterInvalid, AdapterUnsupported
from slotcar_sidecar.store.faults import WEIGHTS_FILE, invalid, shown, unsupported
from slotcar_sidecar.store.tensors import FLOATS, RawTensor

__all__ = ["Contents", "Keyed", "Module", "contents_of", "tensor_fault"]

_PREFIX = "base_model.model."
# An adapter's name may stand behind lora_A and its like: "default" in files that were not saved by PEFT itself.
_INFIX = r"(?:\.(?P<adapter>(?!weight$)[A-Za-z0-9_\-]+))?"


class _Form(NamedTuple):
    """A key that a module's tensor has: what it is for the module, and the kind that this makes the module."""

    role: str
    kind: str | None
    expression: re.Pattern[str]


_FORMS = tuple(
    _Form(role, kind, re.compile(rf"(?P<module>.+)\.{rest}"))
    for role, kind, rest in (
        ("lora_A", "linear", rf"lora_A{_INFIX}\.weight"),
        ("lora_B", "linear", rf"lora_B{_INFIX}\.weight"),
        ("lora_A", "embedding", rf"lora_embedding_A{_INFIX}"),
        ("lora_B", "embedding", rf"lora_embedding_B{_INFIX}"),
        ("lora_bias", None, rf"lora_B{_INFIX}\.bias"),
        ("magnitude", None, rf"lora_magnitude_vector{_INFIX}(?:\.weight)?"),
        ("bias", None, r"base_layer\.bias"),
    )
)
# A tensor of the base model itself, under its own name or as PEFT wraps it.
_COPY = re.compile(r"(?P<module>.+?)(?:\.base_layer)*\.(?P<leaf>weight|bias)")
_MODULE = re.compile(r"[!-~]{1,500}")
_MAX_KEY = 700

# The first expression found in a key says why it is refused; the order is from the special to the general.
_UNSUPPORTED: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(expression), reason)
    for expression, reason in (
        (r"token_adapter|trainable_tokens", "rows of the embedding were trained too: merge it into the base model"),
        (r"modules_to_save", "whole modules were trained too: merge it into the base model"),
        (r"\.lora_[^.]+", "a part of a LoRA variant that is not known: train plain LoRA"),
    )
)


class Keyed(NamedTuple):
    """A tensor and its key in the file."""

    key: str
    tensor: RawTensor


@dataclass(frozen=True, slots=True)
class Module:
    """The tensors of one module: A and B are matrices, the others vectors; `depth` counts the wrappers around it."""

    name: str
    depth: int
    kind: str
    a: Keyed
    b: Keyed
    extras: Mapping[str, Keyed]

    @property
    def site(self) -> str:
        """The module's name with its wrappers, which tells it from others in the file."""
        return self.name + ".base_layer" * self.depth


class Contents(NamedTuple):
    """The modules of a file in the order of their names, and by name the tensors that the base model has too."""

    modules: tuple[Module, ...]
    copies: Mapping[str, Keyed]


def contents_of(tensors: Mapping[str, RawTensor]) -> Contents:
    """What is there for which module. Raises AdapterInvalid or AdapterUnsupported, naming the tensor."""
    found: dict[str, dict[str, Keyed]] = {}
    kinds: dict[str, set[str]] = {}
    copies: dict[str, Keyed] = {}
    adapters: set[str | None] = set()
    for key in sorted(tensors):
        keyed, name = Keyed(key, tensors[key]), key.removeprefix(_PREFIX)
        form, match = _form(name) if len(name) <= _MAX_KEY else (None, None)
        if form is None or match is None:
            _add(copies, _name_of_copy(keyed, name), keyed)
            continue
        module = match["module"]
        if not _MODULE.fullmatch(module):
            raise _bad(f"{shown(key)} names no module", key, found=module[:50], wanted="printable ASCII")
        _add(found.setdefault(module, {}), form.role, keyed)
        if form.kind is not None:
            kinds.setdefault(module, set()).add(form.kind)
        if form.role != "bias":
            adapters.add(match["adapter"])
    if not kinds:
        raise _bad("the file has no LoRA weights", None, found="no tensor", wanted="lora_A and lora_B tensors")
    _check_one_adapter(adapters)
    return Contents(tuple(_module(site, found[site], kinds.get(site, set())) for site in sorted(found)), copies)


def tensor_fault(keyed: Keyed) -> AdapterInvalid | AdapterUnsupported | None:
    """Why a tensor's type cannot be served, if it cannot."""
    dtype = keyed.tensor.dtype
    if dtype in FLOATS:
        return None
    refuse = unsupported if dtype.startswith("F") else invalid
    return refuse(
        f"{shown(keyed.key)} has dtype {dtype}",
        file=WEIGHTS_FILE,
        tensor=keyed.key,
        found=dtype,
        wanted=" or ".join(FLOATS),
    )


def _form(name: str) -> tuple[_Form | None, re.Match[str] | None]:
    for form in _FORMS:
        match = form.expression.fullmatch(name)
        if match is not None:
            return form, match
    return None, None


def _add(table: dict[str, Keyed], name: str, keyed: Keyed) -> None:
    if name in table:
        key = keyed.key
        raise _bad(f"{shown(key)} is there under another key too", key, found=table[name].key, wanted="one")
    table[name] = keyed


def _name_of_copy(keyed: Keyed, name: str) -> str:
    """What the base model calls the tensor, if it may be one of its own."""
    for expression, reason in _UNSUPPORTED:
        if expression.search(f".{name}"):
            raise unsupported(
                f"{shown(keyed.key)} is not served: {reason}",
                file=WEIGHTS_FILE,
                tensor=keyed.key,
                found=keyed.key,
                wanted="lora_A and lora_B weights only",
            )
    match = _COPY.fullmatch(name) if len(name) <= _MAX_KEY else None
    if match is None or not _MODULE.fullmatch(match["module"]):
        key = keyed.key
        raise _bad(f"{shown(key)} is no LoRA weight", key, found=key, wanted="….lora_A.weight or ….lora_B.weight")
    return f"{match['module']}.{match['leaf']}"


def _check_one_adapter(adapters: Iterable[str | None]) -> None:
    names = sorted(map(str, adapters))
    if len(names) > 1:
        found = ", ".join(names)
        raise _bad("the file has weights of several adapters", None, found=found, wanted="one adapter")


def _module(site: str, tensors: Mapping[str, Keyed], kinds: set[str]) -> Module:
    for role in ("lora_A", "lora_B"):
        if role not in tensors:
            key = next(iter(tensors.values())).key
            raise _bad(f"{shown(key)} has no {role}", key, found=f"no {role}", wanted=role)
    a, b = tensors["lora_A"], tensors["lora_B"]
    if len(kinds) > 1:
        raise _bad(f"{shown(a.key)} and {shown(b.key)} do not belong together", b.key, found=b.key, wanted="one kind")
    extras = {role: keyed for role, keyed in tensors.items() if role not in ("lora_A", "lora_B")}
    for keyed in (a, b):
        _check_shape(keyed, dimensions=2)
    for keyed in extras.values():
        _check_shape(keyed, dimensions=1)
        if keyed.tensor.shape[0] != b.tensor.shape[0]:
            found, wanted = keyed.tensor.shape[0], b.tensor.shape[0]
            raise _bad(f"{shown(keyed.key)} has {found} values", keyed.key, found=f"[{found}]", wanted=f"[{wanted}]")
    if a.tensor.shape[0] != b.tensor.shape[1]:
        rows, columns = b.tensor.shape
        raise _bad(
            f"{shown(a.key)} has rank {a.tensor.shape[0]}, {shown(b.key)} {columns}",
            b.key,
            found=f"[{rows}, {columns}]",
            wanted=f"[{rows}, {a.tensor.shape[0]}]",
        )
    name = site
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
    return Module(name, (len(site) - len(name)) // len(".base_layer"), kinds.pop(), a, b, extras)


def _check_shape(keyed: Keyed, dimensions: int) -> None:
    if fault := tensor_fault(keyed):
        raise fault
    key, shape = keyed.key, keyed.tensor.shape
    if len(shape) != dimensions:
        what = "no matrix" if dimensions == 2 else "no vector"
        raise _bad(f"{shown(key)} is {what}", key, found=str(list(shape)), wanted=f"{dimensions} dimensions")
    if 0 in shape:
        raise _bad(f"{shown(key)} is empty", key, found=str(list(shape)), wanted="at least one row and column")


def _bad(message: str, key: str | None, *, found: str, wanted: str) -> AdapterInvalid:
    place = {} if key is None else {"tensor": key}
    return invalid(message, file=WEIGHTS_FILE, found=found, wanted=wanted, **place)
