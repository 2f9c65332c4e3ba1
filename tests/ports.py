"""Ports that nobody listens at."""

from __future__ import annotations

import socket


def free_port(host: str = "127.0.0.1", family: socket.AddressFamily = socket.AF_INET) -> int:
    """One that is free now; another process may take it before it is used."""
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
