"""Compiles the native kernel into the wheel; without a compiler the wheel is pure Python, and torch computes.

SLOTCAR_NO_NATIVE=1 asks for the pure wheel. An editable installation gets the library beside its sources.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent / "kernels"))
from build_native import LIBRARY, CannotCompile, compile_library


class NativeHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds `_native.so` to the wheel, and the platform to its tag."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        editable = version == "editable"
        if editable:
            LIBRARY.unlink(missing_ok=True)  # one that does not fit the sources any more is worse than none
        if os.environ.get("SLOTCAR_NO_NATIVE") == "1":
            self.app.display_warning("SLOTCAR_NO_NATIVE: the native kernel is left out, torch will compute")
            return
        self._folder = tempfile.TemporaryDirectory()
        library = LIBRARY if editable else Path(self._folder.name) / LIBRARY.name
        try:
            compile_library(library)
        except CannotCompile as error:
            self.app.display_warning(f"the native kernel is left out, torch will compute: {error}")
            return
        if editable:
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["force_include"][str(library)] = f"slotcar_kernels/{LIBRARY.name}"
