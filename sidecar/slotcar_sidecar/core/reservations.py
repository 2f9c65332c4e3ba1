"""Slots that sessions reserved: how many of them others leave alone, whoever releases what and when.

A slot that somebody protects is charged to the common pool if any party outside a reservation protects it, and else
to each session that does. What a session has beyond its reservation is charged to the common pool as well:

    common = |slots of others| + Σ over sessions max(0, |own slots| − reserved)

Invariant: common ≤ S − Σ reserved. No release can break it, and while it holds, a session that has fewer slots than it
reserved finds one that is free or can be taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from slotcar_sidecar.core.ids import SessionId

Party = SessionId | None
"""A session, or None for operators' keeps and loads."""


def common_use(parties: Iterable[frozenset[Party]], reserved: Mapping[SessionId, int]) -> int:
    """How many slots of the common pool are in use, where `parties` says per protected slot who protects it."""
    common = 0
    own: Counter[SessionId] = Counter()
    for protectors in parties:
        sessions = {party for party in protectors if party is not None and party in reserved}
        if len(sessions) < len(protectors):
            common += 1
        else:
            own.update(sessions)
    return common + sum(max(0, count - reserved[session]) for session, count in own.items())
