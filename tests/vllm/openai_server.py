"""vLLM's OpenAI server as a process of its own, with slotcar's plug-in, and what its clients ask of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.ports import free_port

START_SECONDS = 600.0
STOP_SECONDS = 60.0
ANSWER_SECONDS = 120.0
BASE = "base"
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@dataclass
class Server:
    """A server of `model` under the name base; `log` is what it writes."""

    model: Path
    folder: Path
    target: str
    extra: tuple[str, ...] = ()
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self.folder / "vllm.log").read_text(encoding="utf-8", errors="replace")

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--served-model-name", BASE, "--tokenizer", str(_tokenizer(self.folder))),
            *("--host", "127.0.0.1", "--port", str(self.port), "--chat-template", CHAT_TEMPLATE),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8"),
            *("--kv-cache-memory-bytes", str(64 << 20), "--enable-lora", "--max-loras", "2", "--max-lora-rank", "16"),
            *self.extra,
        ]

    def start(self) -> Self:
        """Starts it; `wait` returns when it answers."""
        self.port = self.port or free_port()
        environment = os.environ | {"SLOTCAR_TARGET": self.target, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        for name in ("VLLM_PLUGINS", "VLLM_ENABLE_V1_MULTIPROCESSING"):
            environment.pop(name, None)
        with (self.folder / "vllm.log").open("ab") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, env=environment)
        return self

    def wait(self) -> Self:
        assert self.process is not None
        begin = time.monotonic()
        while time.monotonic() - begin < START_SECONDS:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == httpx.codes.OK:
                    return self
            time.sleep(0.2)
        raise AssertionError(f"the server did not answer:\n{self.log}")

    def ended(self) -> int:
        """Its exit code, once it ended by itself."""
        assert self.process is not None
        return self.process.wait(START_SECONDS)

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(STOP_SECONDS)

    def __enter__(self) -> Self:
        return self.start().wait()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=ANSWER_SECONDS)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=ANSWER_SECONDS)

    def complete(self, model: str, prompt: list[int], count: int = 8) -> httpx.Response:
        """Greedy tokens after the prompt."""
        return self.post("/v1/completions", **_completion(model, prompt, count))

    @contextlib.contextmanager
    def stream(self, model: str, prompt: list[int], count: int) -> Iterator[Iterator[Any]]:
        """The chunks of the same as they come."""
        body = _completion(model, prompt, count) | {"stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=ANSWER_SECONDS) as response:
            yield _chunks(response)


def tokens(answer: httpx.Response) -> list[int]:
    """The tokens of a completion that succeeded."""
    assert answer.status_code == httpx.codes.OK, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def streamed(chunks: Iterator[Any]) -> list[int]:
    """The tokens of all chunks that are left."""
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]


def refused(answer: httpx.Response) -> tuple[int, str]:
    """Status and message of an answer that is an error."""
    error = answer.json()["error"]
    assert error["code"] == answer.status_code
    return answer.status_code, error["message"]


def _completion(model: str, prompt: list[int], count: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _chunks(response: httpx.Response) -> Iterator[Any]:
    assert response.status_code == httpx.codes.OK, response.read()
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data and data != "[DONE]":
            yield json.loads(data)


def _tokenizer(folder: Path) -> Path:
    """One word for each of the models' tokens."""
    place = folder / "tokenizer"
    if not place.exists():
        words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(256)}, unk_token="t0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(str(place))
    return place
