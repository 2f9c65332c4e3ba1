"""What flags and variables become, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slotcar_sidecar.config import Config, ConfigError, parse_address, parse_size, unknown_variables

from tests.unit.command.called import invoke


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
        ("--compute-threads", "1025"),
        ("--load-threads", "1000000"),
        ("--heartbeat-seconds", "nan"),
        ("--dtype", "int8"),
        ("--device", "tpu"),
        ("--host-bytes", "4 parsecs"),
        ("--max-message-bytes", "1GiB"),
        ("--root", "/nowhere/at/all"),
        ("--root", ""),
        ("--disk", ""),
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
