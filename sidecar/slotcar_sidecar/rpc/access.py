"""Decides who calls and whether the policy lets them: once for a stream or a connection, else for each call.

Invariant: a stream, a token or a session of a client ends in the step that takes a right from the client, and a session
is used by the client that opened it alone. All of it is on the owner's thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from google.protobuf.message import Message
from grpc import aio
from slotcar.v1 import engine_service_pb2

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.core.access import Client, Identity, Policy, Proof
from slotcar_sidecar.core.caller import CALLER, Caller
from slotcar_sidecar.core.denials import Denials
from slotcar_sidecar.core.errors import CapacityExceeded, NotAllowed, SlotcarError, Unauthenticated
from slotcar_sidecar.core.ids import SessionId
from slotcar_sidecar.core.session import Session
from slotcar_sidecar.rpc.named import adapters_of, sessions_of

Context = aio.ServicerContext[Any, Any]

_AUTHORIZATION = "authorization"
_NO_CREDENTIALS = "no credentials"
_BEARER = "Bearer "
_TOKEN_BYTES = 32
# The hash of the token that the call of now came with.
_TOKEN: ContextVar[str] = ContextVar("token", default="")
MAX_TOKENS_OF_A_CLIENT = 256
_TOLD = ("adapter", "plane", "session", "found")
_FORWARDS = frozenset({"Forward", "ForwardStream"})


@dataclass(slots=True, eq=False)
class Stream:
    """A call that lasts: of whom, the hash of its token, and whether it may last no more."""

    client: str
    task: asyncio.Task[Any]
    token: str
    is_revoked: bool = False
    _is_sending: bool = False

    def revoke(self) -> None:
        """Ends what it waits for. What gRPC sends for it is let out, as its status could not follow otherwise."""
        self.is_revoked = True
        if not self._is_sending:
            self.task.cancel()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """gRPC has the task in the body. Raises NotAllowed after it when it may last no more."""
        self._is_sending = True
        try:
            yield
        finally:
            self._is_sending = False
        self.check()

    def check(self) -> None:
        """Raises NotAllowed when it may last no more."""
        if self.is_revoked:
            raise NotAllowed(self.client, "go on, as it changed, or the token has ended")


@dataclass(frozen=True, slots=True, eq=False)
class Token:
    """One that was issued: to whom, by its hash; `end` ends the connection that it lives with."""

    client: str
    identities: frozenset[Identity]
    hash: str
    end: Callable[[], None]


class Access:
    """The policy in force, and what clients have by it. `denials` is told of each refusal."""

    def __init__(self, policy: Policy, cache: AdapterCache, denials: Denials) -> None:
        self.policy = policy
        self._cache = cache
        self._denials = denials
        self._tokens: dict[str, Token] = {}
        self._streams: defaultdict[str, set[Stream]] = defaultdict(set)
        self.when_replaced: list[Callable[[], None]] = []

    # Changes of the policy

    def replace(self, policy: Policy) -> None:
        """From now on this policy counts. Who loses a right loses its streams and sessions, and nobody else does."""
        before, self.policy = self.policy, policy
        for client in before.clients:
            now = policy.named(client.name)
            if now is None or not client.is_within(now):
                self._revoke(client.name)
        for token in tuple(self._tokens.values()):
            found = policy.find(token.identities)
            if found is None or found.name != token.client:
                token.end()
        for call in self.when_replaced:
            call()

    def _revoke(self, name: str) -> None:
        for stream in self._streams.pop(name, ()):
            stream.revoke()
        for session in tuple(self._cache.sessions):
            if session.terms.owner == name:
                self._cache.close_session(session.session_id, "the policy changed")

    def look(self) -> None:
        """Tells of refusals that were not told yet, as there were many."""
        self._denials.look()

    # Tokens

    @property
    def tokens(self) -> int:
        """How many there are."""
        return len(self._tokens)

    def issue(self, identities: frozenset[Identity], said: str, end: Callable[[], None]) -> tuple[str, Token]:
        """A token for a process of this machine, until `forget`; `said` names it. Raises SlotcarError."""
        client = self.client_of_peer(identities, said)
        of_client = sum(token.client == client.name for token in self._tokens.values())
        if of_client >= MAX_TOKENS_OF_A_CLIENT:
            message = f"client {client.name} has {of_client} tokens: close connections"
            raise CapacityExceeded(message, found=of_client, wanted=f"fewer than {MAX_TOKENS_OF_A_CLIENT}")
        text = secrets.token_urlsafe(_TOKEN_BYTES)
        token = Token(client.name, identities, _hash(text), end)
        self._tokens[token.hash] = token
        return text, token

    def forget(self, token: Token) -> None:
        """Its connection is gone, and what still runs by it ends. Idempotent."""
        self._tokens.pop(token.hash, None)
        for stream in tuple(self._streams.get(token.client, ())):
            if stream.token == token.hash:
                stream.revoke()

    # Who calls

    def client_of_peer(self, identities: frozenset[Identity], said: str) -> Client:
        """The client that a process of this machine is. Raises Unauthenticated."""
        client = self.policy.find(identities)
        if client is None:
            raise self._denied(Unauthenticated(said), "", "PlaneHello", said)
        return client

    def _client_of(self, context: Context, verb: str, peer: str) -> Client:
        """Who makes the call: its token decides if it has one, else its certificate. Raises Unauthenticated."""
        token = _bearer(context)
        if token is not None:
            client, found = self._client_of_token(token, peer, context), "the call's token"
        else:
            names = [name.decode(errors="replace") for name in _names(context)]
            client = self.policy.find(Identity(Proof.SAN, name) for name in names)
            found = f"a certificate for {', '.join(names[:8])}" if names else _NO_CREDENTIALS
        if client is not None:
            return client
        error = Unauthenticated(found)
        if found == _NO_CREDENTIALS and _is_unix(peer):
            raise error  # how clients find out that they need a token; who may have none is told of in the hand-shake
        raise self._denied(error, "", verb, peer)

    def _client_of_token(self, token: str, peer: str, context: Context) -> Client | None:
        """Found by its hash, so that how long it takes says nothing about any token."""
        hashed = _hash(token)
        _TOKEN.set(hashed)
        issued = self._tokens.get(hashed)
        if issued is not None:
            return self.policy.named(issued.client) if _is_unix(peer) else None
        if not (_is_near(peer) or _is_private(context)):
            return None
        return self.policy.find([Identity(Proof.TOKEN, hashed)])

    # What they may do

    def admit(self, verb: str, context: Context) -> None:
        """Makes the call its client's. Raises Unauthenticated or NotAllowed."""
        peer = context.peer()
        client = self._client_of(context, verb, peer)
        CALLER.set(Caller(client.name, client))
        with self._telling(client.name, verb, peer):
            client.check_verb(verb)
            if verb in _FORWARDS:
                client.check_plane("stream")

    def admit_owner(self, session: Session, verb: str) -> None:
        """The same for a call on a plane: it is made by the client whose session it is."""
        client = self.policy.named(session.terms.owner)
        if client is None:
            raise self._denied(Unauthenticated("this session"), session.terms.owner, verb, "ring")
        CALLER.set(Caller(client.name, client))
        with self._telling(client.name, verb, "ring"):
            client.check_verb(verb)

    def check_peer(self, identities: frozenset[Identity], session_id: SessionId, plane: str, said: str) -> None:
        """Whether a process of this machine, called `said`, may use the plane for the session. Raises SlotcarError."""
        client = self.client_of_peer(identities, said)
        session = self._cache.sessions.get(session_id)
        with self._telling(client.name, "PlaneHello", said):
            self._check_owner(session, client)
            client.check_verb("Forward")
            client.check_plane(plane)

    def check(self, request: Message, verb: str, peer: str) -> None:
        """Whether the caller may name what the request names. Raises NotAllowed or CapacityExceeded."""
        with self._telling(CALLER.get().name, verb, peer):
            self._check(request)

    def _check(self, request: Message) -> None:
        caller = CALLER.get()
        client = caller.rights
        assert client is not None, "the call was admitted"
        for text in sessions_of(request):
            session = self._cache.sessions.peek(SessionId(text))
            if session is not None:
                self._check_owner(session, client)
        if caller.is_limited:
            client.check_adapters(ref.partition("@")[0] for ref in adapters_of(request, self._cache.limits))
        if isinstance(request, engine_service_pb2.OpenSessionRequest) and not request.resume_session:
            self._check_room(client, request.reserved_slots)

    def _check_owner(self, session: Session, client: Client) -> None:
        if session.terms.owner != client.name:
            short = session.session_id.short
            raise NotAllowed(client.name, f"use session {short}, which is another client's", session=short)

    def _check_room(self, client: Client, reserved: int) -> None:
        terms = [session.terms for session in self._cache.sessions if session.terms.owner == client.name]
        slots = reserved + sum(each.reserved_slots for each in terms)
        for what, found, most in (
            ("sessions", len(terms) + 1, client.max_sessions),
            ("reserved slots", slots, client.max_reserved_slots),
        ):
            if most is not None and found > most:
                message = f"client {client.name} would have {found} {what}, the policy allows {most}"
                raise CapacityExceeded(message, client=client.name, found=found, wanted=most)

    @contextmanager
    def _telling(self, client: str, verb: str, peer: str) -> Iterator[None]:
        """Tells of the refusal that the body raises."""
        try:
            yield
        except NotAllowed as error:
            raise self._denied(error, client, verb, peer) from None

    def _denied(self, error: SlotcarError, client: str, verb: str, peer: str) -> SlotcarError:
        facts = {"client": client, "method": verb, "peer": peer, "reason": error.reason.value}
        facts |= {key: error.facts[key] for key in _TOLD if key in error.facts}
        self._denials.tell(client, facts)
        return error

    # Calls that last

    @contextmanager
    def lasting(self) -> Iterator[Stream]:
        """Raises NotAllowed in the body, wherever it waits, when the caller loses a right or its token."""
        name = CALLER.get().name
        task = asyncio.current_task()
        assert task is not None
        stream = Stream(name, task, _TOKEN.get())
        self._streams[name].add(stream)
        try:
            yield stream
            stream.check()
        except asyncio.CancelledError:
            if not stream.is_revoked:
                raise
            task.uncancel()
            stream.check()
        finally:
            streams = self._streams.get(name)
            if streams is not None:
                streams.discard(stream)
                if not streams:
                    del self._streams[name]

    def checked(self, request: Any, verb: str, peer: str) -> Any:
        """The request, or the stream of them, in which the refusal of one stands in its place. Raises NotAllowed."""
        if not isinstance(request, Message):
            return self._each_checked(request, verb, peer)
        self.check(request, verb, peer)
        return request

    async def _each_checked(self, requests: AsyncIterator[Any], verb: str, peer: str) -> AsyncIterator[Any]:
        async for request in requests:
            try:
                if isinstance(request, Message):
                    self.check(request, verb, peer)
            except SlotcarError as error:
                yield error
            else:
                yield request


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _bearer(context: Context) -> str | None:
    """The token that the call carries, None without one."""
    for key, value in context.invocation_metadata() or ():
        if key == _AUTHORIZATION and isinstance(value, str) and value.startswith(_BEARER):
            return value.removeprefix(_BEARER)
    return None


def _names(context: Context) -> list[bytes]:
    """The DNS names and URIs of the certificate that the peer has shown."""
    shown: Mapping[str, Any] = context.auth_context()
    return [*shown.get("peer_dns", ()), *shown.get("peer_uri", ())]


def _is_private(context: Context) -> bool:
    return context.auth_context().get("transport_security_type") in ([b"ssl"], (b"ssl",))


def _is_unix(peer: str) -> bool:
    return peer.startswith("unix:")


def _is_near(peer: str) -> bool:
    """The peer is on this machine, so that nobody between could read a token."""
    if _is_unix(peer):
        return True
    host = unquote(peer.partition(":")[2]).rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
