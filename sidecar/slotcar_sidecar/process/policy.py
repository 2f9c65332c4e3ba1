"""Reads the file of --policy: strict, so that what is misspelt is refused instead of being given to nobody or all.

apiVersion: slotcar.dev/v1
clients:
  - name: engine
    uid: [1000]
    verbs: [engine, read]
    adapters: ["team-a/*"]
    planes: [stream, ring]

Invariant: a token is in memory as its SHA-256 alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.config import Config
from slotcar_sidecar.core.access import EVERY_NAME, PLANES, Client, Identity, Names, Policy, Proof, expanded
from slotcar_sidecar.core.denials import Denials
from slotcar_sidecar.core.errors import RequestInvalid, SourceUnavailable
from slotcar_sidecar.core.ids import AdapterName
from slotcar_sidecar.ops.audit import audit
from slotcar_sidecar.process.reload import Reloads
from slotcar_sidecar.process.sockets import StartError
from slotcar_sidecar.rpc.access import Access
from slotcar_sidecar.sync.fields import as_mapping, as_text, document, kind
from slotcar_sidecar.sync.file import MAX_FILE_BYTES, contents
from slotcar_sidecar.sync.text import Plain

__all__ = ["MIN_TOKEN_BYTES", "PolicyFile", "make_access", "parse_policy"]

MIN_TOKEN_BYTES = 16
_MAX_TOKEN_BYTES = 8 << 10
_MAX_CLIENTS = 1000
_MAX_LIST = 1000
_MAX_ID = 2**32 - 2
_TOP_KEYS = ("apiVersion", "clients")
_KEYS = (
    *("name", "uid", "gid", "san", "token_file", "token_sha256"),
    *("verbs", "adapters", "planes", "max_sessions", "max_reserved_slots"),
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/-]{0,99}")
_NAME_WANTED = "1 to 100 letters, digits, '.', '_', '@', '/' or '-', a letter or digit first"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NUMBER = re.compile(r"[0-9]{1,10}")
_TEXT = re.compile(r"[\x21-\x7e]{1,255}")

TokenHash = Callable[[str], str]
"""The SHA-256, in hex, of the token in the file of this name. Raises OSError, SourceUnavailable or RequestInvalid."""


class PolicyFile:
    """The file and those of the tokens that it names, to be read again when one of them changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tokens: set[Path] = set()

    def files(self) -> tuple[Path, ...]:
        """What the policy was read from when it was read last."""
        return (self._path, *sorted(self._tokens))

    def read(self) -> Policy:
        """Raises RequestInvalid, naming the file and the field, SourceUnavailable or OSError."""
        self._tokens = set()
        try:
            return parse_policy(_decoded(contents(self._path, MAX_FILE_BYTES)), str(self._path), self._token_hash)
        except RequestInvalid as error:
            raise error.at(f"{self._path}: {error.field}") from None

    def _token_hash(self, file: str) -> str:
        path = Path(file)
        if not (path.is_absolute() and file.isprintable()):
            raise RequestInvalid("token_file", found=file, wanted="an absolute path")
        self._tokens.add(path)
        try:
            token = contents(path, _MAX_TOKEN_BYTES).strip()
        except RequestInvalid as error:
            raise error.at("token_file") from None
        if not MIN_TOKEN_BYTES <= len(token) <= _MAX_TOKEN_BYTES:
            wanted = f"a token of {MIN_TOKEN_BYTES} to {_MAX_TOKEN_BYTES} bytes in {file}"
            raise RequestInvalid("token_file", found=f"{len(token)} bytes", wanted=wanted)
        return hashlib.sha256(token).hexdigest()


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestInvalid("the file", found=f"byte {data[error.start]:#x}", wanted="UTF-8") from None


def parse_policy(content: str, file: str, token_hash: TokenHash) -> Policy:
    """The policy that the content of the file called `file` is. Raises RequestInvalid, or what `token_hash` raises."""
    fields = document(content, file, _TOP_KEYS)
    entries = fields.get("clients")
    if not isinstance(entries, list) or len(entries) > _MAX_CLIENTS:
        found = f"{len(entries)} of them" if isinstance(entries, list) else kind(entries)
        raise RequestInvalid("clients", found=found, wanted=f"a list of at most {_MAX_CLIENTS}; [] for nobody")
    clients = []
    for index, entry in enumerate(entries):
        place = f"clients[{index}]"
        try:
            clients.append(_client(as_mapping(place, entry, _KEYS), token_hash))
        except RequestInvalid as error:
            field = str(error.field)
            raise (error if field.startswith(place) else error.at(f"{place}.{field}")) from None
    return Policy(clients)


