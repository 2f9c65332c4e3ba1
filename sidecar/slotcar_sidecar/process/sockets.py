"""The sockets that the process listens on: no two servers ever have one path or port, and paths go with the server."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import logging
import os
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from grpc import ServerCredentials, aio
from slotcar.shm.handshake import SUFFIX

from slotcar_sidecar.config import Address, Config, TcpAddress, UnixAddress

_log = logging.getLogger("slotcar")

_BACKLOG = 128
_MAX_GROUP = 2**32 - 2  # the one above it means "as it is"


class StartError(Exception):
    """Why the server cannot start."""


@dataclass(frozen=True, slots=True)
class Doors:
    """Who may connect to a unix socket, by its mode and its group; None is the group of the process."""

    mode: int = 0o660
    group: int | None = None

    @classmethod
    def of(cls, config: Config) -> Doors:
        """Raises StartError for a group that this machine does not know."""
        group = config.socket_group
        try:
            number = None if group is None else int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
        except KeyError:
            raise StartError(f"--socket-group is {group}: this machine has no such group") from None
        if number is not None and number > _MAX_GROUP:
            raise StartError(f"--socket-group is {group}: wanted at most {_MAX_GROUP}")
        return cls(int(config.socket_mode, 8), number)

    @contextlib.contextmanager
    def around(self, path: Path) -> Iterator[None]:
        """A socket that is bound at `path` inside is nobody else's before it has its group."""
        umask = os.umask(0o177)
        try:
            yield
        finally:
            os.umask(umask)
        if self.group is not None:
            os.chown(path, -1, self.group)
        path.chmod(self.mode)


DEFAULT_DOORS = Doors()


def bind(
    server: aio.Server,
    address: Address,
    doors: Doors = DEFAULT_DOORS,
    credentials: Callable[[], ServerCredentials] | None = None,
) -> Address:
    """Binds, and returns the address with the port that was given. `credentials` makes those of a TCP port."""
    try:
        if isinstance(address, TcpAddress):
            port = address.port
            for host in _resolved(address.host):
                authority = TcpAddress(host, port).authority
                if credentials is None:
                    port = server.add_insecure_port(authority)
                else:
                    port = server.add_secure_port(authority, credentials())
            return TcpAddress(address.host, port)
        with doors.around(address.path):
            server.add_insecure_port(f"unix:{quote(str(address.path))}")
        return address
    except (RuntimeError, OSError) as error:
        raise StartError(f"cannot listen at {address}: {error}") from error


def handshake_path(address: UnixAddress) -> Path:
    """Where clients of a gRPC socket ask for shared memory."""
    return Path(f"{address.path}{SUFFIX}")


def listen_for_handshakes(path: Path, doors: Doors = DEFAULT_DOORS) -> socket.socket:
    """A listening socket. Raises StartError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with doors.around(path):
            listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(f"cannot listen at {path}: {error.strerror}") from error
    return listener


def _resolved(host: str) -> list[str]:
    """The addresses of a name that this machine has.

    gRPC would be content with any one of them, though another server has the rest.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses = dict.fromkeys((family, str(address[0])) for family, *_, address in found)
    usable = [address for family, address in addresses if _is_here(family, address)]
    if not usable:
        raise StartError(f"this machine has no address of {host}")
    return usable


def _is_here(family: int, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def claimed(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> Iterator[None]:
    """Owns a socket's path while the context is open; gRPC itself would take a live server's path in silence.

    The lock file beside the socket stays, so that two servers can never lock two files of one name.
    """
    if not path.parent.is_dir():
        raise StartError(f"cannot listen at {path}: the folder {path.parent} does not exist")
    try:
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StartError(f"cannot lock {path}.lock: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(f"another slotcar serves {path}") from None
        _remove_dead_socket(path, kind)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def _remove_dead_socket(path: Path, kind: socket.SocketKind) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartError(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            _log.info("took over the socket of a dead server", extra={"fields": {"path": path}})
            return
        except OSError as error:
            raise StartError(f"cannot tell whether {path} is alive: {error.strerror}") from error
    raise StartError(f"another server listens at {path}")
