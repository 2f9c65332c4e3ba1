"""The policy's decisions: total, refusing by default, and nobody's rights depend on somebody else's entry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcar.v1 import adapter_service_pb2, engine_service_pb2, operator_service_pb2
from slotcar_sidecar.core.access import GROUPS, PLANES, VERBS, Client, Identity, Names, Policy, Proof, expanded
from slotcar_sidecar.core.errors import NotAllowed, RequestInvalid

IDENTITIES = st.builds(Identity, st.sampled_from(Proof), st.sampled_from("0123456789"))
PATTERNS = st.frozensets(st.sampled_from(["*", "a", "a*", "a/*", "a/b", "b/*", "b/c", "c"]), max_size=3)
NAMES = st.sampled_from(["a", "a/b", "a/bc", "ab", "b/c", "c", "c/d"])


@st.composite
def clients(draw: st.DrawFn, name: str, identities: frozenset[Identity]) -> Client:
    return Client(
        name,
        identities,
        frozenset(draw(st.sets(st.sampled_from(sorted(VERBS)), max_size=4))),
        Names(draw(PATTERNS)),
        frozenset(draw(st.sets(st.sampled_from(PLANES)))),
    )


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Up to four clients; no identity is in two of them."""
    left = draw(st.lists(IDENTITIES, unique=True, max_size=8))
    made = []
    for number in range(draw(st.integers(0, 4))):
        taken, left = left[: (count := draw(st.integers(0, len(left))))], left[count:]
        made.append(draw(clients(f"client-{number}", frozenset(taken))))
    return Policy(made)


PEERS = st.frozensets(IDENTITIES, max_size=4)


def may(client: Client | None, verb: str, name: str, plane: str) -> bool:
    if client is None:
        return False
    try:
        client.check_verb(verb)
        client.check_adapters([name])
        client.check_plane(plane)
    except NotAllowed:
        return False
    return True


@given(policies(), PEERS, st.sampled_from(sorted(VERBS)), NAMES, st.sampled_from(PLANES), st.data())
def test_an_entry_for_others_changes_nothing_for_me(
    policy: Policy, me: frozenset[Identity], verb: str, name: str, plane: str, data: st.DataObject
) -> None:
    """To see it fail: take the client whose entry comes last."""
    known = {identity for client in policy.clients for identity in client.identities}
    others = frozenset(data.draw(PEERS)) - me - known
    entry = data.draw(clients("another", others))
    place = data.draw(st.integers(0, len(policy.clients)))
    wider = Policy([*policy.clients[:place], entry, *policy.clients[place:]])
    assert wider.find(me) == policy.find(me)
    assert may(wider.find(me), verb, name, plane) == may(policy.find(me), verb, name, plane)


@given(policies(), PEERS)
def test_who_is_known_by_nothing_is_nobody(policy: Policy, me: frozenset[Identity]) -> None:
    found = policy.find(me)
    assert (found is None) == all(not client.identities & me for client in policy.clients)
    assert found is None or found == next(client for client in policy.clients if client.identities & me)


@given(st.data(), NAMES)
def test_a_client_within_another_may_nothing_that_it_may_not(data: st.DataObject, name: str) -> None:
    """So sessions end whenever a right is taken: to see it fail, compare patterns as a set."""
    before, after = (data.draw(clients("me", data.draw(PEERS))) for _ in range(2))
    if before.is_within(after):
        for verb in VERBS:
            assert not may(before, verb, name, "ring") or may(after, verb, name, "ring")
        assert before.identities <= after.identities


def test_every_rpc_is_in_one_group_and_groups_have_no_others() -> None:
    """A new RPC needs a place in core/access.py."""
    files = (adapter_service_pb2, engine_service_pb2, operator_service_pb2)
    rpcs = [m.name for file in files for s in file.DESCRIPTOR.services_by_name.values() for m in s.methods]
    assert sorted(rpcs) == sorted(verb for group in GROUPS.values() for verb in group)


def test_verbs_are_groups_and_rpcs() -> None:
    assert expanded(["engine", "GetAdapter"]) == GROUPS["engine"] | {"GetAdapter"}
    with pytest.raises(RequestInvalid, match="'write'"):
        expanded(["write"])


def test_a_pattern_is_a_name_or_the_beginning_of_names() -> None:
    names = Names(frozenset({"a/*", "b"}))
    assert [name in names for name in ("a/x", "a", "ab", "b", "b/x", "bc")] == [True, False, False, True, False, False]


@pytest.mark.parametrize(
    ("before", "after", "is_within"),
    [
        ("a*", "a", False),
        ("a/*", "a*", True),
        ("a*", "a*", True),
        ("a*", "a/*", False),
        ("a", "a*", True),
        ("*", "a*", False),
        ("a*", "*", True),
        ("*", "*", True),
    ],
)
def test_a_beginning_of_names_is_within_no_whole_name(before: str, after: str, is_within: bool) -> None:
    """To see it fail: look for the beginning as a name."""
    assert Names(frozenset({before})).are_within(Names(frozenset({after}))) == is_within


@pytest.mark.parametrize("second", [{"name": "x"}, {"identities": frozenset({Identity(Proof.UID, "1")})}])
def test_two_entries_for_one_are_refused(second: dict[str, object]) -> None:
    """Which of them counts would be a guess."""
    first = Client("x", frozenset({Identity(Proof.UID, "1")}), VERBS, Names(frozenset()), frozenset())
    facts = {"name": "y", "identities": frozenset({Identity(Proof.UID, "2")})} | second
    other = Client(verbs=VERBS, adapters=Names(frozenset()), planes=frozenset(), **facts)  # type: ignore[arg-type]
    with pytest.raises(RequestInvalid, match=r"clients\[1\]"):
        Policy([first, other])
