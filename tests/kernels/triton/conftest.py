"""Tests of interpreted kernels are collected only in the processes that `test_interpreted` starts for them."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
