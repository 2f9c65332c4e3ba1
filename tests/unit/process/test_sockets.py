"""Unix sockets are nobody's but their group's, from their first moment on."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
from slotcar_sidecar.config import Config, ConfigError
from slotcar_sidecar.process.sockets import Doors, StartError, listen_for_handshakes


def state_of(path: Path) -> tuple[int, int]:
    """Mode and group."""
    state = path.stat()
    return stat.S_IMODE(state.st_mode), state.st_gid


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_a_socket_has_the_mode_that_was_asked_for(tmp_path: Path, mode: int) -> None:
    with listen_for_handshakes(tmp_path / "s.sock", Doors(mode)):
        assert state_of(tmp_path / "s.sock") == (mode, os.getegid())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a socket to any group")
def test_a_socket_has_its_group_before_the_group_may(tmp_path: Path) -> None:
    """To see it fail: bind under the mode itself."""
    path, seen = tmp_path / "s.sock", []
    with Doors(0o660, 1234).around(path), socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        seen.append(state_of(path))
    assert seen == [(0o600, os.getegid())]
    assert state_of(path) == (0o660, 1234)


def test_a_group_by_name_or_number(tmp_path: Path) -> None:
    assert Doors.of(Config(socket_mode="0600")) == Doors(0o600, None)
    assert Doors.of(Config(socket_group="7")).group == 7
    with pytest.raises(StartError, match="no such group"):
        Doors.of(Config(socket_group="nobody-has-this"))
    with pytest.raises(StartError, match="--socket-group is 4294967295: wanted at most 4294967294"):
        Doors.of(Config(socket_group="4294967295"))


@pytest.mark.parametrize("mode", ["660x", "0777", "rw", "0060", ""])
def test_a_mode_that_is_none_is_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match="--socket-mode"):
        Config(socket_mode=mode)


def test_certificates_go_together() -> None:
    with pytest.raises(ConfigError, match="--tls-key is not set"):
        Config(tls_cert=Path("a"), tls_client_ca=Path("b"))


def test_tcp_beyond_this_machine_wants_certificates() -> None:
    address = ("tcp://192.0.2.1:1",)
    with pytest.raises(ConfigError, match="--tls-cert"):
        Config(listen=address)
    Config(listen=address, tls_cert=Path("a"), tls_key=Path("b"), tls_client_ca=Path("c"))
