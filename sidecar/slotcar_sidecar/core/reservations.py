"""Slots that sessions reserved: how many of them others leave alone, whoever releases what and when.

The promise: a session that has fewer slots than it reserved finds one that is free or can be taken. So the slots that
are protected and those that are still owed never exceed S:

    owed = |protected| + Σ over sessions max(0, reserved − |its slots|) ≤ S

A release may owe a session more, where others protect the slot too. Hence what goes beyond a reservation is admitted
only while `common_use ≤ S − Σ reserved`, where a slot counts once if any party without a reservation protects it, and
else for each of its sessions, beyond what that reserved:

    common_use = |slots of others| + Σ over sessions max(0, |slots of no others| − reserved)

Why that is enough: call c the largest value of |P| − Σ min(|slots given to a session|, reserved), over every way to
give each protected slot to one of its parties. Then owed ≤ c + Σ reserved, c ≤ common_use, no release makes c larger,
and neither does a session that takes a slot within its reservation: given to it, the slot counts in both terms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from slotcar_sidecar.core.ids import SessionId

Party = SessionId | None
"""A session, or None for operators' keeps and loads."""


def owed(parties: Iterable[frozenset[Party]], reserved: Mapping[SessionId, int]) -> int:
    """How many slots are protected or still owed to a session, where `parties` says per protected slot who does."""
    protected, slots = 0, Counter[Party]()
    for protectors in parties:
        protected += 1
        slots.update(protectors)
    return protected + sum(max(0, count - slots[session]) for session, count in reserved.items())


def common_use(parties: Iterable[frozenset[Party]], reserved: Mapping[SessionId, int]) -> int:
    """How many slots of the common pool are in use or may come to be, where `parties` is as in `owed`."""
    common = 0
    own: Counter[SessionId] = Counter()
    for protectors in parties:
        sessions = {party for party in protectors if party is not None and party in reserved}
        if len(sessions) < len(protectors):
            common += 1
        else:
            own.update(sessions)
    return common + sum(max(0, count - reserved[session]) for session, count in own.items())


def is_within_reservation(party: Party, parties: Iterable[frozenset[Party]], reserved: Mapping[SessionId, int]) -> bool:
    """Whether all slots that the party protects are of its reservation."""
    return (
        party is not None
        and party in reserved
        and sum(party in protectors for protectors in parties) <= reserved[party]
    )
