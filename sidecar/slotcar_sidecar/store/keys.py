"""Finds the LoRA matrices of each site among a file's tensors; every tensor lands on a site or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from slotcar_sidecar.core.errors import AdapterInvalid, AdapterUnsupported
from slotcar_sidecar.store.faults import WEIGHTS_FILE, invalid, shown, unsupported
from slotcar_sidecar.store.tensors import FLOATS, RawTensor

_PREFIX = "base_model.model."
# An adapter's name may stand behind lora_A and lora_B: "default" in files that were not saved by PEFT itself.
_LORA = re.compile(r"(?P<site>.+)\.lora_(?P<side>[AB])(?:\.(?P<adapter>[A-Za-z0-9_\-]+))?\.weight")
_BASE_LAYER = re.compile(r"(^|\.)base_layer(\.|$)")
_SITE = re.compile(r"[!-~]{1,500}")

# The first expression found in a key says why it is refused; the order is from the special to the general.
_UNSUPPORTED: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(expression), reason)
    for expression, reason in (
        (r"\.lora_magnitude_vector", "DoRA rescales the base weights: merge it into the base model"),
        (r"\.lora_embedding_[AB]", "LoRA on an embedding: train it on linear modules"),
        (r"\.lora_B(\.[A-Za-z0-9_\-]+)?\.bias$", "lora_bias adds a bias: train it without"),
        (r"token_adapter|trainable_tokens", "rows of the embedding were trained too: merge it into the base model"),
        (r"modules_to_save", "whole modules were trained too: merge it into the base model"),
        (r"\.experts\.base_layer\.", "expert weights need rows per expert: train it on linear modules"),
        (r"\.base_layer\.", "the base model's own weights or biases: save with save_embedding_layers=False, bias none"),
        (r"\.lora_[^.]+", "a part of a LoRA variant that is not known: train plain LoRA"),
        (
            r"\.(weight|bias)$",
            "full weights, from modules_to_save or a resized vocabulary: save without, or merge it into the base model",
        ),
    )
)


class Pair(NamedTuple):
    """A [rank, in] and B [out, rank] of one site, and their keys."""

    key_a: str
    key_b: str
    a: RawTensor
    b: RawTensor

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def pairs_by_site(tensors: Mapping[str, RawTensor]) -> dict[str, Pair]:
    """The pairs by module path, in its order. Raises AdapterInvalid or AdapterUnsupported, naming the tensor."""
    sides: dict[str, dict[str, tuple[str, RawTensor]]] = {}
    adapters = set()
    for key in sorted(tensors):
        match = _LORA.fullmatch(key.removeprefix(_PREFIX))
        # Nested LoRA on the parameters of experts has keys of this form too.
        if match is None or _BASE_LAYER.search(match["site"]):
            raise _foreign(key)
        if not _SITE.fullmatch(match["site"]):
            raise _bad(f"{shown(key)} names no module", key, found=match["site"][:50], wanted="printable ASCII")
        side = sides.setdefault(match["site"], {})
        if match["side"] in side:
            raise _bad(f"{shown(key)} is there under another key too", key, found=side[match["side"]][0], wanted="one")
        side[match["side"]] = (key, tensors[key])
        adapters.add(match["adapter"])
    if not sides:
        raise _bad("the file has no LoRA weights", None, found="no tensor", wanted="lora_A and lora_B tensors")
    if len(adapters) > 1:
        names = ", ".join(sorted(str(name) for name in adapters))
        raise _bad("the file has weights of several adapters", None, found=names, wanted="one adapter")
    return {site: _pair(side) for site, side in sorted(sides.items())}


def _pair(side: Mapping[str, tuple[str, RawTensor]]) -> Pair:
    for mine, other in (("A", "B"), ("B", "A")):
        if other not in side:
            key = side[mine][0]
            raise _bad(f"{shown(key)} has no lora_{other}", key, found=f"no lora_{other}", wanted=f"lora_{other}")
    (key_a, a), (key_b, b) = side["A"], side["B"]
    _check_matrix(key_a, a)
    _check_matrix(key_b, b)
    if a.shape[0] != b.shape[1]:
        raise _bad(
            f"{shown(key_a)} has rank {a.shape[0]}, {shown(key_b)} {b.shape[1]}",
            key_b,
            found=f"[{b.shape[0]}, {b.shape[1]}]",
            wanted=f"[{b.shape[0]}, {a.shape[0]}]",
        )
    return Pair(key_a, key_b, a, b)


def _check_matrix(key: str, tensor: RawTensor) -> None:
    if tensor.dtype not in FLOATS:
        refuse = unsupported if tensor.dtype.startswith("F") else invalid
        raise refuse(
            f"{shown(key)} has dtype {tensor.dtype}",
            file=WEIGHTS_FILE,
            tensor=key,
            found=tensor.dtype,
            wanted=" or ".join(FLOATS),
        )
    if len(tensor.shape) != 2:
        raise _bad(f"{shown(key)} is no matrix", key, found=str(list(tensor.shape)), wanted="2 dimensions")
    if 0 in tensor.shape:
        raise _bad(f"{shown(key)} is empty", key, found=str(list(tensor.shape)), wanted="at least one row and column")


def _foreign(key: str) -> AdapterInvalid | AdapterUnsupported:
    for expression, reason in _UNSUPPORTED:
        if expression.search(f".{key}"):
            return unsupported(
                f"{shown(key)} is not served: {reason}",
                file=WEIGHTS_FILE,
                tensor=key,
                found=key,
                wanted="lora_A and lora_B weights only",
            )
    return _bad(f"{shown(key)} is no LoRA weight", key, found=key, wanted="….lora_A.weight or ….lora_B.weight")


def _bad(message: str, key: str | None, *, found: str, wanted: str) -> AdapterInvalid:
    place = {} if key is None else {"tensor": key}
    return invalid(message, file=WEIGHTS_FILE, found=found, wanted=wanted, **place)
