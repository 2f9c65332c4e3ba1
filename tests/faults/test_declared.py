"""A real server follows a real file: as somebody saves it, as a mounted ConfigMap swaps it, and through kill -9."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slotcar_client
from slotcar.v1 import model_pb2
from slotcar_client import AdapterNotFound, Client, DesiredAdapter, DesiredSet

from tests.adapters import MINIMAL_CONFIG, raw_tensors, write_raw_adapter
from tests.faults.oracle import spec_file
from tests.server import SidecarProcess

SITES = {"layers.0.q_proj": (64, 64)}
MODEL = model_pb2.ModelSpec(
    sites=[
        model_pb2.Site(name=name, in_features=i, out_features=o, kind=model_pb2.SITE_KIND_LINEAR)
        for name, (i, o) in SITES.items()
    ]
)
HEAD = "apiVersion: slotcar.dev/v1\n"
POLL_SECONDS = "0.3"
SLOTS = 3


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Sound adapters a to e."""
    folder = tmp_path / "root"
    for seed, name in enumerate("abcde"):
        make(folder / name, seed)
    return folder


def make(folder: Path, seed: int, **settings: object) -> Path:
    return write_raw_adapter(folder, dict(MINIMAL_CONFIG) | settings, raw_tensors("layers.0.q_proj", seed=seed))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the server looks; nothing is there yet."""
    (tmp_path / "declared").mkdir()
    return tmp_path / "declared" / "adapters.yaml"


@pytest.fixture
def sidecar(tmp_path: Path, root: Path, file: Path) -> Iterator[SidecarProcess]:
    (tmp_path / "s").mkdir()
    extra = ("--adapters", str(file), "--adapters-poll-seconds", POLL_SECONDS)
    model = ("--model-spec", str(spec_file(tmp_path, SITES)))
    with SidecarProcess(tmp_path / "s", root, SLOTS, extra=(*extra, *model)) as process:
        yield process


@pytest.fixture
def client(sidecar: SidecarProcess) -> Iterator[Client]:
    with slotcar_client.connect(sidecar.target) as client:
        yield client


def text(*entries: str, more: str = "") -> str:
    return HEAD + more + "adapters:" + ("".join(f"\n- {{{entry}}}" for entry in entries) or " []") + "\n"


def save(file: Path, content: str) -> None:
    """As a careful editor does."""
    beside = file.with_suffix(".new")
    beside.write_text(content)
    beside.replace(file)


def until(client: Client, reached: Callable[[DesiredSet], bool]) -> DesiredSet:
    """What is declared once `reached` holds; looks again at each event."""
    with client.events() as events:
        while True:
            desired = client.desired()
            if reached(desired):
                return desired
            assert next(events, None) is not None, desired


def states(desired: DesiredSet) -> dict[str, str]:
    return {each.name or each.place: each.state for each in desired.adapters}


def all_are(**wanted: str) -> Callable[[DesiredSet], bool]:
    return lambda desired: states(desired) == wanted


def is_refused(reason: str, last: str) -> Callable[[DesiredSet], bool]:
    """The file is refused, with other words than the last time."""

    def reached(desired: DesiredSet) -> bool:
        return desired.file is not None and desired.file.reason == reason and desired.file.message != last

    return reached


def entry(desired: DesiredSet, name: str) -> DesiredAdapter:
    (found,) = [each for each in desired.adapters if each.name == name]
    return found


def names(client: Client) -> dict[str, bool]:
    """Every name, and whether it is kept."""
    return {adapter.name: adapter.keep for adapter in client.list()}


def test_a_file_is_followed_from_before_it_is_there(client: Client, file: Path, root: Path) -> None:
    missing = until(client, lambda desired: bool(desired.file and desired.file.reason))
    assert missing.file is not None
    assert (missing.file.reason, missing.file.version) == ("SOURCE_UNAVAILABLE", "")

    save(
        file, text(f"name: a, source: {root}/a, state: keep", f"name: b, source: {root}/b", "name: old, state: absent")
    )
    desired = until(client, all_are(a="ready", b="ready", old="absent"))
    assert names(client) == {"a": True, "b": False}
    assert [adapter.tier for adapter in client.list()] == ["device", "host"]
    assert desired.file is not None
    assert desired.file.reason == ""

    save(file, text(f"name: a, source: {root}/a", f"name: b, source: {root}/c, tier: device", more="prune: true\n"))
    until(client, all_are(a="ready", b="ready"))
    assert names(client) == {"a": False, "b": False}
    assert client.get("b").source == str(root / "c")
    assert client.get("b").tier == "device"

    save(file, text("name: b, state: absent", more="prune: true\n"))
    until(client, all_are(b="absent"))
    assert names(client) == {}


def test_bad_entries_hold_up_nobody_and_say_why(client: Client, file: Path, root: Path) -> None:
    make(root / "bad", 9, use_dora=True)
    digest = "sha256:" + "0" * 64
    save(
        file,
        text(
            f"name: a, source: {root}/a",
            f"name: bad, source: {root}/bad",
            f"name: other, source: {root}/b, digest: '{digest}'",
            f"name: gone, source: {root}/gone",
            "name: out, source: /etc",
            f"name: typo, sauce: {root}/a",
            f"source: {root}/a",
            f"name: c, source: {root}/c, state: keep",
        ),
    )
    wanted = {"a": "ready", "c": "ready", "typo": "invalid", "adapters[6]": "invalid"}
    failed = dict.fromkeys(("bad", "other", "gone", "out"), "failed")
    desired = until(client, all_are(**wanted, **failed))
    reasons = {each.name: each.reason for each in desired.adapters if each.state == "failed"}
    assert reasons.pop("bad") in ("ADAPTER_INVALID", "ADAPTER_UNSUPPORTED")
    assert reasons == {"other": "DIGEST_MISMATCH", "gone": "SOURCE_UNAVAILABLE", "out": "SOURCE_DENIED"}
    assert entry(desired, "typo").message.startswith("adapters[5].sauce is ")
    assert entry(desired, "gone").next_try_seconds is not None
    assert entry(desired, "other").next_try_seconds is None

    # What waits for its source is loaded when that changes, and what is tried again finds it.
    make(root / "gone", 10)
    make(root / "bad", 11)
    until(client, lambda desired: states(desired)["gone"] == states(desired)["bad"] == "ready")


def test_a_text_that_is_none_leaves_the_set_before_in_force(client: Client, file: Path, root: Path) -> None:
    save(file, text(f"name: a, source: {root}/a"))
    before = until(client, all_are(a="ready")).file
    assert before is not None
    bad: list[tuple[str, Callable[[], object]]] = [
        ("REQUEST_INVALID", lambda: save(file, HEAD + "adapters: [")),
        ("REQUEST_INVALID", lambda: save(file, "")),
        ("SOURCE_UNAVAILABLE", lambda: (file.unlink(), file.mkdir())),
        ("SOURCE_UNAVAILABLE", file.rmdir),
    ]
    seen = before
    for reason, change in bad:
        change()
        desired = until(client, is_refused(reason, seen.message))
        assert desired.file is not None
        seen = desired.file
        assert (seen.version, states(desired)) == (before.version, {"a": "ready"})
    # What is declared goes on to be brought about.
    client.unload("a")
    until(client, lambda desired: all_are(a="ready")(desired) and "a" in names(client))
    save(file, text(f"name: b, source: {root}/b"))
    until(client, all_are(b="ready"))
    assert "a" in names(client), "without prune, what is not listed is left alone"


class ConfigMap:
    """A folder as a kubelet mounts it: the file is a link into ..data, which is a link that is swapped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def publish(self, content: str) -> None:
        self._count += 1
        version = self._folder / f"..2026_01_01_00_00_{self._count:02}.{self._count}"
        version.mkdir()
        (version / "adapters.yaml").write_text(content)
        swap = self._folder / "..data_tmp"
        swap.symlink_to(version.name)
        before = self._folder / "..data"
        old = before.resolve() if before.exists() else None
        swap.rename(before)
        if self._count == 1:
            (self._folder / "adapters.yaml").symlink_to("..data/adapters.yaml")
        if old is not None:
            (old / "adapters.yaml").unlink()
            old.rmdir()


