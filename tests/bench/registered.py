"""`slotcar` whose server knows many adapters from its start: `python -m tests.bench.registered COUNT serve …`.

They have names, digests and sources, and are in no tier: loading a hundred thousand would take an hour.
"""

from __future__ import annotations

import functools
import sys

from slotcar_sidecar import app, cli
from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.core.ids import AdapterName

from tests.fakes.parts import weights_of

__all__ = ["register"]


def register(cache: AdapterCache, count: int) -> AdapterCache:
    """Gives names to `count` adapters that no other names have."""
    for number in range(count):
        adapter = weights_of(f"registered {number}", source=f"/elsewhere/{number}").adapter
        cache.residency.names.bind(AdapterName(f"registered-{number}"), adapter, None)
    return cache


def main() -> None:
    count = int(sys.argv.pop(1))
    vars(app)["AdapterCache"] = functools.partial(_make, count)
    cli.main()


def _make(count: int, *parts: object) -> AdapterCache:
    return register(AdapterCache(*parts), count)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
