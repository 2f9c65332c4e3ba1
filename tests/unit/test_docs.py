"""What the documentation names exists, and its programs in Python run.

Files, headings, make targets, commands, options, settings, metrics, error reasons and events are looked up; the blocks
of a page are run from top to bottom against a real sidecar.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import slotcar_client
import torch
from slotcar_sidecar.core.errors import Reason
from slotcar_sidecar.core.events import EventKind
from slotcar_sidecar.ops.catalogue import CATALOGUE
from transformers import LlamaForCausalLM

from tests.golden import flags
from tests.server import SidecarProcess

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(REPOSITORY).as_posix() for path in (*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"))
)

_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_PATH = re.compile(r"(?:\.ci|clients|deploy|docs|examples|kernels|proto|sidecar|tests)/[\w./-]*")
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
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    named = {word for command in commands(text_of(page)) for word in re.findall(r"^make ([a-z][a-z0-9-]*)", command)}
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


@pytest.mark.parametrize("page", ["docs/operations.md", "docs/metrics.md", "docs/runbook.md"])
def test_metrics_exist(page: str) -> None:
    names = {f"`{one.shown_name}`" for one in CATALOGUE}
    assert set(re.findall(r"`slotcar_[a-z_]+`", text_of(page))) - names == set()


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page: str) -> None:
    spans = {span for span in _SPAN.findall(_FENCE.sub("", text_of(page))) if _PATH.fullmatch(span)}
    assert {span for span in spans if not (REPOSITORY / span).exists()} == set()


@pytest.mark.parametrize("page", ["docs/concepts.md", "docs/engines.md"])
def test_every_reason_has_its_row(page: str) -> None:
    section = text_of(page).partition("\n## Errors\n")[2].partition("\n## ")[0]
    first_cells = "\n".join(re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE))
    assert sorted(re.findall(r"`([A-Z_]+)`", first_cells)) == sorted(Reason)


def test_every_event_is_named() -> None:
    section = text_of("docs/concepts.md").partition("\n## Events\n")[2].partition("\n## ")[0]
    assert {kind for kind in EventKind if f"`{kind}`" not in section} == set()


def test_every_invariant_has_its_row() -> None:
    section = text_of("docs/concepts.md").partition("\n## Invariants\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (I\d+) \|[^|]+\|([^|]+)\|$", section, re.MULTILINE)
    assert [number for number, _ in rows] == [f"I{number}" for number in range(1, 11)]
    assert [number for number, proof in rows if "`tests/" not in proof] == []


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


# Programs

PROGRAM_PAGES = ("docs/engines.md", "docs/getting-started.md", "README.md")


def programs(page: str) -> Iterator[str]:
    """The page's blocks of Python, in their order."""
    return (block for language, block in _FENCE.findall(text_of(page)) if language == "python")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the first block of getting-started made run/model and run/adapters."""
    folder = tmp_path_factory.mktemp("workshop")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(next(programs("docs/getting-started.md")), "docs/getting-started.md", {"__name__": "__main__"})
    return folder


def run(block: str, page: str, namespace: dict[str, Any]) -> None:
    line = text_of(page)[: text_of(page).index(block)].count("\n")
    exec(compile("\n" * line + block, page, "exec"), namespace)


@pytest.mark.parametrize("page", PROGRAM_PAGES)
def test_the_programs_of_a_page_run(page: str, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop)
    adapters = workshop / "run/adapters"
    extra = ("--base-model", str(workshop / "run/model"))
    with SidecarProcess(tmp_path, adapters, slots=3, extra=extra) as sidecar:
        monkeypatch.setenv("SLOTCAR_TARGET", sidecar.target)
        with slotcar_client.connect() as client:
            for name in ("sql", "support"):
                client.load(name, adapters / name)
            client.load("french", adapters / "french", tier="host")
        namespace: dict[str, Any] = {"__name__": "__main__"}
        blocks = [*programs(page)]
        if page == "README.md":
            namespace |= given_by_the_reader(workshop)
            places = {"unix:///run/slotcar/slotcar.sock": sidecar.target, "/srv/adapters": str(adapters)}
            monkeypatch.setattr(slotcar_client, "connect", elsewhere(places, slotcar_client.connect))
            monkeypatch.setattr(slotcar_client.Client, "load", elsewhere(places, slotcar_client.Client.load))
        elif page == "docs/getting-started.md":
            blocks = blocks[1:]
        for block in blocks:
            run(block, page, namespace)


def given_by_the_reader(workshop: Path) -> dict[str, Any]:
    """What the README's blocks take for granted: a model, a batch for it, and rows."""
    prompts = torch.randint(0, 256, (3, 5))
    batch = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts), "max_new_tokens": 2}
    return {
        "model": LlamaForCausalLM.from_pretrained(workshop / "run/model"),
        "batch": batch,
        "x": torch.randn(4, 64),
    }


def elsewhere(places: dict[str, str], call: Any) -> Any:
    """The call with the places of the page exchanged for those of the test."""

    def moved(value: Any) -> Any:
        for place, there in places.items():
            value = value.replace(place, there) if isinstance(value, str) else value
        return value

    return lambda *values, **named: call(*map(moved, values), **{key: moved(value) for key, value in named.items()})
