"""`slotcar spec`, and a server whose sites are of its file while its weights are of --base-model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.adapters import make_adapter, tiny_llama, tiny_qwen2
from tests.corpus.models import tiny_mixtral
from tests.server import SidecarProcess
from tests.unit.command.called import invoke

EMBEDDING = "model.embed_tokens"
Q = [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]


def sites(folder: Path, *options: str) -> dict[str, Any]:
    result = invoke("spec", "--from", str(folder), *options)
    assert result.exit_code == 0, result.output
    return {site["name"]: site for site in json.loads(result.stdout)["sites"]}


def test_each_option_adds_its_sites_alone(tmp_path: Path) -> None:
    tiny_qwen2().save_pretrained(str(tmp_path / "qwen2"))
    tiny_mixtral().save_pretrained(str(tmp_path / "mixtral"))
    for model, option, added in (
        ("qwen2", "--embeddings", {EMBEDDING: "embedding"}),
        ("qwen2", "--tied-head", {"lm_head": "linear"}),
        (
            "mixtral",
            "--experts",
            {
                f"model.layers.{layer}.mlp.{name}": kind
                for layer in (0, 1)
                for name, kind in (
                    ("experts.gate_up_proj", "experts"),
                    ("experts.down_proj", "experts"),
                    ("gate", "linear"),
                )
            },
        ),
    ):
        plain, more = sites(tmp_path / model), sites(tmp_path / model, option)
        assert {name: more[name]["kind"] for name in more.keys() - plain.keys()} == added
        assert {name: more[name] for name in plain} == plain


def test_what_the_folder_has_not_is_said(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(str(tmp_path))
    result = invoke("spec", "--from", str(tmp_path), "--experts")
    assert result.exit_code == 1
    assert str(tmp_path) in result.stderr
    assert "no experts" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, and DoRA adapters of it: at linear layers, with the embedding, with the head."""
    root, model = tmp_path_factory.mktemp("root"), tiny_qwen2()
    model.save_pretrained(str(root / "base"))
    for name, modules in (("dora", ["q_proj"]), ("embedding", ["q_proj", "embed_tokens"]), ("head", ["lm_head"])):
        make_adapter(root / name, model, target_modules=modules, use_dora=True)
    return root


@pytest.fixture(scope="module")
def with_both(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """--model-spec, made with the embedding, beside --base-model."""
    file = root / "spec.json"
    file.write_text(invoke("spec", "--from", str(root / "base"), "--embeddings").stdout, encoding="utf-8")
    extra = ("--base-model", str(root / "base"), "--model-spec", str(file))
    with SidecarProcess(tmp_path_factory.mktemp("s"), root, slots=4, extra=extra) as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def with_file(
    root: Path, with_both: SidecarProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SidecarProcess]:
    """The same --model-spec alone."""
    with SidecarProcess(tmp_path_factory.mktemp("s"), root, extra=with_both.extra[2:]) as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def with_folder(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """--base-model alone."""
    extra = ("--base-model", str(root / "base"))
    with SidecarProcess(tmp_path_factory.mktemp("s"), root, extra=extra) as sidecar:
        yield sidecar


def load(sidecar: SidecarProcess, name: str) -> Result:
    return invoke("load", name, str(sidecar.root / name), "--json", "--target", sidecar.target)


def test_the_file_says_the_sites_and_the_base_model_has_the_weights(with_both: SidecarProcess) -> None:
    report = json.loads(load(with_both, "embedding").stdout)
    assert report["sites_matched"] == [EMBEDDING, *Q]


def test_without_the_file_the_embedding_is_no_site_and_the_refusal_says_how_to_get_it(
    with_folder: SidecarProcess,
) -> None:
    assert load(with_folder, "dora").exit_code == 0
    refused = load(with_folder, "embedding")
    assert refused.exit_code == 1
    assert f"embedding weights for {EMBEDDING}, and the model spec has no such site" in refused.stdout
    assert "`slotcar spec --embeddings`" in refused.stdout


def test_a_head_that_the_spec_lacks_is_refused_with_its_option(with_both: SidecarProcess) -> None:
    refused = load(with_both, "head")
    assert refused.exit_code == 1
    assert "weights for lm_head, and the model spec has no such site" in refused.stdout
    assert "`slotcar spec --tied-head`" in refused.stdout


def test_without_the_base_model_there_are_no_weights_for_dora(with_file: SidecarProcess) -> None:
    refused = load(with_file, "dora")
    assert refused.exit_code == 1
    assert "ADAPTER_UNSUPPORTED" in refused.stdout
    assert "--base-model" in refused.stdout
