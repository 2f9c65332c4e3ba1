"""A small HTTP server of a transformers model whose adapters are the sidecar's at $SLOTCAR_TARGET.

    python server.py MODEL [PORT]
    POST /generate {"prompt": "…", "adapter": "sql", "tokens": 16}  →  {"text": "…"}
    GET /health

One request at a time, so that one mapping is in use: an example, not a serving engine.
"""

from __future__ import annotations

import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import slotcar_client as slotcar
import torch
from slotcar_client.engines.transformers import attach, model_spec
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

MAX_BODY_BYTES = 1 << 20
MAX_TOKENS = 512


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

    def generate(self, prompt: str, adapter: str | None, tokens: int) -> str:
        """What the model says with this adapter, or as it is. Raises slotcar's errors, such as for an unknown name."""
        batch = self.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        mapping = self.session.set_mapping([adapter or slotcar.BASE], load=True, wait_seconds=30)
        try:
            with self.session.rows(mapping), torch.no_grad():
                found = self.model.generate(**batch, max_new_tokens=tokens, do_sample=False)
        finally:
            self.session.release_mapping(mapping)
        text: str = self.tokenizer.decode(found[0][batch["input_ids"].shape[1] :], skip_special_tokens=True)
        return text


class Handler(BaseHTTPRequestHandler):
    engine: Engine

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        try:
            request = self._request()
        except (ValueError, KeyError, TypeError) as error:
            self._answer(400, {"error": f"{type(error).__name__}: {error}"})
            return
        try:
            self._answer(200, {"text": self.engine.generate(*request)})
        except slotcar.AdapterNotFound as error:
            self._answer(404, {"error": error.message})
        except slotcar.SlotcarError as error:
            self._answer(503, {"error": error.message, "reason": error.reason})

    def _request(self) -> tuple[str, str | None, int]:
        size = int(self.headers["Content-Length"])
        if self.path != "/generate" or not 0 < size <= MAX_BODY_BYTES:
            raise ValueError(f"{size} bytes at {self.path}, wanted at most {MAX_BODY_BYTES} at /generate")
        body = json.loads(self.rfile.read(size))
        adapter = body.get("adapter")
        return str(body["prompt"]), None if adapter is None else str(adapter), min(int(body["tokens"]), MAX_TOKENS)

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main(folder: str, port: int = 8000) -> None:
    """Serves until SIGTERM; the session ends with the process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Handler.engine = Engine(folder)
    server = HTTPServer(("", port), Handler)
    print(f"serving at {server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