def test_a_config_map_is_followed_through_its_swaps(client: Client, file: Path, root: Path) -> None:
    mounted = ConfigMap(file.parent)
    for name in "abc":
        entries = f"name: it, source: {root}/{name}", f"name: {name}, source: {root}/{name}, state: keep"
        mounted.publish(text(*entries, more="prune: true\n"))
        until(client, all_are(**{"it": "ready", name: "ready"}))
        assert names(client) == {"it": False, name: True}
        assert client.get("it").source == str(root / name)


def test_keeps_beyond_what_fits_fail_until_there_is_room(client: Client, file: Path, root: Path) -> None:
    keeps = [f"name: {name}, source: {root}/{name}, state: keep" for name in "abc"]
    save(file, text(*keeps))
    desired = until(client, all_are(a="ready", b="ready", c="failed"))
    assert entry(desired, "c").reason == "SLOTS_EXHAUSTED"
    assert entry(desired, "c").next_try_seconds is not None
    assert "c" in names(client), "it can be mapped all the same"
    save(file, text(f"name: a, source: {root}/a", *keeps[1:]))
    until(client, all_are(a="ready", b="ready", c="ready"))
    assert names(client) == {"a": False, "b": True, "c": True}


def test_what_somebody_does_by_hand_is_undone(client: Client, file: Path, root: Path) -> None:
    save(file, text(f"name: a, source: {root}/a, state: keep", "name: no, state: absent"))
    until(client, all_are(a="ready", no="absent"))
    digest = client.get("a").digest
    client.unload("a", force=True)
    until(client, lambda _: names(client) == {"a": True})
    client.load("a", root / "b", replace=True)
    until(client, lambda _: client.get("a").digest == digest)
    client.release_keep("a")
    until(client, lambda _: names(client) == {"a": True})
    client.load("no", root / "c")
    until(client, lambda _: "no" not in names(client))
    with pytest.raises(AdapterNotFound):
        client.get("no")


