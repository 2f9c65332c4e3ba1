"""Takes an adapter whose two files come in chunks.

Invariant: an upload holds what has come and no more, which is at most what was declared.
"""

from __future__ import annotations

import io

from slotcar_sidecar.core.errors import DigestMismatch, RequestInvalid
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.store.base_model import BaseModel
from slotcar_sidecar.store.faults import CONFIG_FILE, WEIGHTS_FILE
from slotcar_sidecar.store.peft import read_peft
from slotcar_sidecar.store.sizes import check_sizes
from slotcar_sidecar.store.weights import HostWeights


class Upload:
    """One adapter on its way in: all of the configuration, then all of the weights, then `finish`, once.

    Not safe for threads. After a refusal it is of no more use.
    """

    def __init__(
        self, config_bytes: int, weights_bytes: int, max_adapter_bytes: int, base: BaseModel | None = None
    ) -> None:
        """Takes the sizes that the caller declares. Raises RequestInvalid for none, CapacityExceeded for too large."""
        self._config = _Part("config", CONFIG_FILE, config_bytes)
        self._weights = _Part("weights", WEIGHTS_FILE, weights_bytes)
        check_sizes(config_bytes, weights_bytes, max_adapter_bytes)
        self._has_weights = False
        self._base = base

    def add_config(self, chunk: bytes) -> None:
        """Appends to adapter_config.json. Raises RequestInvalid once weights came, and for more than was declared."""
        if self._has_weights:
            raise RequestInvalid("config", found="a part after weights", wanted="all of it before the weights")
        self._config.add(chunk)

    def add_weights(self, chunk: bytes) -> None:
        """Appends to adapter_model.safetensors. Raises RequestInvalid while the configuration is not whole, and for
        more than was declared.
        """
        self._config.check_whole()
        self._has_weights = True
        self._weights.add(chunk)

    def finish(self, wanted: Digest | None = None) -> HostWeights:
        """The verified adapter, whose source is "". Blocks; runs in the loader pool.

        Raises RequestInvalid when less came than was declared, else what reading the same two files from a folder
        raises, and DigestMismatch unless the digest is `wanted`.
        """
        self._config.check_whole()
        self._weights.check_whole()
        weights = read_peft(self._config.take(), self._weights.take(), source="", base=self._base)
        found = weights.adapter.digest
        if wanted is not None and found != wanted:
            raise DigestMismatch("the upload", found=found, wanted=wanted)
        return weights


class _Part:
    """One file: how many bytes were declared, and those that came."""

    def __init__(self, field: str, file: str, declared_bytes: int) -> None:
        if declared_bytes < 1:
            raise RequestInvalid(f"header.{field}_bytes", found=declared_bytes, wanted=f"the size of {file} in bytes")
        self._field = field
        self._declared_bytes = declared_bytes
        # Not the chunks as they came: a small one costs many times its size. The buffer grows by an eighth at most.
        self._came = io.BytesIO()

    def add(self, chunk: bytes) -> None:
        size = self._came.tell() + len(chunk)
        if size > self._declared_bytes:
            raise self._refusal(size, "or more")
        self._came.write(chunk)

    def check_whole(self) -> None:
        if self._came.tell() < self._declared_bytes:
            raise self._refusal(self._came.tell(), "and no more")

    def take(self) -> bytes:
        """The bytes, of which nothing stays here."""
        with self._came:
            return self._came.getvalue()

    def _refusal(self, size: int, rest: str) -> RequestInvalid:
        return RequestInvalid(
            self._field, found=f"{size} bytes {rest}", wanted=f"the {self._declared_bytes} bytes that were declared"
        )
