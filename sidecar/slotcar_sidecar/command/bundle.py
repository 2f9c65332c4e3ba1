"""A support bundle: parts in one tar.gz, with a manifest that also says what could not be had, and without secrets.

Invariant: a file of the bundle's name is whole, and readable for its owner alone.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FOLDER = "slotcar-snapshot"
LEFT_OUT = "(left out)"

_SECRET_KEY = re.compile(r"(?i)(?:^|_)(?:token|secret|password|credentials?)$")
_SECRETS = (
    # The user and password of a URI, and its query, which may be signed.
    (re.compile(r"(?<=://)[^/\s\"']*@"), f"{LEFT_OUT}@"),
    (re.compile(r"(://[^\s\"'?]+)\?[^\s\"',;)]+"), rf"\1?{LEFT_OUT}"),
    (
        re.compile(
            r"(?i)\b(bearer\s+|(?:token|secret|password|signature|access_?key(?:_?id)?)\s*[=:]\s*)[^\s\"',;&)]+"
        ),
        rf"\1{LEFT_OUT}",
    ),
    (re.compile(r"\b(?:hf_[A-Za-z0-9]{8,}|AKIA[A-Z0-9]{12,})\b"), LEFT_OUT),
)


@dataclass(frozen=True, slots=True)
class Missing:
    """Why a part is not there."""

    why: str


Part = bytes | Missing


def json_part(value: Any) -> bytes:
    """A value as JSON, without secrets."""
    return json.dumps(_without_secrets(value), indent=1, default=str).encode()


def text_part(text: str) -> bytes:
    """Text without secrets."""
    return _tame(text).encode()


def write(path: Path, parts: Mapping[str, Part], about: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the parts that are there, and returns the manifest, which begins with `about`. Raises OSError."""
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            seconds = os.fstat(file.fileno()).st_mtime
            manifest = _manifest(parts, about, seconds)
            with tarfile.open(fileobj=file, mode="w:gz") as archive:
                _add(archive, "manifest.json", json_part(manifest), seconds)
                for name, part in parts.items():
                    if not isinstance(part, Missing):
                        _add(archive, name, part, seconds)
            file.flush()
            os.fsync(file.fileno())
        Path(unfinished).replace(path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise
    return manifest


def _manifest(parts: Mapping[str, Part], about: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    return {
        **about,
        "made_at": datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds"),
        "parts": {name: {"bytes": len(part)} for name, part in parts.items() if not isinstance(part, Missing)},
        "missing": {name: _tame(part.why) for name, part in parts.items() if isinstance(part, Missing)},
    }


def _add(archive: tarfile.TarFile, name: str, data: bytes, seconds: float) -> None:
    entry = tarfile.TarInfo(f"{FOLDER}/{name}")
    entry.size, entry.mode, entry.mtime = len(data), 0o600, int(seconds)
    archive.addfile(entry, io.BytesIO(data))


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: LEFT_OUT if isinstance(each, str) and each and _SECRET_KEY.search(str(key)) else _without_secrets(each)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_secrets(each) for each in value]
    return _tame(value) if isinstance(value, str) else value


def _tame(text: str) -> str:
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text
