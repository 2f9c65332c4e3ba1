"""Reads files of any other filesystem of fsspec that the operator allowed by name.

Such filesystems know no conditional reads, so a file is looked at again before and after each part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec

from slotcar_sidecar.core.errors import SlotcarError, SourceDenied, SourceUnavailable
from slotcar_sidecar.store.sources.fetch import Broken, Changed, RemoteFile
from slotcar_sidecar.store.sources.options import Options
from slotcar_sidecar.store.sources.rules import Target

__all__ = ["FilesystemPlace"]

_PART_BYTES = 4 << 20


class FilesystemPlace:
    """A folder of a filesystem, as Place."""

    def __init__(self, target: Target, options: Options) -> None:
        """Raises SourceDenied when what the scheme needs is not installed, SourceUnavailable for wrong options."""
        self.uri = str(target)
        self.scheme = target.scheme
        self._folder = "/".join(target.path)
        try:
            kind = fsspec.get_filesystem_class(target.scheme)
        except (ImportError, ValueError) as error:
            raise SourceDenied(
                f"{target.scheme}:// needs a package of fsspec that is not installed",
                found=target.scheme,
                wanted="a scheme that fsspec can open",
            ) from error
        arguments = options.plain_arguments()
        with self._translated("its options"):
            self._filesystem: Any = kind(use_listings_cache=False, **arguments)

    def look(self, name: str) -> RemoteFile | None:
        path = f"{self._folder}/{name}"
        with self._translated(name):
            try:
                self._filesystem.invalidate_cache()
                info = self._filesystem.info(path)
            except FileNotFoundError:
                return None
            if info.get("type", "file") != "file" or not isinstance(info.get("size"), int):
                raise SourceDenied(f"{self.uri} has {name}, which is no file", found="no file", wanted="a file")
            return RemoteFile(info["size"], str(self._filesystem.ukey(path)))

    @contextmanager
    def stream(self, name: str, file: RemoteFile, start: int) -> Iterator[Iterator[bytes]]:
        with self._translated(name):
            yield self._parts(name, file, start)

    def _parts(self, name: str, file: RemoteFile, start: int) -> Iterator[bytes]:
        path = f"{self._folder}/{name}"
        while start < file.bytes:
            if self.look(name) != file:
                raise Changed
            try:
                part = self._filesystem.cat_file(path, start=start, end=min(file.bytes, start + _PART_BYTES))
            except FileNotFoundError as error:
                raise Changed from error
            if not part or self.look(name) != file:
                raise Changed
            yield part
            start += len(part)

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        """Any error as ours, as each filesystem has its own; none of their texts, which may quote what was sent."""
        try:
            yield
        except (SlotcarError, Broken, Changed, FileNotFoundError):
            raise
        except PermissionError:
            raise self._unavailable("forbidden", f"its credentials may not read {name}") from None
        except OSError as error:
            raise Broken("connection", f"{type(error).__name__} for {name}") from None
        except Exception as error:
            raise self._unavailable("failed", f"{type(error).__name__} for {name}") from None

    def _unavailable(self, kind: str, what: str) -> SourceUnavailable:
        return SourceUnavailable(f"cannot read {self.uri}: {what}", found=kind, wanted="files that may be read")
