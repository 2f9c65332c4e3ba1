"""What a client shows of itself: a certificate and a token from files, or the token that the sidecar gave it.

Invariant: a token goes to a unix socket, to this machine, or over TLS, and nowhere else.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError
from slotcar.shm.handshake import MESSAGE_BYTES, SUFFIX
from slotcar.v1 import plane_pb2

from slotcar_client.config import grpc_target, unix_path
from slotcar_client.errors import RequestInvalid, from_message

Channel = TypeVar("Channel")
Metadata = tuple[tuple[str, str], ...]

# What a proxy before several sidecars chooses one of them by: deploy/kustomize/overlays/pool hashes it.
AFFINITY_KEY = "slotcar-affinity"
_MAX_AFFINITY = 256

_ASK_SECONDS = 5.0
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Credentials:
    """Names of PEM files, and of a file with a token; each is read again when it has changed.

    tls_ca: the authorities that the server's certificate is checked by; a TCP target is called over TLS with it.
    tls_cert, tls_key: what this client shows then. token_file: what it sends with each call.
    """

    tls_ca: str | os.PathLike[str] | None = None
    tls_cert: str | os.PathLike[str] | None = None
    tls_key: str | os.PathLike[str] | None = None
    token_file: str | os.PathLike[str] | None = None


class Address:
    """Where a sidecar is, how to connect to it, and what calls carry. For any thread."""

    def __init__(self, target: str, credentials: Credentials = Credentials(), affinity: str = "") -> None:
        """Raises RequestInvalid for what is no target, a token that it may not get, or what metadata cannot carry."""
        if not (affinity.isascii() and affinity.isprintable()) or len(affinity) > _MAX_AFFINITY:
            raise _invalid("affinity", repr(affinity[:100]), f"at most {_MAX_AFFINITY} printable characters of ASCII")
        self._affinity: Metadata = ((AFFINITY_KEY, affinity),) if affinity else ()
        self.target = target
        self._grpc_target = grpc_target(target)
        path = unix_path(target)
        files = credentials
        is_tls = files.tls_ca is not None and path is None
        if is_tls and (files.tls_cert is None) != (files.tls_key is None):
            raise _invalid("tls_cert", "half of a pair", "tls_cert and tls_key, or neither")
        if files.token_file is not None and not (is_tls or path or _is_loopback(target)):
            raise _invalid("token_file", target, "tls_ca with it, a unix socket, or this machine")
        pem = (files.tls_ca, files.tls_cert, files.tls_key) if is_tls else ()
        self._pem = tuple(Path(name) if name is not None else None for name in pem)
        self._token_file = _TokenFile(Path(files.token_file)) if files.token_file is not None else None
        self._socket_token = _SocketToken(f"{path}{SUFFIX}") if path and files.token_file is None else None
        self._seen: object = None
        self._looked = 0.0

    def channel(
        self, insecure: Callable[[str], Channel], secure: Callable[[str, grpc.ChannelCredentials], Channel]
    ) -> Channel:
        """Made by one of the two. Raises RequestInvalid when a file cannot be read."""
        if not self._pem:
            return insecure(self._grpc_target)
        found = self._identity()
        authorities, certificate, key = (None if path is None else _read(path) for path in self._pem)
        self._seen, self._looked = found, time.monotonic()
        return secure(self._grpc_target, grpc.ssl_channel_credentials(authorities, key, certificate))

    def has_new_files(self) -> bool:
        """Whether a certificate, or its like, has changed since `channel`; looked at once a second at most."""
        if not self._pem or time.monotonic() - self._looked < _LOOK_SECONDS:
            return False
        self._looked = time.monotonic()
        return self._identity() != self._seen

    def _identity(self) -> object:
        """Changes when one of the files does."""
        with contextlib.suppress(OSError):
            states = [path.stat() for path in self._pem if path is not None]
            return tuple((state.st_ino, state.st_mtime_ns, state.st_size) for state in states)
        return self._seen  # one of them is about to be replaced

    def metadata(self) -> Metadata | None:
        """What a call carries; None where nothing is known to be wanted. Raises RequestInvalid."""
        token = self._token_file or self._socket_token
        text = token.text() if token is not None else ""
        shown = (("authorization", f"Bearer {text}"),) if text else ()
        return (*shown, *self._affinity) or None

    @property
    def given_token(self) -> str:
        """The token that the sidecar gave, empty for none; it may have ended."""
        return self._socket_token.last if self._socket_token is not None else ""

    def identify(self, refused: str = "") -> bool:
        """After a call was refused as UNAUTHENTICATED: asks for a token, unless there is one since `refused`.

        False when there is none to be had. Raises what the sidecar answers instead.
        """
        return self._socket_token is not None and self._socket_token.ask(refused)

    def close(self) -> None:
        """The token is of no more use. Idempotent."""
        if self._socket_token is not None:
            self._socket_token.drop()


class _TokenFile:
    """A token that is read again when its file changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._text = ""

    def text(self) -> str:
        """Raises RequestInvalid when the file cannot be read."""
        try:
            state = self._path.stat()
        except OSError as error:
            raise _invalid("token_file", f"{self._path}: {error.strerror}", "a file with a token") from error
        if (state.st_ino, state.st_mtime_ns) != self._seen:
            text = _read(self._path).decode(errors="replace").strip()
            if not text.isascii() or not text.isprintable():
                raise _invalid("token_file", f"{self._path} with more than ASCII", "a token")
            self._text, self._seen = text, (state.st_ino, state.st_mtime_ns)
        return self._text


class _SocketToken:
    """The token of a sidecar at a unix socket: as good as the connection that it came over."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._link: socket.socket | None = None
        self._events = select.poll()
        self._text = ""

    def text(self) -> str:
        """Empty when none was asked for, or the connection is gone."""
        if self._text:
            with self._lock:
                if self._link is not None and self._events.poll(0):
                    self._drop()
        return self._text

    @property
    def last(self) -> str:
        return self._text

    def ask(self, refused: str) -> bool:
        """Connects anew; False when the sidecar gives no token. Raises SlotcarError.

        A token that another thread got meanwhile stays: with its connection would end what runs by it.
        """
        with self._lock:
            if self._text not in ("", refused) and not self._events.poll(0):
                return True
            self._drop()
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self._text = _asked(link, self._path)
            except OSError:
                self._text = ""
            finally:
                if not self._text:
                    link.close()
            if self._text:
                self._link = link
                self._events = select.poll()
                self._events.register(link, select.POLLIN)
            return bool(self._text)

    def drop(self) -> None:
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        self._text = ""
        if self._link is not None:
            self._link.close()
            self._link = None


def _asked(link: socket.socket, path: str) -> str:
    """The token that the sidecar at `path` gives, empty for none. Raises OSError, or the sidecar's refusal."""
    link.settimeout(_ASK_SECONDS)
    link.connect(path)
    link.send(plane_pb2.PlaneHello(wants_token=True).SerializeToString())
    try:
        welcome = plane_pb2.PlaneWelcome.FromString(link.recv(MESSAGE_BYTES))
    except DecodeError:
        return ""
    if welcome.WhichOneof("result") == "error":
        raise from_message(welcome.error)
    return welcome.token.token


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _invalid("credentials", f"{path}: {error.strerror}", "a file that can be read") from error


def _is_loopback(target: str) -> bool:
    host = target.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _invalid(field: str, found: str, wanted: str) -> RequestInvalid:
    return RequestInvalid(f"{field} is {found}, wanted {wanted}", field=field, found=found, wanted=wanted)
