"""The shell commands of docs/kubernetes.md, one by one: those of its blocks for a shell, and of its text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kubernetes.md"

# What a command begins with where the text names it.
_NAMED = re.compile(r"`((?:kubectl|helm|slotcar-injector) [^`\n]+)`")
_BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_SEPARATORS = {"|", "||", "&&", ";"}
_REDIRECTIONS = {">", ">>", "<"}


@dataclass(frozen=True, slots=True)
class Command:
    """One program with its arguments, as a shell would start it; `line` is the page's."""

    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"docs/kubernetes.md:{self.line}: {shlex.join(self.words)}"

    @property
    def program(self) -> str:
        return self.words[0]

    @property
    def in_pod(self) -> Command | None:
        """What `kubectl exec` runs in a container."""
        if self.words[:2] != ("kubectl", "exec") or "--" not in self.words:
            return None
        return Command(self.line, self.words[self.words.index("--") + 1 :])


def commands(text: str | None = None) -> list[Command]:
    """All of the page."""
    page = PAGE.read_text(encoding="utf-8") if text is None else text
    return [command for line, words in _lines(page) for command in _simple(line, words)]


def _lines(page: str) -> Iterator[tuple[int, str]]:
    """Each line of a block with its number, continued ones joined; and each command that the text names."""
    for span in _NAMED.finditer(page):
        yield page.count("\n", 0, span.start()) + 1, span[1]
    for block in _BLOCK.finditer(page):
        first = page.count("\n", 0, block.start(1)) + 1
        joined = ""
        for number, line in enumerate(block[1].splitlines(), first):
            joined += line.removesuffix("\\") + " "
            if not line.endswith("\\"):
                yield number, joined
                joined = ""


def _simple(line: int, text: str) -> Iterator[Command]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in (*lexer, ";"):
        if word in _SEPARATORS:
            if words:
                yield Command(line, tuple(_plain(words)))
            words = []
        else:
            words.append(word)


def _plain(words: list[str]) -> Iterator[str]:
    """Without redirections, and without variables that are set before the program."""
    begun = False
    rest = iter(words)
    for word in rest:
        if word in _REDIRECTIONS:
            next(rest)
        elif begun or not re.fullmatch(r"[A-Z_]+=.*", word):
            begun = True
            yield word
