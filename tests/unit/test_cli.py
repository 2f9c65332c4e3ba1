"""The command line: settings, exit codes, and what is printed."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import slotcar_client
from click.testing import CliRunner, Result
from slotcar_sidecar import cli
from slotcar_sidecar.command import tables
from slotcar_sidecar.config import Config, ConfigError, parse_address, parse_size, unknown_variables

from tests.adapters import make_adapter, tiny_llama
from tests.server import SidecarProcess


def invoke(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli.main, arguments, env=environment)


# Settings


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """`slotcar serve` ends after it has its settings, which are here."""
    seen: list[Config] = []
    from slotcar_sidecar import app

    async def run(config: Config, _output: object) -> None:
        seen.append(config)

    monkeypatch.setattr(app, "run", run)
    monkeypatch.setattr(app, "announce", lambda config: None)
    return seen


def test_flags_and_variables_become_settings(served: list[Config], tmp_path: Path) -> None:
    flags = ("--listen", "unix:///a", "--listen", "tcp://127.0.0.1:1", "--host-bytes", "2MiB", "--slots", "3")
    result = invoke("serve", *flags, SLOTCAR_ROOT=str(tmp_path), SLOTCAR_DEVICE_BYTES="1 GiB", SLOTCAR_SLOTS="9")
    assert result.exit_code == 0, result.output
    (config,) = served
    assert config.listen == ("unix:///a", "tcp://127.0.0.1:1")
    assert (config.host_bytes, config.device_bytes, config.slots) == (2 << 20, 1 << 30, 3)
    assert config.root == (tmp_path,)
    assert json.loads(json.dumps(config.to_dict()))["root"] == [str(tmp_path)]


def test_the_defaults_that_the_help_shows_are_accepted(served: list[Config]) -> None:
    assert invoke("serve").exit_code == 0
    assert served == [Config()]


@pytest.mark.parametrize(
    "flags",
    [
        ("--slots", "0"),
        ("--slots", "x"),
        ("--max-rank", "-1"),
        ("--heartbeat-seconds", "nan"),
        ("--dtype", "int8"),
        ("--device", "tpu"),
        ("--host-bytes", "4 parsecs"),
        ("--max-message-bytes", "1GiB"),
        ("--root", "/nowhere/at/all"),
        ("--listen", "unix://relative"),
        ("--listen", "unix:///" + "x" * 200),
        ("--listen", "tcp://0.0.0.0:1"),
        ("--listen", "tcp://127.0.0.1:99999"),
        ("--listen", "http://127.0.0.1:1"),
        ("--metrics", "nonsense"),
        ("--metrics-adapters", "-1"),
        ("--metrics-lora-info", "1st"),
        ("--metrics-lora-info", "slotcar_slots"),
        ("--what-is-this", "1"),
    ],
)
def test_a_setting_that_cannot_be_used_is_wrong_usage(served: list[Config], flags: tuple[str, ...]) -> None:
    result = invoke("serve", *flags)
    assert result.exit_code == 2, result.output
    assert flags[0] in result.output or "listen" in result.output
    assert served == []


def test_tcp_beyond_loopback_needs_insecure(served: list[Config]) -> None:
    assert invoke("serve", "--listen", "tcp://0.0.0.0:1", "--insecure").exit_code == 0
    assert invoke("serve", "--listen", "tcp://[::1]:1").exit_code == 0


def test_metrics_may_name_no_adapter_and_have_the_name_that_routers_look_for(served: list[Config]) -> None:
    assert invoke("serve", "--metrics-adapters", "0", "--metrics-lora-info", "vllm:lora_requests_info").exit_code == 0
    assert (served[0].metrics_adapters, served[0].metrics_lora_info) == (0, "vllm:lora_requests_info")


def test_a_variable_that_means_nothing_is_said_but_not_one_of_kubernetes() -> None:
    names = ["SLOTCAR_SLOT", "SLOTCAR_SLOTS", "SLOTCAR_TARGET", "SLOTCAR_SERVICE_HOST", "SLOTCAR_PORT_1_TCP", "HOME"]
    assert unknown_variables(names) == ["SLOTCAR_SLOT"]


def test_sizes_and_addresses() -> None:
    assert [parse_size("x", text) for text in ("7", "2KiB", "3 mib", 5)] == [7, 2048, 3 << 20, 5]
    assert str(parse_address("listen", "tcp://[::1]:50051")) == "tcp://[::1]:50051"
    with pytest.raises(ConfigError, match="--host-bytes"):
        parse_size("host_bytes", "1.5GiB")


# Verbs


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    root = tmp_path_factory.mktemp("root")
    model = tiny_llama()
    model.save_pretrained(root / "model")
    for seed, name in enumerate(("sql", "[red]x")):
        make_adapter(root / name, model, seed=seed, r=4, target_modules=["q_proj"])
    folder = tmp_path_factory.mktemp("s")
    with SidecarProcess(folder, root, extra=("--base-model", str(root / "model"))) as sidecar:
        yield sidecar


def call(sidecar: SidecarProcess, *arguments: str) -> Result:
    return invoke(*arguments, SLOTCAR_TARGET=sidecar.target)


def answer(sidecar: SidecarProcess, *arguments: str) -> Any:
    result = call(sidecar, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_every_verb_as_a_script_uses_it(sidecar: SidecarProcess) -> None:
    source = str(sidecar.root / "sql")
    assert answer(sidecar, "estimate", source)["fits"]
    report = answer(sidecar, "load", "sql", source, "--keep")
    assert report["sites_matched"] == [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]
    assert answer(sidecar, "load", "sql", f"file://{source}", "--digest", report["digest"])["already_resident"]
    assert answer(sidecar, "show", "sql")["keep"]
    assert not answer(sidecar, "release", "sql")["keep"]
    assert answer(sidecar, "keep", "sql")["keep"]
    (near,) = answer(sidecar, "prefetch", "sql", "--tier", "host")
    assert (near["adapter"]["tier"], near["why_not"]) == ("device", "")
    listed = answer(sidecar, "list")
    assert [adapter["name"] for adapter in listed["adapters"]] == ["sql"]
    assert len(listed["layout"]["slots"]) == 2
    assert answer(sidecar, "unload", "sql", "--force")["digest"] == report["digest"]


def test_every_verb_as_a_person_reads_it(sidecar: SidecarProcess) -> None:
    source = str(sidecar.root / "sql")
    for arguments, words in (
        (("estimate", source), ("fits", "rank 4")),
        (("load", "sql", source), ("sql loaded", "2 sites with weights")),
        (("load", "sql", source), ("is there already",)),
        (("show", "sql"), ("sha256:", "self_attn.q_proj")),
        (("prefetch", "sql"), ("sql", "device")),
        (("list",), ("NAME", "sql", "1 occupied")),
        (("unload", "sql"), ("its slot is free",)),
    ):
        result = call(sidecar, *arguments)
        assert result.exit_code == 0, result.output
        for word in words:
            assert word in result.output


def test_what_a_prefetch_cannot_bring_nearer_is_1_with_all_that_it_did(sidecar: SidecarProcess) -> None:
    assert answer(sidecar, "load", "sql", str(sidecar.root / "sql"), "--tier", "host")["adapter"]["tier"] == "host"
    result = call(sidecar, "prefetch", "nobody", "sql")
    assert result.exit_code == 1
    assert "ADAPTER_NOT_FOUND" in result.output
    assert answer(sidecar, "show", "sql")["tier"] == "device"
    refused = call(sidecar, "prefetch", "sql", "--tier", "disk")
    assert refused.exit_code == 1
    assert "REQUEST_INVALID" in refused.stderr
    assert call(sidecar, "unload", "sql").exit_code == 0


def test_a_refusal_is_1_with_its_reason_and_facts(sidecar: SidecarProcess) -> None:
    result = call(sidecar, "show", "nobody")
    assert result.exit_code == 1
    assert "ADAPTER_NOT_FOUND" in result.stderr
    assert "adapters: nobody" in result.stderr
    refused = call(sidecar, "load", "x", "/etc", "--json")
    assert refused.exit_code == 1
    assert json.loads(refused.stdout)["error"]["reason"] == "SOURCE_DENIED"


def test_brackets_and_colons_are_printed_as_they_are(sidecar: SidecarProcess) -> None:
    result = call(sidecar, "estimate", "/nope/[/b]:smile:")
    assert result.exit_code == 1
    assert "/nope/[/b]:smile:" in result.stderr
    loaded = answer(sidecar, "load", "brackets", str(sidecar.root / "[red]x"))
    assert loaded["adapter"]["source"].endswith("[red]x")
    assert call(sidecar, "unload", "brackets").exit_code == 0


@pytest.mark.parametrize(
    "arguments", [("show",), ("load",), ("frobnicate",), ("list", "--target", "http://x"), ("list", "--nonsense")]
)
def test_wrong_usage_is_2(arguments: tuple[str, ...]) -> None:
    assert invoke(*arguments).exit_code == 2


def test_a_server_that_is_away_is_1(tmp_path: Path) -> None:
    result = invoke("list", "--target", f"unix://{tmp_path}/nobody.sock")
    assert result.exit_code == 1
    assert "UNAVAILABLE" in result.stderr


def test_spec_prints_what_serve_reads(sidecar: SidecarProcess, served: list[Config], tmp_path: Path) -> None:
    result = invoke("spec", "--from", str(sidecar.root / "model"))
    assert result.exit_code == 0
    assert len(json.loads(result.stdout)["sites"]) == 15
    assert invoke("spec", "--from", str(tmp_path)).exit_code == 1
    assert invoke("spec", "--from", "/nowhere").exit_code == 2


def test_doctor_says_what_is_there(sidecar: SidecarProcess) -> None:
    checks = {check["what"]: check for check in answer(sidecar, "doctor")}
    assert checks["torch"]["state"] == "ok"
    assert "2 slots" in checks["sidecar"]["found"]
    assert (checks["ring plane"]["state"], checks["direct plane"]["state"]) == ("ok", "ok")
    lonely = {check["what"]: check for check in json.loads(invoke("doctor", "--json", "--target", "unix:///x").stdout)}
    assert lonely["sidecar"]["state"] == "note"


# Sessions, capacity, uploads


@pytest.fixture
def engine(sidecar: SidecarProcess) -> Iterator[slotcar_client.Session]:
    """A session with a name that looks like markup, one mapping, a hold of a slot and one of bytes."""
    with slotcar_client.connect(sidecar.target) as client:
        client.load("sql", sidecar.root / "sql")
        client.load("red", sidecar.root / "[red]x", tier="host")
        with client.session("my [red]engine", reserved_slots=1) as session:
            session.set_mapping(["sql", slotcar_client.BASE])
            session.hold("sql", hold_id=9, seconds=90, slot=True)
            session.hold("red", hold_id=10)
            yield session
        client.unload("sql")
        client.unload("red")


def test_sessions_say_who_pins_which_slot(sidecar: SidecarProcess, engine: slotcar_client.Session) -> None:
    short, slot = engine.session_id[:8], answer(sidecar, "show", "sql")["slot"]
    (session,) = answer(sidecar, "sessions")
    assert (session["session"], session["client_name"], session["reserved_slots"]) == (short, "my [red]engine", 1)
    assert [(m["mapping_id"], m["slots"], m["pinned"], m["current"]) for m in session["mappings"]] == [
        (1, [slot], True, True)
    ]
    assert [(hold["hold_id"], hold["tier"]) for hold in session["holds"]] == [(9, "device"), (10, "host")]
    shown = call(sidecar, "sessions").output
    assert f"my [red]engine {short}: hold 9, mapping 1" in shown
    assert "1 min " in shown
    assert "until released" in shown
    assert f"my [red]engine {short}: hold 9, mapping 1" in call(sidecar, "list").output
    pins = answer(sidecar, "list")["pins"]
    assert [(pin["slot"], pin["session"], pin["owner"], pin["owner_id"]) for pin in pins] == [
        (slot, short, "hold", 9),
        (slot, short, "mapping", 1),
    ]


def test_list_shows_slots_that_drain(sidecar: SidecarProcess, engine: slotcar_client.Session) -> None:
    assert "drains" in call(sidecar, "unload", "sql").output
    (row,) = [line for line in call(sidecar, "list").output.splitlines() if "(draining)" in line]
    assert row.rstrip().endswith(f"my [red]engine {engine.session_id[:8]}: hold 9, mapping 1")
    assert call(sidecar, "load", "sql", str(sidecar.root / "sql")).exit_code == 0


def test_end_ends_a_session_once(sidecar: SidecarProcess, engine: slotcar_client.Session) -> None:
    short = engine.session_id[:8]
    assert call(sidecar, "end", short).exit_code == 0
    again = call(sidecar, "end", short)
    assert again.exit_code == 1
    assert short in again.stderr
    assert json.loads(call(sidecar, "end", short, "--json").stdout)["error"]["reason"] == "SESSION_NOT_FOUND"
    assert answer(sidecar, "sessions") == []
    assert "no session" in call(sidecar, "sessions").output


def test_capacity(sidecar: SidecarProcess, engine: slotcar_client.Session) -> None:
    capacity = answer(sidecar, "capacity")
    assert (capacity["slots"], capacity["slots_pinned"], capacity["slots_reserved"]) == (2, 1, 1)
    shown = call(sidecar, "capacity").output
    assert "1 pinned, 1 reserved, 1 available" in shown
    assert "of it held" in shown


def test_a_load_stops_in_memory_or_sends_a_folder(sidecar: SidecarProcess, tmp_path: Path) -> None:
    assert answer(sidecar, "load", "sql", str(sidecar.root / "sql"), "--tier", "host")["adapter"]["tier"] == "host"
    assert "tier host" in call(sidecar, "load", "sql", "--tier", "host").output
    elsewhere = shutil.copytree(sidecar.root / "sql", tmp_path / "elsewhere")
    assert call(sidecar, "load", "sent", str(elsewhere)).exit_code == 1
    sent = answer(sidecar, "load", "sent", str(elsewhere), "--upload")
    assert sent["digest"] == answer(sidecar, "show", "sql")["digest"]
    assert call(sidecar, "load", "sent", "--upload").exit_code == 2
    assert call(sidecar, "load", "sent", str(tmp_path), "--upload").exit_code == 1
    assert call(sidecar, "load", "sql", "--tier", "tape").exit_code == 2
    for name in ("sql", "sent"):
        assert call(sidecar, "unload", name).exit_code == 0


# Events and watch, as processes: they end by signals, and by what happens to a pipe or a server


def start(sidecar: SidecarProcess, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "slotcar_sidecar", *arguments]
    environment = os.environ | {"SLOTCAR_TARGET": sidecar.target}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    """The exit code and what was printed, when it ends."""
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def test_past_events_are_printed_and_selected(sidecar: SidecarProcess) -> None:
    assert call(sidecar, "load", "sql", str(sidecar.root / "sql")).exit_code == 0
    assert call(sidecar, "load", "nothing", "/etc").exit_code == 1
    assert call(sidecar, "unload", "sql").exit_code == 0
    lines = call(sidecar, "events", "--json").stdout.splitlines()
    assert [json.loads(line)["kind"] for line in lines][-4:] == ["loaded", "refused", "unloaded", "freed"]
    (line,) = call(sidecar, "events", "--replay", "3", "--kind", "refused").stdout.splitlines()
    assert "SOURCE_DENIED" in line
    assert call(sidecar, "events", "--replay", "0").stdout == ""
    assert call(sidecar, "events", "--kind", "nonsense").exit_code == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_following_events_ends_with_a_signal(sidecar: SidecarProcess, number: signal.Signals) -> None:
    process = start(sidecar, "events", "-f", "--json", "--replay", "0", "--kind", "loaded", "--kind", "refused")
    assert process.stdout is not None
    while True:  # until it listens
        call(sidecar, "load", "nothing", "/etc")
        if is_readable(process.stdout.fileno()):
            break
    assert json.loads(process.stdout.readline())["kind"] == "refused"
    process.send_signal(number)
    code, _, err = ended(process)
    assert (code, err) == (0, b"")


def is_readable(descriptor: int) -> bool:
    waiting = select.poll()  # `select.select` takes no descriptor above 1023
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(200))


def test_a_reader_that_has_seen_enough_ends_the_stream(sidecar: SidecarProcess) -> None:
    call(sidecar, "load", "nothing", "/etc")
    for arguments in (("events", "-f"), ("events", "--json"), ("watch",), ("watch", "--json"), ("list",)):
        process = start(sidecar, *arguments)
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 0, arguments
        assert process.stderr is not None
        assert process.stderr.read() == b"", arguments
        process.stderr.close()


def test_events_and_watch_when_the_server_goes_and_comes(tmp_path: Path, sidecar: SidecarProcess) -> None:
    with SidecarProcess(tmp_path, sidecar.root) as server:
        events, watch = start(server, "events", "--follow"), start(server, "watch", "--json", "--interval", "0.2")
        plain = start(server, "watch", "--interval", "0.2")
        assert watch.stdout is not None
        assert plain.stdout is not None
        before = json.loads(watch.stdout.readline())
        assert (before["state"], before["capacity"]["slots"]) == ("up", 2)
        assert plain.stdout.readline().startswith(f"epoch {before['layout']['version']['epoch']} ".encode())
        server.kill()
        code, out, err = ended(events)
        assert (code, out) == (1, b"")
        assert b"UNAVAILABLE" in err
        assert json.loads(watch.stdout.readline())["state"] == "away"
        assert any(line.startswith(b"away: ") for line in plain.stdout)
        server.start()
        after = json.loads(watch.stdout.readline())
        assert after["state"] == "up"
        assert after["layout"]["version"]["epoch"] != before["layout"]["version"]["epoch"]
        assert any(line.startswith(f"epoch {after['layout']['version']['epoch']} ".encode()) for line in plain.stdout)
        call(server, "load", "nothing", "/etc")
        (refused,) = json.loads(watch.stdout.readline())["events"]
        assert (refused["kind"], refused["name"]) == ("refused", "nothing")
        for process in (watch, plain):
            process.send_signal(signal.SIGINT)
            code, _, err = ended(process)
            assert (code, err) == (0, b"")


def on_terminal(sidecar: SidecarProcess, columns: int, *arguments: str, key: bytes = b"") -> tuple[int, str]:
    """Runs the command on a terminal so wide; one that goes on gets a key when it has shown something."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    command = [sys.executable, "-c", _WITH_TERMINAL, *arguments]
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"SLOTCAR_TARGET": sidecar.target, "TERM": "xterm"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
            if key and b"SLOT" in shown and not is_readable(ours):
                os.write(ours, key)
                key = b""
    except OSError:  # what a terminal says when its other end is closed
        pass
    os.close(ours)
    return process.wait(30), shown.decode()