def _client(fields: Mapping[str, Plain], token_hash: TokenHash) -> Client:
    identities = {Identity(proof, text) for proof in Proof for text in _proofs(proof, fields)}
    if "token_file" in fields:
        identities |= {Identity(Proof.TOKEN, token_hash(file)) for file in _texts("token_file", fields)}
    if not identities:
        raise RequestInvalid("uid", found="nothing", wanted="uid, gid, san, token_file or token_sha256")
    planes = _texts("planes", fields) if "planes" in fields else ["stream"]
    for plane in planes:
        if plane not in PLANES:
            raise RequestInvalid("planes", found=plane, wanted=" or ".join(PLANES))
    return Client(
        _matched("name", as_text("name", fields.get("name", "")), _NAME, _NAME_WANTED),
        frozenset(identities),
        expanded(_texts("verbs", fields)),
        Names(frozenset(map(_pattern, _texts("adapters", fields)))),
        frozenset(planes),
        _limit("max_sessions", fields),
        _limit("max_reserved_slots", fields),
    )


def _proofs(proof: Proof, fields: Mapping[str, Plain]) -> list[str]:
    texts = _texts(proof, fields) if proof in fields else []
    match proof:
        case Proof.UID | Proof.GID:
            return [str(_number(proof, text, _MAX_ID)) for text in texts]
        case Proof.TOKEN:
            return [_matched(proof, text, _SHA256, "64 lower-case hex digits") for text in texts]
        case _:
            return [_matched(proof, text, _TEXT, "a DNS name or a URI") for text in texts]


def _pattern(text: str) -> str:
    """A whole name, or a beginning of names with a "*" after it."""
    if text == EVERY_NAME:
        return text
    try:
        AdapterName(f"{text[:-1]}x" if text.endswith("*") else text)
    except RequestInvalid:
        wanted = "an adapter's name, the beginning of names and '*', or '*'"
        raise RequestInvalid("adapters", found=text, wanted=wanted) from None
    return text


def _limit(field: str, fields: Mapping[str, Plain]) -> int | None:
    return _number(field, as_text(field, fields[field]), _MAX_ID) if field in fields else None


def _number(field: str, text: str, most: int) -> int:
    number = int(_matched(field, text, _NUMBER, f"a number up to {most}"))
    if number > most:
        raise RequestInvalid(field, found=text, wanted=f"a number up to {most}")
    return number


def _matched(field: str, text: str, pattern: re.Pattern[str], wanted: str) -> str:
    if not pattern.fullmatch(text):
        raise RequestInvalid(field, found=text, wanted=wanted)
    return text


def _texts(field: str, fields: Mapping[str, Plain]) -> list[str]:
    """A list of texts; one text is a list of it."""
    value = fields.get(field)
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or len(values) > _MAX_LIST:
        found = f"{len(values)} of them" if isinstance(values, list) else kind(values)
        raise RequestInvalid(field, found=found, wanted=f"a list of at most {_MAX_LIST}; [] for none")
    return [as_text(field, each) for each in values]


def make_access(config: Config, cache: AdapterCache, reloads: Reloads) -> Access | None:
    """The policy of the settings in force, followed while it changes; None without one. Raises StartError."""
    if config.policy is None:
        return None
    file = PolicyFile(config.policy)
    denials = Denials(cache.environment.clock, lambda facts: audit("denied", **facts))
    access = Access(Policy(()), cache, denials)
    reloads.add("policy", file.files, lambda: access.replace(file.read()))
    try:
        access.replace(file.read())
    except (RequestInvalid, SourceUnavailable) as error:
        raise StartError(f"--policy cannot be used: {error.message}") from error
    except OSError as error:
        raise StartError(f"--policy cannot be used: {error.filename}: {error.strerror}") from error
    return access
