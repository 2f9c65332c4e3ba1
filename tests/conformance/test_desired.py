"""What a file declares, as a server tells of it."""

from __future__ import annotations

from pathlib import Path

from slotcar.v1 import adapter_pb2
from slotcar.v1 import adapter_service_pb2 as pb

from tests.adapters import MINIMAL_CONFIG, raw_tensors, write_raw_adapter
from tests.conformance.refusals import refused
from tests.conformance.target import PATIENCE_SECONDS, Target
from tests.server import SidecarProcess

SETTLED = (pb.DESIRED_STATE_READY, pb.DESIRED_STATE_ABSENT, pb.DESIRED_STATE_FAILED, pb.DESIRED_STATE_INVALID)


def page(target: Target, **request: object) -> pb.ListDesiredResponse:
    return target.adapters.ListDesired(pb.ListDesiredRequest(**request), timeout=PATIENCE_SECONDS)


def test_a_server_that_follows_no_file_declares_nothing(target: Target) -> None:
    answer = page(target)
    assert not answer.HasField("file")
    assert list(answer.adapters) == []
    assert answer.layout == target.state().layout.version
    assert refused(page, target, page_token="x:1").fields == ("page_token",)


def settled(target: Target) -> list[pb.DesiredAdapter]:
    """The entries once each was tried; looks again at each event."""
    events = target.adapters.WatchEvents(pb.WatchEventsRequest(), timeout=PATIENCE_SECONDS)
    for _ in events:
        entries = list(page(target).adapters)
        if entries and all(entry.state in SETTLED for entry in entries):
            events.cancel()
            return entries
    raise AssertionError("the events ended")


def test_pages_together_are_all_entries(tmp_path: Path) -> None:
    site = "layers.0.q_proj"
    sound = write_raw_adapter(tmp_path / "root" / "sound", dict(MINIMAL_CONFIG), raw_tensors(site))
    file = tmp_path / "adapters.yaml"
    file.write_text(
        "apiVersion: slotcar.dev/v1\nprune: true\nadapters:\n"
        f"- {{name: sound, source: {sound}}}\n"
        "- {name: old, state: absent}\n"
        f"- {{name: bad, source: {tmp_path}/root/bad}}\n"
        "- {colour: red}\n"
        "- {name: no-source}\n"
    )
    (tmp_path / "s").mkdir()
    with SidecarProcess(tmp_path / "s", tmp_path / "root", extra=("--adapters", str(file))) as server:
        target = Target(server.target, tmp_path / "root")
        entries = settled(target)
        assert [entry.name for entry in entries] == ["bad", "no-source", "old", "sound", ""]
        bad, no_source, old, ready, nameless = entries
        assert (bad.reason, bad.desired) == ("SOURCE_UNAVAILABLE", pb.DESIRED_PRESENT)
        assert 0 <= bad.next_try.ToMilliseconds() <= 60_000
        assert bad.attempts >= 1
        assert (no_source.reason, no_source.place) == ("REQUEST_INVALID", "adapters[4]")
        assert (old.desired, old.state) == (pb.DESIRED_ABSENT, pb.DESIRED_STATE_ABSENT)
        assert not old.HasField("next_try")
        assert (ready.source, ready.target_tier) == (str(sound), adapter_pb2.TIER_HOST)
        assert (nameless.place, nameless.state) == ("adapters[3]", pb.DESIRED_STATE_INVALID)

        first = page(target, page_size=2)
        assert (first.file.path, first.file.prune, first.file.reason) == (str(file), True, "")
        assert first.file.version.startswith("sha256:")
        rest = page(target, page_size=9, page_token=first.next_page_token)
        assert rest.file == first.file
        assert [entry.name for entry in (*first.adapters, *rest.adapters)] == [entry.name for entry in entries]
        target.close()
