"""Reads a PEFT LoRA adapter from its files' bytes: exactly PEFT's meaning, or a refusal that says what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from slotcar_sidecar.core.adapter import SiteLora
from slotcar_sidecar.store.base_model import BaseModel
from slotcar_sidecar.store.config import LoraConfig, parse_config
from slotcar_sidecar.store.experts import parameters_of
from slotcar_sidecar.store.faults import CONFIG_FILE, WEIGHTS_FILE, invalid, shown, unsupported
from slotcar_sidecar.store.keys import Keyed, Module, contents_of
from slotcar_sidecar.store.patterns import values_by_pattern
from slotcar_sidecar.store.shards import Shards, tensors_of
from slotcar_sidecar.store.vectors import check_copies, with_vectors
from slotcar_sidecar.store.weights import HostWeights, Origin, SiteWeights

_MAX_NAMED = 5
# Tensors that a configuration announces: PEFT leaves them out where it does not, and makes them up where they lack.
_ANNOUNCED: Mapping[str, str] = {"magnitude": "use_dora", "lora_bias": "lora_bias"}


class _Adapted(NamedTuple):
    """A module of the file with the site that it is, and what the configuration says of that."""

    module: Module
    site: str
    is_parameter: bool
    rank: int
    alpha: float


def read_peft(
    config_bytes: bytes, weights: bytes | memoryview | Shards, source: str, base: BaseModel | None = None
) -> HostWeights:
    """The verified adapter in adapter_config.json and adapter_model.safetensors, or its shards, whatever way they came.

    The weights are left where they are if that is memory, and not bytes; nobody may write there any more. `base` is
    needed by what depends on the base model's weights alone.

    Raises AdapterInvalid for what is wrong and AdapterUnsupported for what is not served, with the facts file, tensor,
    field, found and wanted as far as they apply; SourceUnavailable if the base model cannot be read.
    """
    config = parse_config(config_bytes)
    contents = contents_of(tensors_of(weights))
    del weights
    adapted, warnings = _adapted(config, contents.modules)
    for each in adapted:
        _check_announced(config, each)
    check_copies(contents.copies, base)
    # With copies in the file, most of its memory would stay for nothing.
    sites = [_site_weights(config, each, base, is_alone=not contents.copies) for each in adapted]
    keyed = [one for each in adapted for one in (each.module.a, each.module.b, *each.module.extras.values())]
    origin = Origin(
        source=source,
        file_dtype=", ".join(sorted({one.tensor.dtype for one in keyed})),
        fields_ignored=config.fields_ignored,
        warnings=(*_effect_warnings(sites), *_name_warnings(config, adapted), *warnings),
    )
    return HostWeights.of(sites, origin)


def _adapted(config: LoraConfig, modules: Sequence[Module]) -> tuple[list[_Adapted], list[str]]:
    """The modules with rank and alpha, and warnings of patterns that gave none."""
    parameters = parameters_of(modules, config.target_parameters)
    paths = [parameters.get(module.site, module.name) for module in modules]
    ranks = values_by_pattern("rank_pattern", config.rank_pattern, config.r, paths)
    alphas = values_by_pattern("alpha_pattern", config.alpha_pattern, config.alpha, paths)
    adapted = [
        _Adapted(module, path, module.site in parameters, ranks.values[path], alphas.values[path])
        for module, path in zip(modules, paths, strict=True)
    ]
    warnings = [
        *_pattern_warnings("rank_pattern", ranks.unused),
        *_pattern_warnings("alpha_pattern", alphas.unused),
    ]
    return [_plain_matrix(each) for each in adapted], warnings


def _plain_matrix(each: _Adapted) -> _Adapted:
    """A parameter `weight` that is a matrix is the module's own, as a router's: linear, as the module would be."""
    rows = each.module.a.tensor.shape[0]
    if each.is_parameter and each.site == f"{each.module.name}.weight" and rows == each.rank:
        return each._replace(site=each.module.name, is_parameter=False)
    return each


def _check_announced(config: LoraConfig, each: _Adapted) -> None:
    for role, field in _ANNOUNCED.items():
        wanted, keyed = getattr(config, field), each.module.extras.get(role)
        if bool(wanted) != (keyed is not None):
            key = each.module.b.key if keyed is None else keyed.key
            raise invalid(
                f"{CONFIG_FILE} has {field} {shown(wanted)}, but {WEIGHTS_FILE} has "
                f"{'no ' + role if keyed is None else shown(key)} for {shown(each.site)}: save it again with PEFT",
                file=WEIGHTS_FILE,
                field=field,
                tensor=key,
                found="none" if keyed is None else key,
                wanted=f"{role} where {field} is true, and nowhere else",
            )


def _site_weights(config: LoraConfig, each: _Adapted, base: BaseModel | None, *, is_alone: bool) -> SiteWeights:
    module, part = each.module, _part(config, each)
    for keyed in (module.a, module.b, *module.extras.values()):
        if not keyed.tensor.is_finite():
            raise invalid(
                f"{shown(keyed.key)} has values that are not finite",
                file=WEIGHTS_FILE,
                tensor=keyed.key,
                found="NaN or Inf",
                wanted="finite values",
            )
    if module.extras and (each.is_parameter or (module.kind == "embedding" and "bias" in module.extras)):
        raise _misplaced(next(iter(module.extras.values())), each)
    site = SiteWeights(part, _tensor(module.a, is_alone), _tensor(module.b, is_alone))
    return with_vectors(site, module, base)


def _tensor(keyed: Keyed, is_alone: bool) -> torch.Tensor:
    tensor = keyed.tensor.to_torch()
    return tensor if is_alone else tensor.clone()


def _part(config: LoraConfig, each: _Adapted) -> SiteLora:
    """Raises AdapterInvalid for another rank: it would give another scale than the trainer meant."""
    a, b = each.module.a.tensor.shape, each.module.b.tensor.shape
    experts, rest = divmod(a[0], each.rank) if each.is_parameter else (0, a[0] - each.rank)
    if rest:
        wanted = f"{'a multiple of ' if each.is_parameter else ''}{each.rank}"
        raise invalid(
            f"{shown(each.module.a.key)} has rank {a[0]}, but {CONFIG_FILE} says {wanted} for {shown(each.site)}",
            file=CONFIG_FILE,
            field="r",
            tensor=each.module.a.key,
            found=str(a[0]),
            wanted=wanted,
        )
    kind = "experts" if each.is_parameter else each.module.kind
    return SiteLora(each.site, each.rank, config.scale(each.rank, each.alpha), a[1], b[0], kind, experts)


def _misplaced(keyed: Keyed, each: _Adapted) -> Exception:
    return unsupported(
        f"{shown(keyed.key)} is not served at {shown(each.site)}: DoRA and biases are served at linear modules, and "
        "DoRA at embeddings",
        file=WEIGHTS_FILE,
        tensor=keyed.key,
        found=keyed.key,
        wanted="lora_A and lora_B weights only",
    )


def _effect_warnings(sites: Sequence[SiteWeights]) -> Iterator[str]:
    names = [site.part.site for site in sites if site.part.scale == 0 and site.vectors is None]
    if names:
        yield f"lora_alpha is 0, so the adapter has no effect, at {_listed(names)}"
    if not any(site.vectors is not None or bool(site.b.any()) for site in sites):
        yield "every lora_B is zero, so the adapter has no effect: it was never trained"


def _name_warnings(config: LoraConfig, adapted: Sequence[_Adapted]) -> Iterator[str]:
    """PEFT would leave such weights out; here the tensors are the truth."""
    if config.target_modules is not None:
        sites = [each.site for each in adapted if not each.is_parameter]
        names = [site for site in sites if not _is_named(site, config.target_modules)]
        if names:
            yield f"target_modules does not name, but the file has weights for, and so adapts, {_listed(names)}"


def _pattern_warnings(field: str, unused: Sequence[str]) -> Iterator[str]:
    if unused:
        yield f"{field} gives no module its value by {_listed(unused)}"


def _is_named(site: str, targets: frozenset[str]) -> bool:
    """Whether the site, or what follows one of its dots, is among the targets."""
    parts = site.split(".")
    return any(".".join(parts[start:]) in targets for start in range(len(parts)))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(map(shown, names[:_MAX_NAMED])) + more
