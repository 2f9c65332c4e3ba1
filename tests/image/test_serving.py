"""A container serves engines outside it on every plane, by the mounted socket alone, and does what signals ask for."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import slotcar_client
from slotcar_client import SlotcarError

from tests.faults.oracle import Library
from tests.image.conftest import Make
from tests.image.engine import Load, forward_is_right, load
from tests.waiting import eventually

pytestmark = [pytest.mark.image, pytest.mark.timeout(600)]

PLANES = ("stream", "ring", "direct")

PROCESS = """
import json, pathlib
lines = dict(line.split(":", 1) for line in pathlib.Path("/proc/1/status").read_text().splitlines())
print(json.dumps({name: value.strip() for name, value in lines.items()}))
"""
COMMAND = r"""
import json, pathlib
print(json.dumps(pathlib.Path("/proc/1/cmdline").read_text().split("\0")))
"""
ZOMBIES = r"""
import json, pathlib
stats = [path.read_text().rpartition(")") for path in pathlib.Path("/proc").glob("[0-9]*/stat")]
print(json.dumps([before for before, _, after in stats if after.split()[0] == "Z"]))
"""


@pytest.mark.parametrize("plane", PLANES)
def test_forward_equals_the_reference(make: Make, library: Library, plane: str) -> None:
    sidecar = make().start()
    with slotcar_client.connect(sidecar.target) as client:
        load(client)
        with client.session("engine", transport=plane) as session:
            assert session.transport == plane
            for seed in range(20):
                forward_is_right(session, library, seed)


def test_the_fastest_plane_is_found(make: Make) -> None:
    """Descriptors of shared memory come out through the mounted socket."""
    sidecar = make().start()
    with slotcar_client.connect(sidecar.target) as client, client.session("engine") as session:
        assert session.transport == "direct", session.transport_reason


def test_the_server_is_the_first_process_and_has_no_rights(make: Make) -> None:
    sidecar = make().start()
    assert "/opt/slotcar/bin/slotcar" in sidecar.python(COMMAND)
    status = sidecar.python(PROCESS)
    assert status["Uid"].split() == ["65532"] * 4
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"


def test_sigterm_under_load(make: Make, library: Library) -> None:
    """What was asked is answered right to the end, the exit code is 0, and no process was left unwaited for."""
    sidecar = make().start()
    with slotcar_client.connect(sidecar.target) as client:
        load(client)
    with ExitStack() as stack:
        engines = [stack.enter_context(Load(sidecar.target, plane, library)) for plane in PLANES]
        assert sidecar.python(ZOMBIES) == []
        sidecar.signal("TERM")
        assert sidecar.wait() == 0, sidecar.log
    for engine in engines:
        assert isinstance(engine.end, SlotcarError), engine.end
    assert "stopped" in sidecar.log
    assert "Traceback" not in sidecar.log


def test_sighup_is_survived(make: Make, library: Library) -> None:
    sidecar = make().start()
    with slotcar_client.connect(sidecar.target) as client:
        load(client)
        before = client.snapshot().layout.version.epoch
        with client.session("engine") as session:
            sidecar.signal("HUP")
            forward_is_right(session, library)
        assert client.snapshot().layout.version.epoch == before


def test_sigterm_before_anybody_came(make: Make) -> None:
    sidecar = make().start()
    sidecar.signal("TERM")
    assert sidecar.wait() == 0, sidecar.log


def test_what_can_never_be_meant_ends_with_2(make: Make) -> None:
    sidecar = make("--slots", "0")
    sidecar.run()
    assert sidecar.wait() == 2
    assert "slots" in sidecar.log


def test_a_folder_that_is_not_the_users_is_refused(make: Make) -> None:
    sidecar = make("--listen", "unix:///var/slotcar.sock")
    sidecar.run()
    assert sidecar.wait() == 1
    eventually(lambda: "/var/slotcar.sock" in sidecar.log, "the reason")
    assert "Traceback" not in sidecar.log
