"""What a remote source needs beside its URI, from a JSON file; secrets are there by reference only.

{"s3://bucket": {"endpoint": "https://…", "region": "…", "key": {"env": "NAME"}, "secret": {"file": "/run/secret"}}}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slotcar_sidecar.core.errors import AdapterInvalid, SourceUnavailable
from slotcar_sidecar.store.sources.rules import Rule, RuleInvalid, Target, parse_rule
from slotcar_sidecar.store.strict_json import parse_object

__all__ = ["Options", "OptionsInvalid", "options_for", "parse_options"]

_TEXTS = ("endpoint", "region")
_SECRETS = ("key", "secret", "token")


class OptionsInvalid(ValueError):
    """A file of options that means nothing; the message says where, and quotes no value."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the sources beneath `rule`; a printed one shows no secret, as it has none, only where they are."""

    rule: Rule | None = None
    endpoint: str | None = None
    region: str | None = None
    ambient: bool = False
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    arguments: Mapping[str, object] = field(default_factory=dict)
    environment: Callable[[str], str | None] = field(default=lambda _: None, repr=False)

    def secret(self, name: str) -> str | None:
        """The value that is referred to, read now. Raises SourceUnavailable, naming the reference."""
        reference = self.secrets.get(name)
        return None if reference is None else self._referred(name, reference)

    def plain_arguments(self) -> dict[str, object]:
        """What a filesystem of fsspec is made with, references replaced by what they refer to."""
        items = self.arguments.items()
        return {name: self._referred(name, value) if isinstance(value, dict) else value for name, value in items}

    def _referred(self, name: str, reference: Mapping[str, str]) -> str:
        ((kind, place),) = reference.items()
        try:
            value = self.environment(place) if kind == "env" else Path(place).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            value = None
        if not value:
            raise SourceUnavailable(
                f"the {name} of {self.rule} is not at {kind} {place}", found="credentials", wanted=f"{kind} {place}"
            )
        return value


def parse_options(text: bytes, environment: Callable[[str], str | None]) -> tuple[Options, ...]:
    """The options in a file. Raises OptionsInvalid."""
    try:
        found = parse_object(text, "--source-options")
        return tuple(_options(parse_rule(prefix), value, environment) for prefix, value in found.items())
    except (AdapterInvalid, RuleInvalid) as error:
        raise OptionsInvalid(str(error)) from error


def options_for(target: Target, options: tuple[Options, ...]) -> Options:
    """Those with the longest prefix; none are given by none."""
    fitting = [each for each in options if each.rule is not None and each.rule.allows(target)]
    return max(fitting, key=lambda each: len(each.rule.path) if each.rule else 0, default=Options())


def _options(rule: Rule, value: Any, environment: Callable[[str], str | None]) -> Options:
    if not isinstance(value, dict):
        raise OptionsInvalid(f"{rule} wants an object")
    texts: dict[str, str] = {}
    secrets: dict[str, Mapping[str, str]] = {}
    arguments: dict[str, object] = {}
    for name, given in value.items():
        if name in _TEXTS and isinstance(given, str):
            texts[name] = given
        elif name in _SECRETS:
            secrets[name] = _reference(rule, name, given)
        elif name == "arguments" and isinstance(given, dict):
            arguments = {key: _reference(rule, key, it) if isinstance(it, dict) else it for key, it in given.items()}
        elif name != "ambient" or not isinstance(given, bool):
            wanted = ", ".join((*_TEXTS, "ambient", "arguments", *_SECRETS))
            raise OptionsInvalid(f"{rule} has a wrong option {name[:40]!r}: wanted {wanted}")
    ambient = value.get("ambient", False)
    return Options(rule, texts.get("endpoint"), texts.get("region"), ambient, secrets, arguments, environment)


def _reference(rule: Rule, name: str, given: Any) -> Mapping[str, str]:
    """A secret itself is refused here, and not shown."""
    match given:
        case {"env": str(_)} | {"file": str(_)} if len(given) == 1:
            return dict(given)
    raise OptionsInvalid(f'{rule} has {name} that is no reference: wanted {{"env": NAME}} or {{"file": PATH}}')
