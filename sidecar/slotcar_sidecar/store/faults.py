"""Builds the store's refusals: each with its facts, shown short and printable, as they quote files of strangers."""

from __future__ import annotations

import json

from slotcar_sidecar.core.errors import AdapterInvalid, AdapterUnsupported

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
_MAX_SHOWN = 200


def shown(value: object) -> str:
    """`value` as one printable line of at most 200 characters; a value that JSON has is written as in JSON."""
    if isinstance(value, str):
        text = value if value and value.isprintable() else repr(value)
    else:
        try:
            text = json.dumps(value, default=str, ensure_ascii=True)
        except RecursionError:
            text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"


def invalid(message: str, *, found: object = None, wanted: str | None = None, **place: str) -> AdapterInvalid:
    """A refusal of what cannot be right; `place` is any of file, field, tensor."""
    return AdapterInvalid(message, **_facts(found, wanted, place))


def unsupported(message: str, *, found: object = None, wanted: str | None = None, **place: str) -> AdapterUnsupported:
    """A refusal of what is right for PEFT and not served here; `place` is any of file, field, tensor."""
    return AdapterUnsupported(message, **_facts(found, wanted, place))


def _facts(found: object, wanted: str | None, place: dict[str, str]) -> dict[str, object]:
    return {key: shown(value) for key, value in place.items()} | {
        "found": None if found is None else shown(found),
        "wanted": wanted,
    }
