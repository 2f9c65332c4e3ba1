"""examples/kubernetes/transformers/server.py serves a model whose adapters are a real sidecar's."""

from __future__ import annotations

import contextlib
import json
import os
import socket
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
def target(folder: Path) -> Iterator[str]:
    """Of a sidecar that has the adapter."""
    extra = ("--base-model", str(folder / "model"))
    with SidecarProcess(folder, folder / "adapters", extra=extra) as sidecar:
        with connect(sidecar.target) as client:
            client.load("sql", folder / "adapters" / "sql")
        yield sidecar.target


@contextlib.contextmanager
def served(folder: Path, target: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The program, and its port."""
    environment = os.environ | {"SLOTCAR_TARGET": target, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(PROGRAM), str(folder / "model"), "0"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server, int(said(server).removeprefix("serving at "))
            server.terminate()
            assert server.wait(60) == 0
        finally:
            server.kill()


def said(server: subprocess.Popen[str]) -> str:
    """Its next line."""
    assert server.stdout is not None
    return server.stdout.readline().strip()


@pytest.fixture(scope="module")
def address(folder: Path, target: str) -> Iterator[str]:
    with served(folder, target) as (_, port):
        yield f"http://127.0.0.1:{port}"


def post(address: str, **body: Any) -> tuple[int, dict[str, str]]:
    return post_text(address, json.dumps(body))


def post_text(address: str, body: str) -> tuple[int, dict[str, str]]:
    request = urllib.request.Request(f"{address}/generate", body.encode())
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


WRONG = {
    "": "body: found b'', wanted JSON",
    "[" * 100_000: "wanted JSON",
    "[" * 900 + "]" * 900: "wanted an object",
    "[1]": "body: found [1], wanted an object",
    "{}": "prompt: found None, wanted text",
    '{"prompt": ""}': "prompt: found '', wanted text",
    '{"prompt": 1}': "prompt: found 1, wanted text",
    '{"prompt": "w1"}': "tokens: found None, wanted a number from 1 to 512",
    '{"prompt": "w1", "tokens": "many"}': "tokens: found 'many'",
    '{"prompt": "w1", "tokens": 0}': "tokens: found 0",
    '{"prompt": "w1", "tokens": true}': "tokens: found True",
    '{"prompt": "w1", "tokens": 513}': "tokens: found 513",
    '{"prompt": " ", "tokens": 1}': "prompt: found 0, wanted 1 to",
    '{"prompt": "w1", "tokens": 1, "adapter": ""}': "adapter: found '', wanted the name of an adapter, or null",
    '{"prompt": "w1", "tokens": 1, "adapter": ["sql"]}': "adapter: found ['sql']",
    '{"prompt": "w1", "tokens": 1, "adapter": "\\ud800"}': "adapter: found '\\ud800'",
    '{"prompt": "w1", "tokens": 1, "adaptor": "sql"}': "body: found 'adaptor', wanted prompt, adapter and tokens",
}


@pytest.mark.parametrize("body", WRONG, ids=lambda body: body[:60])
def test_a_request_that_is_none_is_refused(address: str, body: str) -> None:
    """With what is wrong; above all none of these gets the base model's answer."""
    status, answer = post_text(address, body)
    assert status == 400
    assert WRONG[body] in answer["error"]


@pytest.mark.parametrize("name", ["a b", "sql@sha256:1", "\0", "x" * 1000])
def test_a_name_that_no_adapter_can_have_is_refused(address: str, name: str) -> None:
    status, body = post(address, prompt=PROMPT, adapter=name, tokens=TOKENS)
    assert status in (400, 404)
    assert body["error"]


def test_a_prompt_that_the_model_has_no_room_for_is_refused(address: str) -> None:
    status, body = post(address, prompt="w1 " * 10_000, tokens=1)
    assert status == 400
    assert "prompt: found 10000, wanted 1 to" in body["error"]


def health(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as response:
        return int(response.status)


def test_a_request_in_hand_keeps_no_other_waiting_and_is_finished(folder: Path, target: str) -> None:
    """One whose body has not come yet: /health is answered meanwhile, and SIGTERM does not cut it off."""
    body = json.dumps({"prompt": PROMPT, "adapter": "sql", "tokens": TOKENS}).encode()
    with served(folder, target) as (server, port), socket.create_connection(("127.0.0.1", port), 60) as request:
        request.sendall(b"POST /generate HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body))
        # Connections are taken in turn, so that the request is in hand now.
        assert health(port) == 200
        server.terminate()
        assert said(server) == "finishing the requests in hand"
        request.sendall(body)
        with request.makefile("rb") as answer:
            head, _, text = answer.read().partition(b"\r\n\r\n")
        assert b" 200 " in head.splitlines()[0]
        assert json.loads(text)["text"].startswith("w")
