"""The command line: settings, exit codes, and what is printed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from slotcar_sidecar import cli, console
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

    async def run(config: Config) -> None:
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
        ("--device", "cuda"),
        ("--host-bytes", "4 parsecs"),
        ("--max-message-bytes", "1GiB"),
        ("--root", "/nowhere/at/all"),
        ("--listen", "unix://relative"),
        ("--listen", "unix:///" + "x" * 200),
        ("--listen", "tcp://0.0.0.0:1"),
        ("--listen", "tcp://127.0.0.1:99999"),
        ("--listen", "http://127.0.0.1:1"),
        ("--metrics", "nonsense"),
        ("--base-model", "/a", "--model-spec", "/b"),
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
    for name in ("sql", "[red]x"):
        make_adapter(root / name, model, r=4, target_modules=["q_proj"])
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
    listed = answer(sidecar, "list")
    assert [adapter["name"] for adapter in listed["adapters"]] == ["sql"]
    assert len(listed["layout"]["slots"]) == 2
    assert answer(sidecar, "unload", "sql", "--force")["digest"] == report["digest"]


def test_every_verb_as_a_person_reads_it(sidecar: SidecarProcess) -> None:
    source = str(sidecar.root / "sql")
    for arguments, words in (
        (("estimate", source), ("fits", "rank 4")),
        (("load", "sql", source), ("sql loaded", "2 sites with weights")),
        (("load", "sql", source), ("is resident already",)),
        (("show", "sql"), ("sha256:", "self_attn.q_proj")),
        (("list",), ("NAME", "sql", "1 occupied")),
        (("unload", "sql"), ("its slot is free",)),
    ):
        result = call(sidecar, *arguments)
        assert result.exit_code == 0, result.output
        for word in words:
            assert word in result.output


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
    lonely = {check["what"]: check for check in json.loads(invoke("doctor", "--json", "--target", "unix:///x").stdout)}
    assert lonely["sidecar"]["state"] == "note"


def test_human_bytes() -> None:
    assert [console.human_bytes(n) for n in (0, 1023, 1536, 5 << 20, 1 << 45)] == [
        "0 B", "1023 B", "1.5 KiB", "5.0 MiB", "32.0 TiB",
    ]  # fmt: skip


def test_the_version_is_the_distributions() -> None:
    assert version("slotcar") in invoke("--version").output
