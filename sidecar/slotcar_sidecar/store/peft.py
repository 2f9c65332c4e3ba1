"""Reads a PEFT LoRA adapter from its two files' bytes: exactly PEFT's meaning, or a refusal that says what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slotcar_sidecar.core.adapter import SiteLora
from slotcar_sidecar.store.config import LoraConfig, parse_config
from slotcar_sidecar.store.faults import CONFIG_FILE, WEIGHTS_FILE, invalid, shown
from slotcar_sidecar.store.keys import Pair, pairs_by_site
from slotcar_sidecar.store.patterns import values_by_pattern
from slotcar_sidecar.store.tensors import read_tensors
from slotcar_sidecar.store.weights import HostWeights, Origin, SiteWeights

_MAX_NAMED = 5


def read_peft(config_bytes: bytes, weights_bytes: bytes | memoryview, source: str) -> HostWeights:
    """The verified adapter in adapter_config.json and adapter_model.safetensors, whatever way they came.

    The weights are left where they are if that is memory, and not bytes; nobody may write there any more.

    Raises AdapterInvalid for what is wrong and AdapterUnsupported for what is not served, with the facts file, tensor,
    field, found and wanted as far as they apply.
    """
    config = parse_config(config_bytes)
    tensors = read_tensors(weights_bytes, WEIGHTS_FILE)
    del weights_bytes
    pairs = pairs_by_site(tensors)
    ranks = values_by_pattern("rank_pattern", config.rank_pattern, config.r, list(pairs))
    alphas = values_by_pattern("alpha_pattern", config.alpha_pattern, config.alpha, list(pairs))
    for site, pair in pairs.items():
        _check_rank(site, pair, ranks.values[site])
    sites = [_site_weights(site, pair, config.scale(pair.rank, alphas.values[site])) for site, pair in pairs.items()]
    dtypes = {tensor.dtype for pair in pairs.values() for tensor in (pair.a, pair.b)}
    origin = Origin(
        source=source,
        file_dtype=", ".join(sorted(dtypes)),
        fields_ignored=config.fields_ignored,
        warnings=(
            *_effect_warnings(sites),
            *_name_warnings(config, [part.site for part, _, _ in sites]),
            *_pattern_warnings("rank_pattern", ranks.unused),
            *_pattern_warnings("alpha_pattern", alphas.unused),
        ),
    )
    return HostWeights.of(sites, origin)


def _check_rank(site: str, pair: Pair, wanted: int) -> None:
    """The tensor is the truth; a configuration that disagrees would give another scale than the trainer meant."""
    if pair.rank != wanted:
        raise invalid(
            f"{shown(pair.key_a)} has rank {pair.rank}, but {CONFIG_FILE} says {wanted} for {shown(site)}",
            file=CONFIG_FILE,
            field="r",
            tensor=pair.key_a,
            found=str(pair.rank),
            wanted=str(wanted),
        )


def _site_weights(site: str, pair: Pair, scale: float) -> SiteWeights:
    for key, tensor in ((pair.key_a, pair.a), (pair.key_b, pair.b)):
        if not tensor.is_finite():
            raise invalid(
                f"{shown(key)} has values that are not finite",
                file=WEIGHTS_FILE,
                tensor=key,
                found="NaN or Inf",
                wanted="finite values",
            )
    a, b = pair.a.to_torch(), pair.b.to_torch()
    return SiteWeights(SiteLora(site, pair.rank, scale, a.shape[1], b.shape[0]), a, b)


def _effect_warnings(sites: Sequence[SiteWeights]) -> Iterator[str]:
    names = [part.site for part, _, _ in sites if part.scale == 0]
    if names:
        yield f"lora_alpha is 0, so the adapter has no effect, at {_listed(names)}"
    if not any(bool(site.b.any()) for site in sites):
        yield "every lora_B is zero, so the adapter has no effect: it was never trained"


def _name_warnings(config: LoraConfig, sites: Sequence[str]) -> Iterator[str]:
    """PEFT would leave such weights out; here the tensors are the truth."""
    if config.target_modules is not None:
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
