"""Derives what a module adds beside its low-rank part, gain ⊙ y_base + bias, from the file and the base model.

With W, b the base's weight [out, in] and bias, V = W + s·B·A, m the magnitude, and b' a trained bias:

    g = m / ‖V‖ per row        gain = g − 1        bias = (b' − b) − gain ⊙ b + s · lora_bias

Source: peft.tuners.lora.dora; all in float64, rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from slotcar_sidecar.core.adapter import SiteLora
from slotcar_sidecar.core.errors import AdapterInvalid, AdapterUnsupported
from slotcar_sidecar.store.base_model import BaseModel
from slotcar_sidecar.store.checkpoint import StoredTensor
from slotcar_sidecar.store.faults import WEIGHTS_FILE, invalid, shown, unsupported
from slotcar_sidecar.store.keys import Keyed, Module
from slotcar_sidecar.store.tensors import FLOATS
from slotcar_sidecar.store.weights import SiteVectors, SiteWeights

__all__ = ["check_copies", "with_vectors"]

# Elements of the base's weight that are in memory at a time, as float64.
_CHUNK = 1 << 20
_WITHOUT_BASE: Mapping[str, str] = {
    "magnitude": "DoRA needs the norms of the base model's weights",
    "bias": "the base model's bias was trained too, and the file has its sum with what was trained",
}
_MERGE = "merge the adapter into the base model"
_HEADS = ("lm_head.weight", "embed_tokens.weight", "wte.weight", "embed_out.weight", "embed_in.weight")


def with_vectors(site: SiteWeights, module: Module, base: BaseModel | None) -> SiteWeights:
    """The weights of a site with its extras and what follows from them.

    Raises AdapterUnsupported where `base` is needed and None, AdapterInvalid for a base model that does not fit, and
    SourceUnavailable for one that cannot be read.
    """
    if not module.extras:
        return site
    part, extras = site.part, {role: keyed.tensor.to_torch() for role, keyed in module.extras.items()}
    bias = torch.zeros(part.out_features, dtype=torch.float64)
    gain = None
    if "lora_bias" in extras:
        bias += part.scale * extras["lora_bias"].double()
    role = next((role for role in _WITHOUT_BASE if role in extras), None)
    if role is not None:
        base = _needed(base, module.extras[role], role)
        extras["base"] = torch.tensor(list(base.fingerprint), dtype=torch.float32)
        base_bias = _bias(base, module)
        if "magnitude" in extras:
            gain = extras["magnitude"].double() / _norms(base, site, module) - 1
            bias -= gain * base_bias
        if "bias" in extras:
            bias += extras["bias"].double() - base_bias
    has_bias = bool(bias.any()) or "lora_bias" in extras or "bias" in extras
    vectors = SiteVectors(
        None if gain is None else _rounded(gain, module.extras["magnitude"].key),
        _rounded(bias, next(iter(module.extras.values())).key) if has_bias else None,
    )
    return site._replace(part=_with(part, vectors), extras=extras, vectors=vectors)


def check_copies(copies: Mapping[str, Keyed], base: BaseModel | None) -> None:
    """Raises AdapterUnsupported for a tensor of the base model itself, unless it has just the base model's values."""
    for name, keyed in sorted(copies.items()):
        if base is None:
            why = "whether it is the base model's own cannot be told: start the server with --base-model"
            raise _full(keyed, why, f"or {_remedy(name)}")
        stored = base.find(name)
        if stored is None:
            raise _full(keyed, "the base model has no such tensor", _remedy(name))
        if stored.shape != keyed.tensor.shape:
            found, wanted = list(keyed.tensor.shape), list(stored.shape)
            resized = "the vocabulary was resized" if name.endswith(_HEADS) else "it is another model's"
            raise _full(keyed, f"its shape is {found}, the base model's is {wanted}: {resized}", _MERGE)
        if stored.dtype not in FLOATS or keyed.tensor.dtype not in FLOATS or not _is_equal(keyed, stored, base):
            raise _full(keyed, "it was trained too: its values are not the base model's", _MERGE)


def _is_equal(keyed: Keyed, stored: StoredTensor, base: BaseModel) -> bool:
    mine = keyed.tensor.to_torch().view(stored.shape or (1,))
    start = 0
    for rows in base.rows(stored, _rows_at_a_time(stored)):
        if not torch.equal(mine[start : start + len(rows)].double(), rows.double()):
            return False
        start += len(rows)
    return True


def _remedy(name: str) -> str:
    if name.endswith(".bias"):
        return "train with bias none or lora_only"
    return "save the adapter with save_embedding_layers=False if it was not trained"


