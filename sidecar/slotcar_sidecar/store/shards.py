"""The files that an adapter can have its weights in: one, or several that an index names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from slotcar_sidecar.store.faults import WEIGHTS_FILE, invalid, shown
from slotcar_sidecar.store.strict_json import parse_object
from slotcar_sidecar.store.tensors import RawTensor, read_tensors

__all__ = ["INDEX_FILE", "MAX_INDEX_BYTES", "Shards", "shard_names", "tensors_of"]

INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
MAX_INDEX_BYTES = 8 << 20
_MAX_SHARDS = 1000
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,199}\.safetensors")


@dataclass(frozen=True, slots=True)
class Shards:
    """The bytes of the index, and those of each file that `shard_names` says, in memory where nobody writes."""

    index: bytes
    files: Mapping[str, bytes | memoryview]


def shard_names(index: bytes) -> tuple[str, ...]:
    """The files that an index names, sorted; each is a plain name. Raises AdapterInvalid."""
    return tuple(sorted(set(_weight_map(index).values())))


def tensors_of(weights: bytes | memoryview | Shards) -> dict[str, RawTensor]:
    """Every tensor by its key. Raises AdapterInvalid, naming the file, also where index and shards disagree."""
    if not isinstance(weights, Shards):
        return read_tensors(weights, WEIGHTS_FILE)
    wanted = _weight_map(weights.index)
    result: dict[str, RawTensor] = {}
    for file in sorted(set(wanted.values())):
        if file not in weights.files:
            raise invalid(f"{INDEX_FILE} names {file}, which is not there", file=file, found="no file", wanted=file)
        for key, tensor in read_tensors(weights.files[file], file).items():
            if wanted.get(key) != file:
                place = wanted.get(key, "no file")
                raise invalid(
                    f"{file} has {shown(key)}, which {INDEX_FILE} says is in {place}",
                    file=file,
                    tensor=key,
                    found=file,
                    wanted=place,
                )
            result[key] = tensor
    missing = next((key for key in wanted if key not in result), None)
    if missing is not None:
        raise invalid(
            f"{INDEX_FILE} says that {shown(missing)} is in {wanted[missing]}, where it is not",
            file=wanted[missing],
            tensor=missing,
            found="no such tensor",
            wanted=missing,
        )
    return result


def _weight_map(index: bytes) -> dict[str, str]:
    if len(index) > MAX_INDEX_BYTES:
        size = f"{len(index)} bytes"
        raise invalid(
            f"{INDEX_FILE} has {size}", file=INDEX_FILE, found=size, wanted=f"at most {MAX_INDEX_BYTES} bytes"
        )
    table = parse_object(index, INDEX_FILE).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise invalid(
            f"{INDEX_FILE} has no weight_map", file=INDEX_FILE, field="weight_map", found=table, wanted="key → file"
        )
    for key, file in table.items():
        if not isinstance(file, str) or not _SHARD.fullmatch(file) or file == WEIGHTS_FILE:
            raise invalid(
                f"{INDEX_FILE} says that {shown(key)} is in {shown(file)}, which is no name of a shard",
                file=INDEX_FILE,
                field="weight_map",
                tensor=key,
                found=file,
                wanted="a name such as adapter_model-00001-of-00002.safetensors",
            )
    count = len(set(table.values()))
    if count > _MAX_SHARDS:
        raise invalid(
            f"{INDEX_FILE} names {count} files",
            file=INDEX_FILE,
            field="weight_map",
            found=count,
            wanted=f"at most {_MAX_SHARDS}",
        )
    return {str(key): str(file) for key, file in table.items()}