_WITH_TERMINAL = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from slotcar_sidecar.cli import main
main()
"""


@pytest.mark.parametrize(("columns", "key"), [(40, b"\x03"), (200, b"\x03"), (200, b"q")])
def test_top_on_a_terminal_until_a_key(
    sidecar: SidecarProcess, engine: slotcar_client.Session, columns: int, key: bytes
) -> None:
    code, shown = on_terminal(sidecar, columns, "top", key=key)
    assert code == 0
    assert "Traceback" not in shown
    assert sidecar.target[: columns - 1] in shown
    assert "my [red]engine" in shown
    assert "slots     [##########          ]  50%" in shown
    assert ("hold 9, mapping 1" in shown) == (columns == 200)
    assert shown.rindex("\x1b[?1049l") > shown.rindex("\x1b[?1049h")  # the terminal is as it was


def test_top_without_a_terminal_shows_it_once(sidecar: SidecarProcess, engine: slotcar_client.Session) -> None:
    result = call(sidecar, "top")
    assert result.exit_code == 0
    for text in (f"{sidecar.target}  up", "IN NO SLOT", f"my [red]engine {engine.session_id[:8]}: hold 9, mapping 1"):
        assert text in result.output
    assert "session_opened" in result.output
    view = answer(sidecar, "top")
    assert (view["state"], len(view["layout"]["slots"]), view["undone"]) == ("up", 2, [])
    assert view["events"][-1]["kind"] == "held"
    assert invoke("top", "--target", "unix:///nobody").exit_code == 1


def test_lists_on_a_narrow_terminal_lose_nothing(sidecar: SidecarProcess, engine: slotcar_client.Session) -> None:
    for verb in ("list", "sessions"):
        code, shown = on_terminal(sidecar, 40, verb)
        assert code == 0
        assert "…" not in shown
        assert f"pinned by my [red]engine {engine.session_id[:8]}: hold 9, mapping 1" in shown


# Completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_one_of_the_shell(shell: str) -> None:
    result = invoke("completion", shell)
    assert result.exit_code == 0
    assert "_SLOTCAR_COMPLETE" in result.stdout
    path = shutil.which(shell)
    if path is not None:
        option = "--no-execute" if shell == "fish" else "-n"
        subprocess.run([path, option], input=result.stdout, text=True, check=True, timeout=30)
    assert shell != "bash" or path is not None, "the suite needs bash"


def completed(words: str, target: str, *more: str) -> list[str]:
    """What the shell would offer for the last word."""
    variables = {"_SLOTCAR_COMPLETE": "bash_complete", "COMP_WORDS": words, "SLOTCAR_TARGET": target}
    count = len(words.split(" ")) - 1
    command = [sys.executable, "-c", "from slotcar_sidecar.cli import main; main(prog_name='slotcar')", *more]
    environment = os.environ | variables | {"COMP_CWORD": str(count)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_names_and_sessions_are_completed(sidecar: SidecarProcess, engine: slotcar_client.Session) -> None:
    assert completed("slotcar unload s", sidecar.target) == ["sql"]
    assert completed("slotcar show ", sidecar.target) == ["red", "sql"]
    assert completed("slotcar end ", sidecar.target) == [engine.session_id[:8]]
    assert completed(f"slotcar show --target {sidecar.target} s", "unix:///nobody") == ["sql"]
    assert {"watch", "release"} & set(completed("slotcar w", sidecar.target)) == {"watch"}


def test_completion_is_silent_without_a_server() -> None:
    assert completed("slotcar show s", "unix:///nobody") == []
    assert completed("slotcar show s", "nonsense") == []


def test_human_seconds() -> None:
    assert [tables.human_seconds(n) for n in (0.4, 59, 60, 90, 3600, 7320)] == [
        "0 s", "59 s", "1 min 0 s", "1 min 30 s", "1 h 0 min", "2 h 2 min",
    ]  # fmt: skip


def test_human_bytes() -> None:
    assert [tables.human_bytes(n) for n in (0, 1023, 1536, 5 << 20, 1 << 45)] == [
        "0 B", "1023 B", "1.5 KiB", "5.0 MiB", "32.0 TiB",
    ]  # fmt: skip


def test_the_version_is_the_distributions() -> None:
    assert version("slotcar") in invoke("--version").output
