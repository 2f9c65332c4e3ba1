"""Reads single tensors of a base model from its folder, for the adapters whose meaning depends on them.

Invariant: what is read is of the files as they were at the start; a file that has changed since is refused.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from slotcar_sidecar.core.errors import SourceUnavailable
from slotcar_sidecar.store.checkpoint import HEAD, Checkpoint, StoredTensor
from slotcar_sidecar.store.faults import shown
from slotcar_sidecar.store.memory import private_memory, read_into
from slotcar_sidecar.store.tensors import FLOATS

__all__ = ["BaseModel"]

# Of each tensor, the first bytes enter the fingerprint: enough to tell the fine-tunes of one model from each other.
_FINGERPRINT_BYTES = 4096


class _Version(NamedTuple):
    bytes: int
    modified_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> _Version:
        return cls(found.st_size, found.st_mtime_ns)


class BaseModel:
    """The tensors of the folder that `--base-model` names. Safe for threads: each read opens its file."""

    def __init__(self, folder: Path) -> None:
        """Reads the headers. Raises RequestInvalid for `base_model`."""
        self.checkpoint = Checkpoint.of(folder)
        files = {tensor.file for tensor in self.checkpoint.tensors.values()}
        self._versions = {file: _Version.of((folder / file).stat()) for file in files}

    @cached_property
    def fingerprint(self) -> bytes:
        """sha256 over names, dtypes, shapes and first bytes of all tensors. Raises SourceUnavailable."""
        sha = hashlib.sha256()
        for name, tensor in sorted(self.checkpoint.tensors.items()):
            sha.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
            sha.update(self._read(tensor, 0, min(tensor.end - tensor.start, _FINGERPRINT_BYTES)))
        return sha.digest()

    def find(self, name: str) -> StoredTensor | None:
        """What the headers say of a tensor such as `lm_head.weight`; a tied head's is that of the embedding."""
        tensors = self.checkpoint.tensors
        found = tensors.get(name)
        embedding = self.checkpoint.input_embedding
        if found is None and name == f"{HEAD}.weight" and embedding is not None:
            found = tensors[f"{embedding}.weight"]
        return found

    def is_conv1d(self, module: str) -> bool:
        """Whether the module's weight is stored [in, out]."""
        return self.checkpoint.is_conv1d(module)

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        """The whole tensor, whose dtype must be in FLOATS. Raises SourceUnavailable."""
        return torch.cat([*self.rows(stored, max(1, stored.shape[0]))]) if stored.shape else next(self.rows(stored, 1))

    def rows(self, stored: StoredTensor, count: int) -> Iterator[torch.Tensor]:
        """The tensor's rows, so many at a time; its dtype must be in FLOATS. Raises SourceUnavailable."""
        kind = FLOATS[stored.dtype].torch
        height, *rest = stored.shape or (1,)
        size = (stored.end - stored.start) // max(1, height)
        for start in range(0, height, count):
            stop = min(start + count, height)
            data = self._read(stored, start * size, stop * size)
            yield torch.frombuffer(data, dtype=kind).view(stop - start, *rest)

    def _read(self, tensor: StoredTensor, start: int, stop: int) -> memoryview:
        """Bytes of a tensor, in private memory."""
        path = self.checkpoint.folder / tensor.file
        memory = private_memory(stop - start)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = read_into(descriptor, memory, tensor.start + start)
                version = _Version.of(os.fstat(descriptor))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise SourceUnavailable(
                f"cannot read the base model's {shown(str(path))}: {error.strerror}", file=path.name
            ) from error
        if size != len(memory) or version != self._versions[tensor.file]:
            raise SourceUnavailable(
                f"the base model's {shown(str(path))} changed since the server started: restart it", file=path.name
            )
        return memory
