"""A bucket whose every answer takes seconds, and loads of adapters that are in it."""

from __future__ import annotations

import contextlib
import itertools
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from slotcar_client import Client

from tests.ops.gameday.stage import Record, Row, Stage
from tests.sources.bucket import KEY, SECRET, options_file, upload
from tests.sources.proxy import Answer, Proxy

AT_A_TIME = 4
# A load is eight requests, six of which are its read.
_ANSWER_SECONDS, _SLOW_SECONDS = 2.0, 10.0
_ADAPTERS = 40


class SlowProxy(Proxy):
    """Each answer takes `_ANSWER_SECONDS`, which is less than what a source takes for silence."""

    def answer(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        self.ended.wait(_ANSWER_SECONDS)
        return super().answer(method, path, headers)


@dataclass
class Loads:
    """Loads adapter after adapter of the bucket, each of them once."""

    proxy: SlowProxy
    flags: tuple[str, ...]
    environment: dict[str, str]
    numbers: Iterator[int] = field(default_factory=itertools.count)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def one(self, client: Client) -> None:
        with self.lock:
            number = next(self.numbers) % _ADAPTERS
        client.load(f"remote-{number}", f"s3://bucket/prefix/remote-{number}", tier="host")

    def ends_at_once(self) -> None:
        """The source is as fast as it was, so that nobody waits for what is under way."""
        self.proxy.ended.set()


@contextlib.contextmanager
def bucket(stage: Stage) -> Iterator[Loads]:
    """Adapters in a bucket of moto's server, in a process of its own, behind the proxy."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        endpoint = next(found[0] for line in server.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        threading.Thread(target=lambda: list(server.stderr or ()), daemon=True).start()
        try:
            for number in range(_ADAPTERS):
                stage.write(f"remote-{number}")
                upload(endpoint, stage.library.root / f"remote-{number}")
            with SlowProxy(endpoint) as proxy:
                options = stage.folder / "sources.json"
                options.write_text(options_file(proxy.url), encoding="utf-8")
                flags = ("--source", "s3://bucket", "--source-options", str(options), "--load-threads", str(AT_A_TIME))
                yield Loads(proxy, flags, {"KEY": KEY, "SECRET": SECRET})
        finally:
            server.terminate()


def is_slow_call(line: Record) -> bool:
    """A call that took long, as the log has it at the level debug."""
    return line["message"] == "call" and line["method"] == "LoadAdapter" and line["seconds"] > _SLOW_SECONDS


def slow_row(state: Any) -> Row | None:
    """The latest load whose read took long."""
    for load in state["loads"]:
        seconds = dict(load["stages"]).get("read", 0.0)
        if seconds > _SLOW_SECONDS and load["name"]:
            return Row("loads", f"{load['name']} | {seconds:.1f} s")
    return None
