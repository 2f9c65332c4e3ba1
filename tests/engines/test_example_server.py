"""examples/kubernetes/transformers/server.py serves a model whose adapters are a real sidecar's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from slotcar_client import connect
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.adapters import make_adapter, tiny_llama
from tests.server import SidecarProcess

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "kubernetes" / "transformers" / "server.py"
PROMPT = "w1 w2 w3"
TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are the words w0 to w255, and an adapter of it."""
    folder = tmp_path_factory.mktemp("server")
    model = tiny_llama()
    model.save_pretrained(str(folder / "model"))
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(256)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(str(folder / "model"))
    make_adapter(folder / "adapters" / "sql", model, seed=3)
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    extra = ("--base-model", str(folder / "model"))
    with SidecarProcess(folder, folder / "adapters", extra=extra) as sidecar:
        with connect(sidecar.target) as client:
            client.load("sql", folder / "adapters" / "sql")
        environment = os.environ | {"SLOTCAR_TARGET": sidecar.target, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(PROGRAM), str(folder / "model"), "0"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line.startswith("serving at "), line
            yield f"http://127.0.0.1:{line.split()[-1]}"
            server.terminate()
            assert server.wait(30) == 0


def post(address: str, **body: Any) -> tuple[int, dict[str, str]]:
    request = urllib.request.Request(f"{address}/generate", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def expected(model: Any) -> str:
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        found = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
        )
    return " ".join(f"w{token}" for token in found[0][3:].tolist())


def test_an_adapter_answers_as_it_does_in_peft(folder: Path, address: str) -> None:
    base = LlamaForCausalLM.from_pretrained(folder / "model").eval()
    plain = expected(base)
    adapted = expected(PeftModel.from_pretrained(base, str(folder / "adapters" / "sql")).eval())
    assert plain != adapted
    for _ in range(2):
        assert post(address, prompt=PROMPT, adapter="sql", tokens=TOKENS) == (200, {"text": adapted})
        assert post(address, prompt=PROMPT, tokens=TOKENS) == (200, {"text": plain})


def test_an_adapter_that_nobody_loaded_is_not_the_base_model(address: str) -> None:
    status, body = post(address, prompt=PROMPT, adapter="other", tokens=TOKENS)
    assert status == 404
    assert "other" in body["error"]


@pytest.mark.parametrize("body", [{}, {"prompt": PROMPT}, {"prompt": PROMPT, "tokens": "many"}])
def test_a_request_that_is_none_is_refused(address: str, body: dict[str, str]) -> None:
    assert post(address, **body)[0] == 400


def test_it_is_healthy(address: str) -> None:
    with urllib.request.urlopen(f"{address}/health", timeout=30) as response:
        assert response.status == 200
