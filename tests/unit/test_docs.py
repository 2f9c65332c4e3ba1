"""What the documentation names exists: files, headings, make targets, commands, options and settings."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from slotcar_sidecar.core.ids import Epoch
from slotcar_sidecar.core.layout import Layout
from slotcar_sidecar.ops.metrics import Metrics, Snapshot

from tests.golden import flags

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(REPOSITORY).as_posix() for path in (*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"))
)

_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_PROMPT = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?")


def text_of(page: str) -> str:
    return (REPOSITORY / page).read_text(encoding="utf-8")


def commands(text: str) -> Iterator[str]:
    """Every shell command in the page: code spans, and the lines of code blocks for a shell, continued ones joined."""
    for language, block in _FENCE.findall(text):
        if language in ("", "sh", "bash", "shell", "console"):
            joined = block.replace("\\\n", " ")
            yield from (_PROMPT.sub("", line.strip()) for line in joined.splitlines())
    yield from (_PROMPT.sub("", span) for span in _SPAN.findall(_FENCE.sub("", text)))


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings have where Markdown is shown: lower case, dashes for spaces."""
    headings = _HEADING.findall(_FENCE.sub("", text))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_resolve(page: str) -> None:
    broken = []
    for link in _LINK.findall(_FENCE.sub("", text_of(page))):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (REPOSITORY / page).parent / path if path else REPOSITORY / page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {word for command in commands(text_of(page)) for word in re.findall(r"^make ([a-z][a-z-]*)", command)}
    assert named - targets == set()


@pytest.mark.parametrize("page", PAGES)
def test_slotcar_commands_exist(page: str) -> None:
    from slotcar_sidecar.cli import main

    assert isinstance(main, click.Group)
    wrong = []
    for command in commands(text_of(page)):
        match = re.match(r"slotcar ([a-z][a-z-]*)\b", command)
        if match is None:
            continue
        verb = main.commands.get(match[1])
        options = {option for parameter in (verb.params if verb else ()) for option in parameter.opts}
        words = [word.partition("=")[0] for word in shlex.split(command, comments=True) if word.startswith("--")]
        if verb is None or not {*words} <= options | {"--help"}:
            wrong.append(command)
    assert wrong == []


def test_flags_are_documented() -> None:
    page = text_of("docs/operations.md")
    assert page == flags.page_with_table(page), "run make docs"


def test_metrics_are_documented() -> None:
    metrics = Metrics()
    metrics.watch(lambda: Snapshot(Layout.empty(Epoch("e"), 1), 0, 0, 0, 0, 0, 0))
    names = set()
    for family in metrics.registry.collect():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        names.add(f"`{family.name}{suffix}`")
    page = text_of("docs/operations.md")
    assert {name for name in names if name not in page} == set()
    assert set(re.findall(r"`slotcar_[a-z_]+`", page)) - names == set()


def test_every_page_is_in_the_index() -> None:
    linked = set(_LINK.findall(text_of("docs/index.md")))
    assert {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")} - linked == {"index.md"}


# Put together here, so that this file does not name them.
_PLACES = [
    "py" + "pi.org",
    "python" + "hosted.org",
    "npm" + "js.",
    "deb." + "debian.org",
    "proxy.go" + "lang.org",
    "download." + "pytorch.org",
    "/wo" + "rk/",
    "/ro" + "ot/.",
    "/opt/" + "wheels",
    "/opt/" + "pypi",
]


def test_no_file_names_a_registry_host_or_a_path_of_one_machine() -> None:
    git = shutil.which("git")
    if git is None or not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout")
    pattern = [argument for place in _PLACES for argument in ("-e", place)]
    command = [git, "grep", "-nIF", "--untracked", *pattern]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 1, found.stdout + found.stderr
