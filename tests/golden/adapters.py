"""Writes the tables of docs/adapters.md from the code and from a run of the corpus: `make docs`."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable
from pathlib import Path

import peft
from slotcar_sidecar.core.errors import SlotcarError
from slotcar_sidecar.store.base_model import BaseModel
from slotcar_sidecar.store.fields import (
    EFFECTIVE,
    INIT_FIELD,
    INIT_PLAIN,
    INIT_REFUSED,
    REFUSED,
    WITHOUT_EFFECT,
    Refused,
)

from tests.corpus.build import make, read
from tests.corpus.models import model_of
from tests.corpus.variants import REFUSED as REFUSED_VARIANTS
from tests.corpus.variants import REWRITTEN, SUPPORTED, Variant
from tests.golden.pages import page_with

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adapters.md"


def fields_table() -> str:
    """One row per field that any release of PEFT writes."""
    known = {*EFFECTIVE, *WITHOUT_EFFECT, *REFUSED, INIT_FIELD}
    names = known | {field.name for field in dataclasses.fields(peft.LoraConfig)}
    return _table("| field | | what becomes of it |", "|---|---|---|", map(_field_row, sorted(names)))


def _field_row(name: str) -> str:
    if name in EFFECTIVE:
        return f"| `{name}` | supported | {EFFECTIVE[name]} |"
    if name == INIT_FIELD:
        plain = ", ".join(f"`{value}`" for value in sorted(INIT_PLAIN))
        return f"| `{name}` | in part | `true`, `false`, {plain}; others are refused: {_said(INIT_REFUSED)} |"
    if name in WITHOUT_EFFECT:
        return f"| `{name}` | irrelevant | |"
    return f"| `{name}` | refused | {_said(REFUSED[name])} |"


def _said(refused: Refused) -> str:
    return _cell(f"{refused.reason}; {refused.remedy}")


def supported_table(variants: dict[str, Variant]) -> str:
    return _table("| adapter | of | |", "|---|---|---|", (supported_row(name, each) for name, each in variants.items()))


def supported_row(name: str, variant: Variant) -> str:
    return f"| {name} | {variant.recipe.model} | {'with `--base-model`' if variant.base else ''} |"


def refused_table(messages: dict[str, SlotcarError]) -> str:
    rows = (refused_row(name, REFUSED_VARIANTS[name], error) for name, error in messages.items())
    return _table("| adapter | of | refused | because |", "|---|---|---|---|", rows)


def refused_row(name: str, variant: Variant, error: SlotcarError) -> str:
    beside = ", with `--base-model`" if variant.base else ""
    return f"| {name} | {variant.recipe.model}{beside} | `{error.reason}` | {_cell(error.message)} |"


def page_with_declared(text: str) -> str:
    """The page with the tables that need no run: those of fields, and of what is supported."""
    text = page_with(text, "fields", fields_table())
    text = page_with(text, "supported", supported_table(dict(SUPPORTED)))
    return page_with(text, "rewritten", supported_table(dict(REWRITTEN)))


def messages() -> dict[str, SlotcarError]:
    """What each variant that is refused is told."""
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        bases: dict[str, BaseModel] = {}
        for number, (name, variant) in enumerate(REFUSED_VARIANTS.items()):
            model = variant.recipe.model
            if variant.base and model not in bases:
                model_of(model).save_pretrained(f"{scratch}/{model}")
                bases[model] = BaseModel(Path(scratch, model))
            folder = make(variant.recipe, Path(scratch, f"adapter-{number}"))
            try:
                read(folder, bases[model] if variant.base else None)
            except SlotcarError as error:
                found[name] = error
    return found


def _table(head: str, rule: str, rows: Iterable[str]) -> str:
    return "\n".join([head, rule, *rows]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    page = page_with_declared(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page_with(page, "refused", refused_table(messages())), encoding="utf-8")
