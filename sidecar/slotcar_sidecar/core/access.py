"""Who may do what: the clients of a policy, what tells one from another, and each decision.

Invariant: what is not given is refused. An identity is in one entry; a peer that proves several counts as the first
client in the file that has one of them, so that an entry for other identities never changes what a peer may do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from slotcar_sidecar.core.errors import NotAllowed, RequestInvalid, listed

GROUPS: Mapping[str, frozenset[str]] = {
    "read": frozenset({"GetAdapter", "ListAdapters", "ListDesired", "GetCapacity", "ListSessions", "WatchEvents"}),
    "load": frozenset(
        {
            *("LoadAdapter", "LoadAdapterStream", "UnloadAdapter", "KeepAdapter", "ReleaseKeep"),
            *("EstimateAdapter", "PrefetchAdapters"),
        }
    ),
    "engine": frozenset(
        {
            *("OpenSession", "JoinSession", "CloseSession", "HoldAdapter", "ReleaseHold"),
            *("SetMapping", "ReleaseMapping", "Fence", "Forward", "ForwardStream"),
        }
    ),
    "operate": frozenset({"EndSession", "GetSettings", "SetLogLevel", "Shutdown"}),
}
"""Every RPC of slotcar's services is in one of them; those of health and reflection need no right."""

VERBS = frozenset().union(*GROUPS.values())
PLANES = ("stream", "ring", "direct")
EVERY_NAME = "*"
_MAX_LIST_BYTES = 250


class Proof(StrEnum):
    """What a client is known by."""

    UID = "uid"
    GID = "gid"
    SAN = "san"
    TOKEN = "token_sha256"  # noqa: S105 - the name of a field


@dataclass(frozen=True, slots=True)
class Identity:
    """One thing that a peer proves; a token by the SHA-256 of it, in hex."""

    proof: Proof
    value: str

    def __str__(self) -> str:
        return f"{self.proof} {self.value}"


@dataclass(frozen=True, slots=True)
class Names:
    """The adapters that a client may name: whole names, and beginnings of names that end with "*"."""

    patterns: frozenset[str]
    _beginnings: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        beginnings = tuple(pattern[:-1] for pattern in self.patterns if pattern.endswith("*"))
        object.__setattr__(self, "_beginnings", beginnings)

    def __contains__(self, name: object) -> bool:
        text = str(name)
        return text in self.patterns or text.startswith(self._beginnings)

    @property
    def are_all(self) -> bool:
        return EVERY_NAME in self.patterns

    def are_within(self, others: Names) -> bool:
        """Whether `others` have every name that these have."""
        return all(map(others._has_all_of, self.patterns))

    def _has_all_of(self, pattern: str) -> bool:
        """A beginning of names is had by a shorter one or itself alone, never by whole names."""
        return pattern[:-1].startswith(self._beginnings) if pattern.endswith("*") else pattern in self


@dataclass(frozen=True, slots=True)
class Client:
    """One entry of the policy. The limits are None without one of its own; they count when a session is opened."""

    name: str
    identities: frozenset[Identity]
    verbs: frozenset[str]
    adapters: Names
    planes: frozenset[str]
    max_sessions: int | None = None
    max_reserved_slots: int | None = None

    def check_verb(self, verb: str) -> None:
        """Raises NotAllowed."""
        if verb not in self.verbs:
            raise NotAllowed(self.name, f"call {verb}", verb=verb)

    def check_adapters(self, names: Iterable[str]) -> None:
        """Raises NotAllowed, naming those that the client may not name."""
        if self.adapters.are_all:
            return
        denied = tuple(dict.fromkeys(name for name in names if name not in self.adapters))
        if denied:
            raise NotAllowed(self.name, f"name {listed(denied, _MAX_LIST_BYTES)}", adapter=denied)

    def check_plane(self, plane: str) -> None:
        """Raises NotAllowed."""
        if plane not in self.planes:
            raise NotAllowed(self.name, f"use the plane {plane}", plane=plane)

    def is_within(self, other: Client) -> bool:
        """Whether `other` has every right that this one has, and is known by all that this one is known by."""
        return (
            self.identities <= other.identities
            and self.verbs <= other.verbs
            and self.adapters.are_within(other.adapters)
            and self.planes <= other.planes
        )


class Policy:
    """The clients, in the order of the file."""

    def __init__(self, clients: Sequence[Client]) -> None:
        """Raises RequestInvalid for a name or an identity that two clients have."""
        self.clients = tuple(clients)
        self._named: dict[str, Client] = {}
        self._places: dict[Identity, int] = {}
        for place, client in enumerate(clients):
            if client.name in self._named:
                raise RequestInvalid(f"clients[{place}].name", found=f"{client.name} again", wanted="one entry a name")
            self._named[client.name] = client
            for identity in client.identities:
                first = self._places.setdefault(identity, place)
                if first != place:
                    found = f"what clients[{first}] has"
                    raise RequestInvalid(f"clients[{place}].{identity.proof}", found=found, wanted="another")

    def named(self, name: str) -> Client | None:
        return self._named.get(name)

    def find(self, identities: Iterable[Identity]) -> Client | None:
        """The first client in the file that is known by one of them."""
        places = [self._places[identity] for identity in identities if identity in self._places]
        return self.clients[min(places)] if places else None


def expanded(verbs: Iterable[str]) -> frozenset[str]:
    """RPCs from names of groups and of RPCs. Raises RequestInvalid for what is neither."""
    found: set[str] = set()
    for verb in verbs:
        if verb not in GROUPS and verb not in VERBS:
            raise RequestInvalid("verbs", found=verb, wanted=f"{', '.join(GROUPS)}, or an RPC")
        found |= GROUPS.get(verb, {verb})
    return frozenset(found)
