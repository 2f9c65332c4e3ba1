"""Units of a direct plane at a real server: what they compute, and whether it is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from slotcar_client.session import Session

from tests.faults.direct.child import ROWS, DirectChild
from tests.faults.oracle import Library
from tests.server import SidecarProcess

FEATURES = 64
SITES = dict.fromkeys(("first", "second"), (FEATURES, FEATURES))
A, B, C = "a", "b", "c"
X = torch.ones(ROWS, FEATURES)

Serve = Callable[[int], SidecarProcess]
"""Starts a sidecar with that many slots."""


def assert_rows(library: Library, digest: str, deltas: Any) -> None:
    """All rows of all sites are the digest's."""
    assert deltas.keys() == SITES.keys()
    for site, delta in deltas.items():
        assert not library.wrong_rows([digest], [ROWS], site, X, torch.as_tensor(delta))


def compute(session: Session) -> dict[str, torch.Tensor]:
    return session.forward(dict.fromkeys(SITES, X), row_counts=(ROWS,))


def child_of(sidecar: SidecarProcess, when: str) -> DirectChild:
    """A client with a mapping of A that can stop there."""
    role = "computing" if when == "kernel" else "computing_with_torch"
    return DirectChild(role, sidecar.target, A, ",".join(SITES), FEATURES)


def shared_files() -> list[str]:
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    return [line for line in lines if "memfd:slotcar-slots" in line]
