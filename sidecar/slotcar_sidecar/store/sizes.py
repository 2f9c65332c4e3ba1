"""Bounds the two files of an adapter, before any of their bytes is taken."""

from __future__ import annotations

from slotcar_sidecar.core.errors import CapacityExceeded
from slotcar_sidecar.store.faults import CONFIG_FILE, WEIGHTS_FILE

MAX_CONFIG_BYTES = 1 << 20


def check_sizes(config_bytes: int, weights_bytes: int, max_weights_bytes: int) -> None:
    """Raises CapacityExceeded, naming the file that is larger than the server reads."""
    check_size(config_bytes, MAX_CONFIG_BYTES, CONFIG_FILE)
    check_size(weights_bytes, max_weights_bytes, WEIGHTS_FILE)


def check_size(found: int, most: int, file: str) -> None:
    """Raises CapacityExceeded, naming `file`."""
    if found > most:
        raise CapacityExceeded(
            f"{file} has {found} bytes, the server reads at most {most}",
            file=file,
            found=found,
            wanted=f"at most {most}",
        )
