"""Tests here are collected only in processes with Triton's interpreter, and have the GPUs of host.py."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.planes.gpu.host import install

    install()
else:
    collect_ignore_glob = ["test_*.py"]
