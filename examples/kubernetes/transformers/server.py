"""A small HTTP server of a transformers model whose adapters are the sidecar's at $SLOTCAR_TARGET.

    python server.py MODEL [PORT]
    POST /generate {"prompt": "…", "adapter": "sql", "tokens": 16}  →  {"text": "…"}; without an adapter: the base model
    GET /health

One generation at a time, so that one mapping is in use: an example, not a serving engine.
"""

from __future__ import annotations

import contextlib
import json
import re
import reprlib
import signal
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeGuard

import slotcar_client as slotcar
import torch
from slotcar_client.engines.transformers import attach, model_spec
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

MAX_BODY_BYTES = 1 << 20
MAX_TOKENS = 512
# JSON can name halves of characters, which no encoding has.
_TEXT = re.compile(r"[^\ud800-\udfff]+")


class Wrong(Exception):
    """A request that is none."""

    def __init__(self, field: str, found: object, wanted: str) -> None:
        super().__init__(f"{field}: found {reprlib.repr(found)}, wanted {wanted}")


@dataclass(frozen=True, slots=True)
class Request:
    """What to generate; `adapter` is None for the base model, and only then."""

    prompt: str
    adapter: str | None
    tokens: int

    @classmethod
    def read(cls, data: bytes) -> Request:
        """Raises Wrong."""
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Wrong("body", data, "JSON") from error
        if not isinstance(body, dict):
            raise Wrong("body", body, "an object")
        # A misspelt adapter is not to get the base model's answer.
        for name in body.keys() - {"prompt", "adapter", "tokens"}:
            raise Wrong("body", name, "prompt, adapter and tokens")
        prompt, adapter, tokens = (body.get(name) for name in ("prompt", "adapter", "tokens"))
        if not _is_text(prompt):
            raise Wrong("prompt", prompt, "text")
        if adapter is not None and not _is_text(adapter):
            raise Wrong("adapter", adapter, "the name of an adapter, or null for the base model")
        if type(tokens) is not int or not 0 < tokens <= MAX_TOKENS:
            raise Wrong("tokens", tokens, f"a number from 1 to {MAX_TOKENS}")
        return cls(prompt, adapter, tokens)


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and _TEXT.fullmatch(value) is not None


class Engine:
    """The model, with the session that its adapters come by."""

    def __init__(self, folder: str) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        client = slotcar.connect()
        # The sidecar may start a moment later than this container, and may be restarted beside it.
        self.session = client.session("transformers", model_spec=model_spec(self.model), away="wait")
        # A request that forgot its rows is an error, and never the base model's answer.
        attach(self.model, self.session, require_rows=True)
        self._turn = threading.Lock()

    def generate(self, request: Request) -> str:
        """What the model says. Raises Wrong, and slotcar's errors, such as for an unknown name."""
        adapter = slotcar.BASE if request.adapter is None else request.adapter
        with self._turn:
            batch = self.tokenizer(request.prompt, return_tensors="pt", return_token_type_ids=False)
            length = batch["input_ids"].shape[1]
            room = self.model.config.max_position_embeddings - request.tokens
            if not 0 < length <= room:
                raise Wrong("prompt", length, f"1 to {room} tokens, before {request.tokens} more")
            mapping = self.session.set_mapping([adapter], load=True, wait_seconds=30)
            try:
                with self.session.rows(mapping), torch.no_grad():
                    found = self.model.generate(**batch, max_new_tokens=request.tokens, do_sample=False)
            finally:
                # What was computed counts, or why it was not. A mapping that stays is replaced by the next one.
                with contextlib.suppress(slotcar.SlotcarError):
                    self.session.release_mapping(mapping)
            text: str = self.tokenizer.decode(found[0][length:], skip_special_tokens=True)
            return text


class Handler(BaseHTTPRequestHandler):
    engine: Engine
    # Of one read or write: who sends nothing does not keep a thread, nor the server from ending.
    timeout = 30

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        if self.path != "/generate":
            self._answer(404, {})
            return
        try:
            self._answer(200, {"text": self.engine.generate(Request.read(self._body()))})
        except Wrong as error:
            self._answer(400, {"error": str(error)})
        except slotcar.AdapterNotFound as error:
            self._answer(404, {"error": error.message})
        except slotcar.RequestInvalid as error:
            self._answer(400, {"error": error.message, "reason": error.reason})
        except slotcar.SlotcarError as error:
            self._answer(503, {"error": error.message, "reason": error.reason})

    def _body(self) -> bytes:
        size = self.headers["Content-Length"] or ""
        if not re.fullmatch("[0-9]{1,9}", size) or int(size) > MAX_BODY_BYTES:
            raise Wrong("Content-Length", size, f"at most {MAX_BODY_BYTES}")
        return self.rfile.read(int(size))

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    """Its end waits for the requests in hand."""

    daemon_threads = False


def main(folder: str, port: int = 8000) -> None:
    """Serves until SIGTERM, and finishes the requests in hand; the session ends with the process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Handler.engine = Engine(folder)
    with Server(("", port), Handler) as server:
        # In a thread, as it waits for the loop that the signal interrupts.
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
        print(f"serving at {server.server_port}", flush=True)
        server.serve_forever()
        print("finishing the requests in hand", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
