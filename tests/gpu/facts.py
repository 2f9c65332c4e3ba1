"""Prints as JSON what this machine has of all that the checks need: versions, the GPU, and what is missing."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def facts() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in ("torch", "triton", "numpy", "pytest"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    # Triton compiles what launches a kernel with these.
    found["C compiler"] = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang") or "missing"
    found["Python.h"] = "there" if (Path(sysconfig.get_paths()["include"]) / "Python.h").exists() else "missing"
    try:
        import torch
    except ImportError as error:
        return found | {"missing": f"torch: {error}"}
    if not torch.cuda.is_available():
        return found | {"missing": "a GPU that torch can use"}
    about = torch.cuda.get_device_properties(0)
    found["GPU"] = about.name
    found["multiprocessors"] = str(about.multi_processor_count)
    found["memory"] = f"{about.total_memory / 2**30:.0f} GiB"
    found["CUDA"] = str(torch.version.cuda or torch.version.hip)
    needed = [package for package in ("triton", "numpy") if found[package] == "missing"]
    return found | ({"missing": ", ".join(needed)} if needed else {})


if __name__ == "__main__":
    json.dump(facts(), sys.stdout)
