"""The direct plane computes in the engine's process, and leaves torch there as the engine has set it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from slotcar_kernels import native

from tests.adapters import MINIMAL_CONFIG, raw_tensors, write_raw_adapter
from tests.server import SidecarProcess

REPOSITORY = Path(__file__).resolve().parents[3]
SITE = "model.layers.0.self_attn.q_proj"

ENGINE = f"""
import sys, threading
import torch
torch.set_num_threads(3)
import slotcar_client
from slotcar.v1 import model_pb2

def settings():
    found = [torch.get_num_threads()]
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found

before = settings()
spec = model_pb2.ModelSpec(sites=[model_pb2.Site(name="{SITE}", in_features=64, out_features=64)])
with slotcar_client.connect(sys.argv[1]) as client:
    with client.session("engine", model_spec=spec, transport="direct") as session:
        client.load("sql", sys.argv[2])
        session.set_mapping([("sql", 4)])
        for _ in range(10):
            session.forward({{"{SITE}": torch.ones(4, 64)}})
        print(session.transport, before == settings())
"""


@pytest.mark.skipif(not native.available(), reason="torch computes")
def test_direct_changes_no_setting_of_torch(tmp_path: Path) -> None:
    write_raw_adapter(tmp_path / "sql", MINIMAL_CONFIG, raw_tensors(SITE))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))}
    with SidecarProcess(tmp_path, tmp_path, extra=("--planes", "stream,ring,direct")) as sidecar:
        done = subprocess.run(
            [sys.executable, "-c", ENGINE, sidecar.target, str(tmp_path / "sql")],
            cwd=REPOSITORY,
            env=environment | {"OMP_NUM_THREADS": "2"},
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert (done.stdout, done.stderr) == ("direct True\n", "")
