"""Reads adapter_config.json: what PEFT would compute from it, or a refusal that names the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slotcar_sidecar.core.errors import AdapterInvalid, AdapterUnsupported
from slotcar_sidecar.store.faults import CONFIG_FILE, invalid, shown, unsupported
from slotcar_sidecar.store.fields import (
    EFFECTIVE,
    INIT_FIELD,
    INIT_PLAIN,
    INIT_REFUSED,
    REFUSED,
    WITHOUT_EFFECT,
    Refused,
)
from slotcar_sidecar.store.strict_json import parse_object

_MAX_RANK = 1 << 16
_MAX_ALPHA = 1e30
_MAX_TARGETS = 256
_BIASES = ("none", "all", "lora_only")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What of a configuration gives the result; `target_modules` are None when they are not a list of names."""

    r: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: frozenset[str] | None
    target_parameters: tuple[str, ...]
    lora_bias: bool
    use_dora: bool
    fields_ignored: tuple[str, ...]

    def scale(self, rank: int, alpha: float) -> float:
        """alpha / rank, or alpha / √rank with use_rslora."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def parse_config(data: bytes) -> LoraConfig:
    """Raises AdapterInvalid or AdapterUnsupported, naming the field."""
    fields = parse_object(data, CONFIG_FILE)
    _check_type(fields)
    _check_bias(fields.get("bias"))
    ignored = sorted(shown(name) for name, value in fields.items() if _is_ignored(name, value))
    targets = fields.get("target_modules")
    return LoraConfig(
        r=_rank("r", fields.get("r")),
        alpha=_alpha("lora_alpha", fields.get("lora_alpha")),
        use_rslora=_flag("use_rslora", fields.get("use_rslora")),
        rank_pattern={key: _rank("rank_pattern", value) for key, value in _table("rank_pattern", fields).items()},
        alpha_pattern={key: _alpha("alpha_pattern", value) for key, value in _table("alpha_pattern", fields).items()},
        target_modules=frozenset(name for name in targets if isinstance(name, str))
        if isinstance(targets, list)
        else None,
        target_parameters=_names("target_parameters", fields.get("target_parameters")),
        lora_bias=_flag("lora_bias", fields.get("lora_bias")),
        use_dora=_flag("use_dora", fields.get("use_dora")),
        fields_ignored=tuple(ignored),
    )


def _check_type(fields: Mapping[str, Any]) -> None:
    found = fields.get("peft_type")
    if not isinstance(found, str):
        raise _malformed("peft_type", found, '"LORA"')
    if found != "LORA":
        raise unsupported(
            f"{CONFIG_FILE} has peft_type {shown(found)}: only LORA is served; merge the adapter into the base model",
            file=CONFIG_FILE,
            field="peft_type",
            found=found,
            wanted="LORA",
        )


def _check_bias(value: object) -> None:
    """Whether there are biases is what the tensors say, but it must be a way to train them that is known."""
    if value not in (None, *_BIASES):
        raise _malformed("bias", value, " or ".join(_BIASES))


def _is_ignored(name: str, value: object) -> bool:
    """Whether a field is set and has no effect. Raises AdapterUnsupported if its effect is not served."""
    if name in EFFECTIVE:
        return False
    if name in WITHOUT_EFFECT:
        return not _same(value, WITHOUT_EFFECT[name])
    if name == INIT_FIELD:
        _check_init(value)
        return value not in (None, True)
    refused = REFUSED.get(name)
    if _is_empty(value):
        return refused is None
    if refused is None:
        refused = Refused("this field is not known, so its effect is not", "remove it if it has none")
    if not _same(value, refused.default):
        raise _refusal(name, value, refused)
    return False


def _check_init(value: object) -> None:
    plain = value is None or isinstance(value, bool) or (isinstance(value, str) and value.lower() in INIT_PLAIN)
    if not plain:
        raise _refusal(INIT_FIELD, value, INIT_REFUSED)


def _refusal(name: str, value: object, refused: Refused) -> AdapterUnsupported:
    return unsupported(
        f"{CONFIG_FILE} sets {shown(name)} to {shown(value)}: {refused.reason}; {refused.remedy}",
        file=CONFIG_FILE,
        field=name,
        found=value,
        wanted="null, false or empty" if refused.default is None else shown(refused.default),
    )


def _is_empty(value: object) -> bool:
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def _same(value: object, default: object) -> bool:
    """Equal as JSON values, where 1 is not true, and all that is null, false or empty is the same."""
    if _is_empty(value):
        return _is_empty(default)
    return isinstance(value, bool) == isinstance(default, bool) and value == default


def _table(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _malformed(name, value, "an object of patterns")
    return value


def _flag(name: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise _malformed(name, value, "true or false")
    return bool(value)


def _names(name: str, value: object) -> tuple[str, ...]:
    names = [] if value is None else value
    if not isinstance(names, list) or len(names) > _MAX_TARGETS or not all(map(_is_name, names)):
        raise _malformed(name, value, f"a list of at most {_MAX_TARGETS} names in printable ASCII")
    return tuple(names)


def _is_name(value: object) -> bool:
    """As the names of modules in the file's keys: what is answered and shown is made of both."""
    return isinstance(value, str) and value.isascii() and value.isprintable()


def _rank(name: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_RANK:
        raise _malformed(name, value, f"an integer from 1 to {_MAX_RANK}")
    return value


def _alpha(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_ALPHA:
        raise _malformed(name, value, f"a number of at most {_MAX_ALPHA:g}")
    return float(value)


def _malformed(name: str, value: object, wanted: str) -> AdapterInvalid:
    what = "nothing" if value is None else value
    said = json.dumps(value) if isinstance(value, str) else what
    return invalid(
        f"{CONFIG_FILE} has {shown(said)} for {name}, wanted {wanted}",
        file=CONFIG_FILE,
        field=name,
        found=what,
        wanted=wanted,
    )
