"""Which remote places may be read: URIs in one spelling, and the prefixes of them that the operator allowed.

Nothing here looks at a network. A URI has no query, user, port, escape, `..` or empty component: whatever could mean
two things is denied.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from slotcar_sidecar.core.errors import SourceDenied
from slotcar_sidecar.store.faults import shown

__all__ = ["HUB", "LOCAL_SCHEMES", "Rule", "RuleInvalid", "Target", "parse_rule", "parse_target", "scheme_of"]

HUB = "hf"
LOCAL_SCHEMES = ("", "file", "local")
_MAX_URI = 1024
_SCHEME = re.compile(r"([a-z][a-z0-9+.\-]{0,30})://")
_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+\-]{0,200}")
_PATTERN = re.compile(r"[A-Za-z0-9_*][A-Za-z0-9._=+\-*]{0,200}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._\-]{0,200}")


class RuleInvalid(ValueError):
    """A `--source` that means nothing; the message says what is wanted."""


@dataclass(frozen=True, slots=True)
class Target:
    """A remote folder: (bucket, prefix…) or (organisation, repository, folder…), with a revision for the hub."""

    scheme: str
    path: tuple[str, ...]
    revision: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{'/'.join(self.path)}{'@' if self.revision else ''}{self.revision}"


@dataclass(frozen=True, slots=True)
class Rule:
    """Allows what begins with `path`, whole components; for the hub `*` stands for any part of one."""

    scheme: str
    path: tuple[str, ...]

    def allows(self, target: Target) -> bool:
        if self.scheme != target.scheme or len(self.path) > len(target.path):
            return False
        pairs = zip(target.path, self.path, strict=False)
        return all(fnmatchcase(found, wanted) if self.scheme == HUB else found == wanted for found, wanted in pairs)

    def __str__(self) -> str:
        return f"{self.scheme}://{'/'.join(self.path)}"


def scheme_of(uri: str) -> str:
    """The scheme of a URI, in lower case; "" for a path and for what is no URI."""
    match = _SCHEME.match(uri[:64].lower())
    return match[1] if match else ""


def parse_rule(text: str) -> Rule:
    """A prefix of URIs as `--source` gives it. Raises RuleInvalid."""
    match = _SCHEME.match(text)
    if match is None or match[1] in LOCAL_SCHEMES:
        raise RuleInvalid("hf://org/repo or a prefix such as s3://bucket/folder; folders of this machine are --root's")
    path = tuple(text[match.end() :].rstrip("/").split("/"))
    kind = _PATTERN if match[1] == HUB else _COMPONENT
    if not all(kind.fullmatch(part) for part in path):
        raise RuleInvalid("a prefix of plain components; * stands for any part of one of hf://")
    return Rule(match[1], path)


def parse_target(uri: str, rules: tuple[Rule, ...]) -> Target:
    """The folder that `uri` names, if a rule allows it. Raises SourceDenied, before anything is asked for."""
    match = _SCHEME.match(uri)
    scheme = match[1] if match else ""
    if match is None or len(uri) > _MAX_URI or not any(rule.scheme == scheme for rule in rules):
        raise _denied(uri, f"a --source {scheme_of(uri) or 'scheme'}://… that allows it")
    path, revision = uri[match.end() :], ""
    if scheme == HUB:
        path, _, revision = path.partition("@")
        if not _REVISION.fullmatch(revision):
            raise _denied(uri, "hf://org/repo@revision or hf://org/repo/folder@revision")
    target = Target(scheme, tuple(path.removesuffix("/").split("/")), revision)
    if not all(_COMPONENT.fullmatch(part) for part in target.path) or (scheme == HUB and len(target.path) < 2):
        raise _denied(uri, "plain components of letters, digits and ._=+-, without .. or escapes")
    if not any(rule.allows(target) for rule in rules):
        raise _denied(uri, f"a place beneath --source {' or '.join(str(r) for r in rules if r.scheme == scheme)}")
    return target


def _denied(uri: str, wanted: str) -> SourceDenied:
    # What is between :// and @ may be a password.
    said = shown(re.sub(r"//[^/@]*@", "//…@", uri.partition("?")[0][:_MAX_URI]))
    return SourceDenied(f"the source {said} is not allowed, wanted {wanted}", found=said, wanted=wanted)
