"""Every adapter of the corpus has PEFT's numbers, or the refusal that is expected of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from slotcar_sidecar.core.errors import SlotcarError
from slotcar_sidecar.store.base_model import BaseModel

from tests.corpus.build import make, peft_outputs, read
from tests.corpus.device import computed
from tests.corpus.models import model_of, outputs_of
from tests.corpus.reference import adapt
from tests.corpus.variants import REFUSED, REWRITTEN, SUPPORTED, Variant
from tests.golden import adapters
from tests.tolerances import TOLERANCES

Bases = Callable[[Variant], BaseModel | None]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """The base model that a variant is read beside."""
    found: dict[str, BaseModel] = {}

    def base_of(variant: Variant) -> BaseModel | None:
        name = variant.recipe.model
        if variant.base and name not in found:
            folder = tmp_path_factory.mktemp("base")
            model_of(name).save_pretrained(folder)
            found[name] = BaseModel(folder)
        return found[name] if variant.base else None

    return base_of


def cases(table: Mapping[str, Variant]) -> list[object]:
    return [
        pytest.param(variant, id=name, marks=[] if variant.fast else [pytest.mark.full])
        for name, variant in table.items()
    ]


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    relative, absolute = TOLERANCES[torch.float32]
    torch.testing.assert_close(found, wanted, rtol=relative, atol=absolute)


@pytest.mark.parametrize("variant", cases({**SUPPORTED, **REWRITTEN}))
def test_it_is_what_peft_computes(variant: Variant, bases: Bases, tmp_path: Path) -> None:
    recipe = variant.recipe
    weights = read(make(recipe, tmp_path / "adapter"), bases(variant))
    original = dataclasses.replace(recipe, edit=None, shards=1)
    wanted = peft_outputs(make(original, tmp_path / "original"), model_of(recipe.model))
    assert_close(outputs_of(adapt(model_of(recipe.model), weights)), wanted)
    for site, found, truth in computed(weights):
        torch.testing.assert_close(
            found.double(), truth, rtol=1e-5, atol=1e-5, msg=lambda text, at=site: f"{at}: {text}"
        )
    without = outputs_of(model_of(recipe.model))
    assert weights.adapter.warnings or (wanted - without).abs().max() > 1e-3


@pytest.mark.parametrize("variant", cases(REFUSED))
def test_it_is_refused(variant: Variant, bases: Bases, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    wanted = variant.refusal
    assert wanted is not None
    folder = make(variant.recipe, tmp_path)
    with pytest.raises(SlotcarError) as caught:
        read(folder, bases(variant))
    error = caught.value
    assert error.reason is wanted.reason
    assert wanted.says in error.message
    row = adapters.refused_row(request.node.callspec.id, variant, error)
    assert f"{row}\n" in adapters.PAGE.read_text(encoding="utf-8"), "run make docs"
    for name in ("field", "tensor"):
        place = getattr(wanted, name)
        assert place is None or error.facts[name] == place, error.message


def test_the_page_is_fresh() -> None:
    page = adapters.PAGE.read_text(encoding="utf-8")
    assert page == adapters.page_with_declared(page), "run make docs"
    refused = page.partition("<!-- refused -->")[2]
    assert [line.split(" | ")[0].removeprefix("| ") for line in refused.splitlines() if line.startswith("| ")][1:] == [
        *REFUSED
    ]


def test_there_are_enough() -> None:
    assert len({**SUPPORTED, **REWRITTEN}) + len(REFUSED) >= 70
