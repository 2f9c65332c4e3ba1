"""A client in a process of its own, which stops itself while its kernels are under way.

python -m tests.planes.gpu.child TARGET REF SITE FEATURES
"""

from __future__ import annotations

import os
import signal
import sys

import slotcar_client
import torch

from tests.faults.child import say
from tests.planes.gpu.host import HOST, install


def main() -> None:
    target, ref, site, features = sys.argv[1:]
    with (
        slotcar_client.connect(target, timeout_seconds=60) as client,
        client.session("child", grace_seconds=30, transport="direct") as session,
    ):
        session.set_mapping([ref], load=True)
        say({"session": session.session_id})
        sys.stdin.readline()
        HOST.pause(lambda: os.kill(os.getpid(), signal.SIGSTOP))
        session.forward({site: torch.ones(2, int(features))}, (2,))


if __name__ == "__main__":
    install()
    main()
