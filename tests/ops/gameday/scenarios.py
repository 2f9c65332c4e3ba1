"""The seven troubles. Each is made for real on a stage, and gives what was seen of it.

`DO` says in a sentence what is done; a reader of the output sees it above what the four places say.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import slotcar_client
import torch
import trustme
from slotcar_client import AdapterInvalid, Credentials, LayoutStale, SlotcarError, Unavailable

from tests.adapters import WEIGHTS_FILE
from tests.ops.gameday import slow
from tests.ops.gameday.stage import SITES, Record, Row, Sighting, Stage, Worker
from tests.ports import free_port

_LIFE_SECONDS = 8
_ROWS = 2


class Scenario(NamedTuple):
    name: str
    does: str
    play: Callable[[Stage], list[Sighting]]


def _event(kind: str, text: str) -> Callable[[Any], Row | None]:
    """The latest event of this kind that says why."""

    def pick(state: Any) -> Row | None:
        for each in state["events"]:
            if each["kind"] == kind and text in each["reason"]:
                return Row("events", " | ".join(filter(None, (kind.replace("_", " "), each["name"], each["reason"]))))
        return None

    return pick


def _notice(text: str) -> Callable[[Any], Row | None]:
    """What needs a look, and says this."""

    def pick(state: Any) -> Row | None:
        for each in state["attention"]:
            if text in f"{each['what']} {each['text']}":
                return Row("needs a look", f"{each['what']} | {each['text']}")
        return None

    return pick


def _line(message: str, **fields: str) -> Callable[[Record], bool]:
    """Whether a line has this message, and fields that contain these texts."""
    return lambda line: (
        line["message"] == message and all(text in str(line.get(name, "")) for name, text in fields.items())
    )


def thrash(stage: Stage) -> list[Sighting]:
    names = ("chat", "sql", "summaries")
    stage.write(*names)
    client = stage.begin(slots=2)
    for name in names:
        client.load(name, stage.library.root / name, tier="host")
    session = client.session("engine")
    turns = iter(range(1 << 30))

    def map_the_next() -> None:
        session.set_mapping([names[next(turns) % len(names)]], load=True)

    with Worker(map_the_next, 0.5):
        return [
            stage.sight("SlotcarThrash", _line("evicted", reason="slot taken by"), _event("evicted", "slot taken by"))
        ]


def slow_source(stage: Stage) -> list[Sighting]:
    with slow.bucket(stage) as loads:
        client = stage.begin(*loads.flags, environment=loads.environment)
        client.set_log_level("debug")
        with contextlib.ExitStack() as workers:
            for number in range(slow.AT_A_TIME):
                workers.enter_context(Worker(lambda: loads.one(client), 0.1 + 3 * number))
            seen = stage.sight("SlotcarLoadsSlow", slow.is_slow_call, slow.slow_row)
            loads.ends_at_once()
        return [seen]


def full_disk(stage: Stage) -> list[Sighting]:
    stage.write("chat", "sql")
    volume = stage.folder / "volume"
    volume.mkdir()
    if os.geteuid() == 0:
        options = ["-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs"]
        subprocess.run(["mount", *options, str(volume)], check=True)
        stage.resources.callback(lambda: subprocess.run(["umount", str(volume)], check=True))
    client = stage.begin("--disk", str(volume / "disk"))
    client.upload("chat", stage.library.root / "chat", tier="host")
    _fill(stage, volume)
    client.upload("sql", stage.library.root / "sql", tier="host")
    seen = stage.sight("SlotcarDiskFailing", _line("storage_fault", reason="write"), _event("storage_fault", "write"))
    return [seen]


def _fill(stage: Stage, volume: Path) -> None:
    """No room is left in the volume; without root, the sidecar's files may not grow as a disk's quota does it."""
    if os.geteuid() != 0:
        assert stage.sidecar.process is not None
        resource.prlimit(stage.sidecar.process.pid, resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))
        return
    with contextlib.suppress(OSError), (volume / "somebody-elses").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def corrupt_adapter(stage: Stage) -> list[Sighting]:
    stage.write("chat", "sql")
    client = stage.begin()
    client.load("chat", stage.library.root / "chat")
    weights = stage.library.root / "sql" / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-1000])

    def load() -> None:
        with contextlib.suppress(AdapterInvalid):
            client.load("sql", stage.library.root / "sql")
            raise AssertionError("weights that are cut off were loaded")

    with Worker(load, 0.5):
        seen = stage.sight("SlotcarLoadsFailing", _line("refused", adapter="sql"), _notice("sql was refused"))
    return [seen]


def stale_client(stage: Stage) -> list[Sighting]:
    stage.write("chat")
    client = stage.begin()
    source = stage.library.root / "chat"
    client.load("chat", source)

    def keep_the_old(_: object, error: SlotcarError) -> None:
        raise error

    session = client.session("engine", transport="stream", on_stale=keep_the_old)

    def force_it_away() -> None:
        session.set_mapping(["chat"], load=True)
        session.forward(dict.fromkeys(SITES, torch.ones(_ROWS, 256)), [_ROWS])
        client.unload("chat", force=True)
        client.load("chat", source)
        with contextlib.suppress(LayoutStale):
            session.forward(dict.fromkeys(SITES, torch.ones(_ROWS, 256)), [_ROWS])

    with Worker(force_it_away, 0.3):
        return [stage.sight("SlotcarStaleForwards", _line("forward_stale"), _event("forward_stale", ""))]


def expired_certificate(stage: Stage) -> list[Sighting]:
    stage.write("chat")
    authority, port = trustme.CA(), free_port()
    paths = {name: stage.folder / name for name in ("tls.crt", "tls.key", "ca.crt")}
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=_LIFE_SECONDS)
    leaf = authority.issue_cert("localhost", not_after=end)
    paths["tls.crt"].write_bytes(b"".join(part.bytes() for part in leaf.cert_chain_pems))
    leaf.private_key_pem.write_to_path(str(paths["tls.key"]))
    authority.cert_pem.write_to_path(str(paths["ca.crt"]))
    files = ("--tls-cert", paths["tls.crt"], "--tls-key", paths["tls.key"], "--tls-client-ca", paths["ca.crt"])
    stage.begin("--listen", f"tcp://127.0.0.1:{port}", *map(str, files))
    fired = stage.alert("SlotcarCertificateExpired")
    engine = authority.issue_cert("engine")
    shown = Credentials(paths["ca.crt"], stage.folder / "client.crt", stage.folder / "client.key")
    (stage.folder / "client.crt").write_bytes(b"".join(part.bytes() for part in engine.cert_chain_pems))
    engine.private_key_pem.write_to_path(str(stage.folder / "client.key"))
    with slotcar_client.connect(f"localhost:{port}", credentials=shown) as client, contextlib.suppress(Unavailable):
        client.capacity()
        raise AssertionError("a client trusts an expired certificate")
    assert stage.sidecar.process is not None
    stage.sidecar.process.send_signal(signal.SIGHUP)
    line = stage.line(_line("cannot reload; what was in force stays", what="certificates", reason="expired"))
    return [Sighting(fired, stage.panels(fired), line, stage.row(_notice("certificate server is expired")))]


def killed(stage: Stage) -> list[Sighting]:
    stage.write("chat")
    client = stage.begin("--journal", str(stage.folder / "journal"))
    client.load("chat", stage.library.root / "chat")
    first = stage.line(_line("serving"))["epoch"]
    stage.sidecar.kill()
    down = stage.alert("SlotcarDown")
    shown = stage.panels(down)
    stage.must_be_away()
    stage.restart()
    line = stage.line(lambda each: each["message"] == "serving" and each["epoch"] != first)
    seen = [Sighting(down, shown, line, stage.row(_life(line["epoch"])))]
    stage.prometheus.catch_up()
    stage.sidecar.kill()
    stage.restart()
    last = stage.line(lambda each: each["message"] == "serving" and each["epoch"] not in (first, line["epoch"]))
    again = stage.alert("SlotcarRestarting")
    return [*seen, Sighting(again, stage.panels(again), last, stage.row(_life(last["epoch"])))]


def _life(epoch: str) -> Callable[[Any], Row | None]:
    """The epoch in the head of the page."""
    return lambda state: Row("head", f"Epoch {epoch}") if state["server"]["epoch"] == epoch else None


SCENARIOS = (
    Scenario("thrash", "An engine maps three adapters in turn, twice a second, and there are two slots.", thrash),
    Scenario("slow source", "Every answer of the bucket that adapters come from takes two seconds.", slow_source),
    Scenario(
        "full disk", "The volume of --disk is full of somebody else's bytes, and an adapter is uploaded.", full_disk
    ),
    Scenario(
        "corrupt adapter",
        "The end of an adapter's weights is cut off, and it is loaded again and again.",
        corrupt_adapter,
    ),
    Scenario(
        "stale client",
        "An operator unloads with force what an engine uses, and the engine goes on with its mapping.",
        stale_client,
    ),
    Scenario(
        "expired certificate",
        "Nobody renews the server's certificate; after its end SIGHUP is tried.",
        expired_certificate,
    ),
    Scenario("kill -9", "The sidecar is killed, started again, and killed and started once more.", killed),
)
