"""Reads adapters from folders under the roots that the operator allowed."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from slotcar_sidecar.core.errors import SourceDenied
from slotcar_sidecar.store.base_model import BaseModel
from slotcar_sidecar.store.faults import shown
from slotcar_sidecar.store.sources.files import read_adapter, versions_of
from slotcar_sidecar.store.sources.folder import folder_beneath
from slotcar_sidecar.store.weights import HostWeights

_MAX_URI = 4096
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")
_FILE_URI = re.compile(r"file://(/(?:[^%?#]|%[0-9A-Fa-f]{2})*)")


class _Root(NamedTuple):
    """A root as the operator wrote it, made absolute, and where it led when the server started."""

    written: Path
    real: Path


class LocalSource:
    """Folders beneath `roots`, each adapter at most `max_bytes` of weights. Safe for threads: it has no state.

    Roots are resolved once, here; beneath them links are refused.
    """

    def __init__(self, roots: Sequence[Path], max_bytes: int, base: BaseModel | None = None) -> None:
        self._roots = [_Root(root.absolute(), root.resolve()) for root in roots]
        self._max_bytes = max_bytes
        self._base = base

    def canonical(self, uri: str) -> str:
        """The absolute path that `uri` (a path, or file:/// and a path) names, beneath the resolved root.

        Looks at no file, so that the answer tells nothing of what is outside. Raises SourceDenied.
        """
        root, parts = self._locate(uri)
        return str(root.joinpath(*parts))

    def is_remote(self, uri: str) -> bool:  # noqa: ARG002
        return False

    def version(self, uri: str) -> Hashable:
        """Identity, size and times of the files. Raises as `read` does for what is not there."""
        root, parts = self._locate(uri)
        with folder_beneath(root, parts) as folder:
            return tuple(versions_of(folder).items())

    def read(self, uri: str) -> HostWeights:
        """Reads the files into private memory and verifies the adapter.

        Raises SourceDenied, SourceUnavailable, CapacityExceeded, AdapterInvalid or AdapterUnsupported.
        """
        root, parts = self._locate(uri)
        with folder_beneath(root, parts) as folder:
            return read_adapter(folder, self._max_bytes, str(root.joinpath(*parts)), self._base)

    def _locate(self, uri: str) -> tuple[Path, tuple[str, ...]]:
        """The real root and the path beneath it."""
        if not self._roots:
            raise SourceDenied("no root is allowed: start the server with --root", found=shown(uri), wanted="a --root")
        path = Path(_path_of(uri))
        if ".." in path.parts:
            raise _denied(uri, "a path without ..")
        beneath = [
            (root.real, path.relative_to(start).parts)
            for root in self._roots
            for start in root
            if path.is_relative_to(start)
        ]
        if not beneath:
            raise _denied(uri, f"a path beneath {' or '.join(str(root.written) for root in self._roots)}")
        # Of nested roots the innermost.
        return min(beneath, key=lambda found: len(found[1]))


def _path_of(uri: str) -> str:
    """The absolute path that `uri` spells."""
    # Also keeps out NUL, other control characters and lone surrogates, here and once decoded.
    if not uri.isprintable() or len(uri) > _MAX_URI:
        raise _denied(uri, f"at most {_MAX_URI} printable characters")
    path = uri
    if _SCHEME.match(uri):
        match = _FILE_URI.fullmatch(uri)
        if match is None:
            raise _denied(uri, "a path, or file:/// and a path; other sources need --source")
        path = unquote_to_bytes(match[1]).decode(errors="replace")
    if not path.startswith("/"):
        raise _denied(uri, "an absolute path")
    if not path.isprintable() or "\N{REPLACEMENT CHARACTER}" in path:
        raise _denied(uri, "a path of printable characters")
    return f"/{path.lstrip('/')}"


def _denied(uri: str, wanted: str) -> SourceDenied:
    return SourceDenied(f"the source {shown(uri)} is not allowed, wanted {wanted}", found=shown(uri), wanted=wanted)
