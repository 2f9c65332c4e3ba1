"""Reads an adapter from a place that has files with versions, so that all its bytes are of one save.

A place is a folder, a prefix of a bucket or a commit of a repository; what is the same for all of them is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from slotcar_sidecar.core.errors import SlotcarError
from slotcar_sidecar.store.base_model import BaseModel
from slotcar_sidecar.store.faults import CONFIG_FILE, WEIGHTS_FILE
from slotcar_sidecar.store.peft import read_peft
from slotcar_sidecar.store.shards import INDEX_FILE, MAX_INDEX_BYTES, Shards, shard_names
from slotcar_sidecar.store.sizes import check_size, check_sizes
from slotcar_sidecar.store.weights import HostWeights

__all__ = ["Files", "Version", "read_adapter", "versions_of"]


class Version(Protocol):
    """What changes when a file's bytes do; equal for equal bytes of one place."""

    @property
    def bytes(self) -> int: ...


V = TypeVar("V", bound=Version)


class Files(Protocol[V]):
    """The files of one place. Each call blocks and raises SourceDenied or SourceUnavailable."""

    def version(self, name: str) -> V | None:
        """Of the file as it is now, without reading it; None when there is none."""

    def read(self, name: str, version: V) -> memoryview:
        """The whole file in private memory. Raises `changed()` unless it is at `version` all the time."""

    def missing(self, name: str) -> SlotcarError:
        """Why there is no adapter without the file `name`."""

    def changed(self) -> SlotcarError:
        """That the place was written while it was read."""


def versions_of(files: Files[V]) -> dict[str, V]:
    """The files that the adapter consists of, by name: the configuration, and one file of weights or index and shards.

    Reads nothing but an index. Raises CapacityExceeded or AdapterInvalid for that.
    """
    return _found(files)[0]


def _found(files: Files[V]) -> tuple[dict[str, V], dict[str, memoryview]]:
    """The same, with what was read for it."""
    config = _wanted(files, CONFIG_FILE)
    weights = files.version(WEIGHTS_FILE)
    if weights is not None:
        return {CONFIG_FILE: config, WEIGHTS_FILE: weights}, {}
    index = files.version(INDEX_FILE)
    if index is None:
        raise files.missing(WEIGHTS_FILE)
    check_size(index.bytes, MAX_INDEX_BYTES, INDEX_FILE)
    text = files.read(INDEX_FILE, index)
    shards = {name: _wanted(files, name) for name in shard_names(bytes(text))}
    return {CONFIG_FILE: config, INDEX_FILE: index, **shards}, {INDEX_FILE: text}


def read_adapter(files: Files[V], max_bytes: int, source: str, base: BaseModel | None) -> HostWeights:
    """The verified adapter, of at most `max_bytes` of weights. Raises what `versions_of` and `read_peft` raise."""
    versions, data = _found(files)
    weights_bytes = sum(version.bytes for version in versions.values()) - versions[CONFIG_FILE].bytes
    check_sizes(versions[CONFIG_FILE].bytes, weights_bytes, max_bytes)
    data |= {name: files.read(name, version) for name, version in versions.items() if name not in data}
    # All files must be of one save: a file that was replaced by a rename still reads well.
    if {name: files.version(name) for name in versions} != versions:
        raise files.changed()
    config = bytes(data.pop(CONFIG_FILE))
    return read_peft(config, _weights(data), source=source, base=base)


def _wanted(files: Files[V], name: str) -> V:
    version = files.version(name)
    if version is None:
        raise files.missing(name)
    return version


def _weights(data: Mapping[str, memoryview]) -> memoryview | Shards:
    if WEIGHTS_FILE in data:
        return data[WEIGHTS_FILE]
    return Shards(bytes(data[INDEX_FILE]), {name: data[name] for name in data if name != INDEX_FILE})