def test_a_storm_of_changes_ends_with_the_last(client: Client, file: Path, root: Path) -> None:
    for number in range(100):
        name = "abcde"[number % 5]
        content = text(f"name: it, source: {root}/{name}", f"name: last-{number}, source: {root}/{name}")
        if number % 2:
            save(file, content)
        else:
            file.write_text(content)
    until(client, lambda desired: states(desired) == {"it": "ready", "last-99": "ready"})
    assert client.get("it").source == str(root / "e")
    with client.events(replay=1000) as events:
        past = [next(events) for _ in range(events.replayed)]
    assert sum(event.kind == "declared" for event in past) < 100


def test_kill_9_and_a_restart_end_with_the_same_set(sidecar: SidecarProcess, file: Path, root: Path) -> None:
    save(file, text(f"name: a, source: {root}/a, state: keep", f"name: b, source: {root}/b"))
    with slotcar_client.connect(sidecar.target) as client:
        until(client, all_are(a="ready", b="ready"))
        before = {adapter.name: adapter.digest for adapter in client.list()}
    save(
        file,
        text(f"name: a, source: {root}/a, state: keep", f"name: b, source: {root}/b", f"name: c, source: {root}/c"),
    )
    sidecar.kill()
    sidecar.start()
    with slotcar_client.connect(sidecar.target) as client:
        until(client, all_are(a="ready", b="ready", c="ready"))
        after = {adapter.name: adapter.digest for adapter in client.list()}
        assert after.items() >= before.items()
        assert names(client)["a"]
    assert sidecar.stop() == 0


def test_without_a_model_names_come_into_memory_and_into_slots_with_it(tmp_path: Path, root: Path, file: Path) -> None:
    save(file, text(f"name: a, source: {root}/a, state: keep", f"name: b, source: {root}/b, tier: device"))
    (tmp_path / "s").mkdir()
    extra = ("--adapters", str(file), "--adapters-poll-seconds", POLL_SECONDS)
    server = SidecarProcess(tmp_path / "s", root, SLOTS, extra=extra)
    with server as sidecar, slotcar_client.connect(sidecar.target) as client:
        until(client, lambda desired: {each.reason for each in desired.adapters} == {"MODEL_UNKNOWN"})
        assert [adapter.tier for adapter in client.list()] == ["host", "host"]
        with client.session(name="engine", model_spec=MODEL):
            until(client, all_are(a="ready", b="ready"))
        assert [(each.tier, each.keep) for each in client.list()] == [("device", True), ("device", False)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(client: Client, file: Path, root: Path) -> None:
    save(file, text(f"name: a, source: {root}/a"))
    until(client, all_are(a="ready"))
    file.chmod(0)
    seen = until(client, lambda desired: bool(desired.file and desired.file.reason))
    assert states(seen) == {"a": "ready"}
    file.chmod(0o644)
    until(client, lambda desired: bool(desired.file and not desired.file.reason))


def test_a_thousand_entries(client: Client, file: Path, root: Path) -> None:
    good = [f"name: good-{number}, source: {root}/{'abcde'[number % 5]}" for number in range(600)]
    bad = [f"name: bad-{number}, source: {root}/nowhere-{number}" for number in range(300)]
    broken = [f"name: broken-{number}" for number in range(100)]
    save(file, text(*bad, *broken, *good))
    desired = until(
        client, lambda desired: not {"pending", "loading"} & set(states(desired).values()) and len(desired.adapters) > 0
    )
    counts = [each.state for each in desired.adapters]
    assert {state: counts.count(state) for state in set(counts)} == {"ready": 600, "failed": 300, "invalid": 100}
    assert len(client.list()) == 600
    assert [each.name for each in desired.adapters] == sorted(each.name for each in desired.adapters)