def _full(keyed: Keyed, why: str, remedy: str) -> AdapterUnsupported:
    what = "the bias of a module that has no LoRA" if keyed.key.endswith(".bias") else "full weights"
    return unsupported(
        f"{shown(keyed.key)} is {what}; {why}; {remedy}",
        file=WEIGHTS_FILE,
        tensor=keyed.key,
        found=list(keyed.tensor.shape),
        wanted="LoRA weights, or a copy of the base model's",
    )


def _needed(base: BaseModel | None, keyed: Keyed, role: str) -> BaseModel:
    if base is None:
        raise unsupported(
            f"{shown(keyed.key)} needs the base model: {_WITHOUT_BASE[role]}; start the server with --base-model, "
            f"or {_MERGE}",
            file=WEIGHTS_FILE,
            field="use_dora" if role == "magnitude" else "bias",
            tensor=keyed.key,
            found=keyed.key,
            wanted="--base-model",
        )
    return base


def _norms(base: BaseModel, site: SiteWeights, module: Module) -> torch.Tensor:
    """‖V‖ per output, float64 [out]."""
    part = site.part
    stored = _stored(base, f"{module.name}.weight", module, dimensions=2)
    shapes = {
        "linear": (part.out_features, part.in_features),
        "embedding": (part.in_features, part.out_features),
    }
    # Of an embedding and of GPT-2's linear layers the outputs are the columns.
    by_column = part.kind == "embedding" or base.is_conv1d(module.name)
    wanted = shapes["embedding" if by_column else "linear"]
    if stored.shape != wanted:
        raise _mismatch(module, f"{module.name}.weight", found=list(stored.shape), wanted=list(wanted))
    a, b = site.a.double(), site.b.double() * part.scale
    left, right = (a.T, b.T) if by_column else (b, a)
    squares, start = torch.zeros(part.out_features, dtype=torch.float64), 0
    for rows in base.rows(stored, _rows_at_a_time(stored)):
        stop = start + len(rows)
        values = rows.double().addmm_(left[start:stop], right).square_()
        if by_column:
            squares += values.sum(0)
        else:
            squares[start:stop] = values.sum(1)
        start = stop
    return squares.sqrt_()


def _bias(base: BaseModel, module: Module) -> torch.Tensor:
    """The base's bias, float64 [out]; zeros where it has none and the adapter does not train it."""
    name, out_features = f"{module.name}.bias", module.b.tensor.shape[0]
    if base.find(name) is None and "bias" not in module.extras:
        return torch.zeros(out_features, dtype=torch.float64)
    stored = _stored(base, name, module, dimensions=1)
    if stored.shape != (out_features,):
        raise _mismatch(module, name, found=list(stored.shape), wanted=[out_features])
    return base.tensor(stored).double()


def _stored(base: BaseModel, name: str, module: Module, dimensions: int) -> StoredTensor:
    stored = base.find(name)
    if stored is None or len(stored.shape) != dimensions or stored.dtype not in FLOATS:
        found = "none" if stored is None else f"{stored.dtype} {list(stored.shape)}"
        raise _mismatch(module, name, found=found, wanted=f"{dimensions} dimensions of {' or '.join(FLOATS)}")
    return stored


def _mismatch(module: Module, name: str, *, found: object, wanted: object) -> AdapterInvalid:
    keyed = next(iter(module.extras.values()))
    return invalid(
        f"{shown(keyed.key)} needs {shown(name)} of the base model, which has {shown(found)}, wanted {shown(wanted)}: "
        "was it trained on another base model?",
        file=WEIGHTS_FILE,
        tensor=keyed.key,
        found=found,
        wanted=shown(wanted),
    )


def _rows_at_a_time(stored: StoredTensor) -> int:
    return max(1, _CHUNK // max(1, int(np.prod(stored.shape[1:], dtype=np.int64))))


def _rounded(values: torch.Tensor, key: str) -> torch.Tensor:
    result = values.float()
    if not result.isfinite().all():
        raise invalid(
            f"{shown(key)} gives a value that is not finite: a row of W + sBA is zero, or a number is too large",
            file=WEIGHTS_FILE,
            tensor=key,
            found="NaN or Inf",
            wanted="finite values",
        )
    return result


def _with(part: SiteLora, vectors: SiteVectors) -> SiteLora:
    return SiteLora(
        part.site,
        part.rank,
        part.scale,
        part.in_features,
        part.out_features,
        part.kind,
        part.experts,
        has_gain=vectors.gain is not None,
        has_bias=vectors.bias is not None,
    )
