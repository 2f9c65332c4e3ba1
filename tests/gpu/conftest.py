"""Tests here need Triton: those of the GPU run there, and in Triton's interpreter to check what runs them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]

pytest.register_assert_rewrite("tests.kernels.triton.interpreted", "tests.gpu.twins")
