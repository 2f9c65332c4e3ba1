"""Opens an adapter's folder beneath a root and reads its files, so that no link or race leads outside the root.

Each component is opened from the descriptor of the one before and never through a link; a file is read into private
memory, never mapped, as its owner may truncate it at any time.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from slotcar_sidecar.core.errors import SlotcarError, SourceDenied, SourceUnavailable
from slotcar_sidecar.store.faults import PICKLE_FILE, WEIGHTS_FILE, invalid, shown, unsupported
from slotcar_sidecar.store.memory import private_memory, read_into

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without waiting: a named pipe would block for ever.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
CONVERT_COMMAND = (
    'python -c "import torch, safetensors.torch as s; '
    "s.save_file({k: v.contiguous().clone() for k, v in torch.load('adapter_model.bin', map_location='cpu', "
    "weights_only=True).items()}, 'adapter_model.safetensors')\""
)


class FileVersion(NamedTuple):
    """What changes when a file's bytes do."""

    device: int
    inode: int
    bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileVersion:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class Folder:
    """An open folder, as Files; valid inside `folder_beneath` only."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path

    def version(self, name: str) -> FileVersion | None:
        """Of the file as it is now, without reading it. Raises SourceDenied for a link or what is no file."""
        path = self._path / name
        try:
            found = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _refusal(error, self._descriptor, name, path) from error
        if stat.S_ISLNK(found.st_mode):
            raise _link(path)
        if not stat.S_ISREG(found.st_mode):
            raise SourceDenied(
                f"{shown(str(path))} is not a regular file", file=name, found="another kind", wanted="a regular file"
            )
        return FileVersion.of(found)

    def read(self, name: str, version: FileVersion) -> memoryview:
        """The whole file, in private memory. Raises SourceUnavailable unless it is at `version` before and after."""
        path = self._path / name
        try:
            memory = private_memory(version.bytes)
            with self._open(name) as descriptor:
                # Before the first read: what was swapped in may be a pipe.
                before = FileVersion.of(os.fstat(descriptor))
                size = read_into(descriptor, memory) if before == version else 0
                after = FileVersion.of(os.fstat(descriptor))
        except OSError as error:
            raise _refusal(error, self._descriptor, name, path) from error
        if size != version.bytes or after != version:
            raise changed(path)
        return memory

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        descriptor = os.open(name, _FILE, dir_fd=self._descriptor)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def missing(self, name: str) -> SlotcarError:
        if name == WEIGHTS_FILE and self._has(PICKLE_FILE):
            return unsupported(
                f"{PICKLE_FILE} is a pickle, which is never read; if you trust it, run in its folder: "
                f"{CONVERT_COMMAND}",
                file=PICKLE_FILE,
                found=PICKLE_FILE,
                wanted=WEIGHTS_FILE,
            )
        return invalid(f"{shown(str(self._path))} has no {name}", file=name, found="no such file", wanted=name)

    def changed(self) -> SourceUnavailable:
        return changed(self._path)

    def _has(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except OSError:
            return False
        return True


@contextmanager
def folder_beneath(root: Path, parts: tuple[str, ...]) -> Iterator[Folder]:
    """Opens root/parts[0]/parts[1]/…, where only the root's own path may lead through links.

    Raises SourceDenied, naming the link, SourceUnavailable, or AdapterInvalid for what is no folder.
    """
    path = root
    descriptor = _open_folder(str(root), None, path)
    try:
        for part in parts:
            path = path / part
            parent, descriptor = descriptor, _open_folder(part, descriptor, path)
            os.close(parent)
        yield Folder(descriptor, path)
    finally:
        os.close(descriptor)


def changed(path: Path) -> SourceUnavailable:
    return SourceUnavailable(
        f"{shown(str(path))} changed while it was read: try again when it is written", file=path.name
    )


def _open_folder(name: str, parent: int | None, path: Path) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except OSError as error:
        raise _refusal(error, parent, name, path) from error


def _refusal(error: OSError, parent: int | None, name: str, path: Path) -> SlotcarError:
    """Why `name` could not be opened; a link gives ELOOP or, where a folder was wanted, ENOTDIR."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        try:
            mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
        except OSError:
            return changed(path)
        if stat.S_ISLNK(mode):
            return _link(path)
        if stat.S_ISDIR(mode):
            # It was a link a moment ago.
            return changed(path)
        return invalid(f"{shown(str(path))} is no folder", file=path.name, found="a file", wanted="a folder")
    if error.errno == errno.ENOENT:
        return SourceUnavailable(f"there is no {shown(str(path))}", found="nothing", wanted="an adapter's folder")
    return SourceUnavailable(f"cannot read {shown(str(path))}: {error.strerror}", found=error.strerror)


def _link(path: Path) -> SourceDenied:
    return SourceDenied(
        f"{shown(str(path))} is a symbolic link, and links are not followed: copy what it points to, as `cp -rL` does",
        found="a symbolic link",
        wanted="a folder or file beneath the root",
    )
