"""An adapter's files on this machine, as the messages of LoadAdapterStream.

Invariant: the last chunk of a file leaves only if the file is still what its declared size was taken from, so that the
server, which wants every declared byte, never takes a torn file for a whole one.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from slotcar.v1 import adapter_service_pb2

from slotcar_client.errors import RequestInvalid, SlotcarError, SourceUnavailable

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
CHUNK_BYTES = 1 << 20
# A deadline that is too long only matters to a caller whose network stands still.
_LEAST_BYTES_PER_SECOND = 8 << 20


class Upload:
    """The two open files of one adapter, sent once; a context that closes them."""

    def __init__(self, folder: str | os.PathLike[str], header: adapter_service_pb2.UploadHeader) -> None:
        """Opens the files and adds their sizes to `header`. Raises RequestInvalid, naming the file."""
        self.failure: SlotcarError | None = None
        self._header = header
        self._config = _File(Path(folder) / CONFIG_FILE)
        try:
            self._weights = _File(Path(folder) / WEIGHTS_FILE)
        except SlotcarError:
            self._config.close()
            raise
        header.config_bytes, header.weights_bytes = self._config.size, self._weights.size

    @property
    def least_seconds(self) -> float:
        """How long the bytes may take to travel, beside the deadline of an ordinary call."""
        return (self._config.size + self._weights.size) / _LEAST_BYTES_PER_SECOND

    def requests(self) -> Iterator[adapter_service_pb2.LoadAdapterStreamRequest]:
        """The messages in order. They end early, with the cause in `failure`, when a file cannot be sent whole."""
        yield adapter_service_pb2.LoadAdapterStreamRequest(header=self._header)
        try:
            for chunk in self._config.chunks():
                yield adapter_service_pb2.LoadAdapterStreamRequest(config=chunk)
            for chunk in self._weights.chunks():
                yield adapter_service_pb2.LoadAdapterStreamRequest(weights=chunk)
        except SlotcarError as error:
            self.failure = error

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Around the call: whatever became of it, `failure` is raised when the files could not be sent whole."""
        try:
            yield
        except SlotcarError as error:
            raise self.failure or error from error
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Idempotent."""
        self._config.close()
        self._weights.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _File:
    """One regular file, open for reading, of the size that it had then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # Without O_NONBLOCK, opening a pipe waits for its writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            found = "a symbolic link" if path.is_symlink() else error.strerror
            raise _not_a_file(path, str(found)) from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise _not_a_file(path, "no regular file")
        self._file: BinaryIO = os.fdopen(descriptor, "rb")
        self._written = status.st_mtime_ns
        self.size = status.st_size

    def chunks(self) -> Iterator[bytes]:
        """All of its bytes. Raises SourceUnavailable before the last of them when it is not the file it was."""
        sent = 0
        while sent < self.size:
            chunk = self._read(min(CHUNK_BYTES, self.size - sent), sent)
            sent += len(chunk)
            if not chunk or (sent == self.size and self._changed()):
                raise SourceUnavailable(
                    f"{self._path} changes while it is sent: repeat the upload when it is written",
                    file=self._path,
                    found="another size or time of change",
                    wanted=f"{self.size} bytes",
                )
            yield chunk

    def close(self) -> None:
        self._file.close()

    def _read(self, count: int, start: int) -> bytes:
        """From a place of its own: a call that was refused may still read while it is repeated."""
        try:
            return os.pread(self._file.fileno(), count, start)
        except (OSError, ValueError) as error:
            raise SourceUnavailable(f"{self._path} cannot be read: {error}", file=self._path) from error

    def _changed(self) -> bool:
        try:
            status = os.fstat(self._file.fileno())
        except (OSError, ValueError):
            return True
        return (status.st_size, status.st_mtime_ns) != (self.size, self._written)


def _not_a_file(path: Path, found: str) -> RequestInvalid:
    return RequestInvalid(
        f"{path}: {found}; wanted a regular file", field="folder", file=path, found=found, wanted="a regular file"
    )
