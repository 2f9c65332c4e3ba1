"""Remote sources: what is denied before any request, and what a fetch makes of a place that misbehaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from slotcar_sidecar.core.errors import CapacityExceeded, ShuttingDown, SourceDenied, SourceUnavailable
from slotcar_sidecar.store.sources.fetch import MAX_TRIES, Broken, Changed, Fetching, RemoteFile
from slotcar_sidecar.store.sources.local import LocalSource
from slotcar_sidecar.store.sources.options import OptionsInvalid, parse_options
from slotcar_sidecar.store.sources.remotes import Settings, make_remote
from slotcar_sidecar.store.sources.router import Remote, Sources
from slotcar_sidecar.store.sources.rules import RuleInvalid, parse_rule

from tests.adapters import CONFIG_FILE, WEIGHTS_FILE
from tests.fakes.fetching import Clock, Counts

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RULES = ("hf://org/*", "s3://bucket/prefix", "memory://store", "odd://store")
URI = "memory://store/good"


class MisbehavingPlace:
    """The folder at `path`; `faults` are called, one at each stream, with the bytes that should come."""

    scheme, uri = "memory", URI

    def __init__(self, path: Path, faults: list[Callable[[bytes], Iterator[bytes]]]) -> None:
        self.path, self.faults, self.starts = path, faults, list[int]()

    def look(self, name: str) -> RemoteFile | None:
        path = self.path / name
        return RemoteFile(path.stat().st_size, str(path.stat().st_mtime_ns)) if path.exists() else None

    @contextmanager
    def stream(self, name: str, file: RemoteFile, start: int) -> Iterator[Iterator[bytes]]:
        self.starts.append(start)
        body = (self.path / name).read_bytes()[start:]
        yield self.faults.pop(0)(body) if self.faults else iter([body])


def half(body: bytes) -> Iterator[bytes]:
    yield body[: len(body) // 2]


def broken(body: bytes) -> Iterator[bytes]:
    yield body[:10]
    raise Broken("connection", "it broke")


def throttled(body: bytes) -> Iterator[bytes]:
    raise Broken("throttled", "status 503")
    yield b""


def another(body: bytes) -> Iterator[bytes]:
    raise Changed
    yield b""


def longer(body: bytes) -> Iterator[bytes]:
    yield body + b"x"


class Bench:
    def __init__(self, root: Path, *faults: Callable[[bytes], Iterator[bytes]], seconds: float = 60.0) -> None:
        self.clock, self.counts = Clock(), Counts()
        self.place = MisbehavingPlace(root / "good", list(faults))
        fetching = Fetching(seconds, 1 << 40, self.clock, lambda: 0.5, self.clock, self.counts)
        remote = Remote(tuple(map(parse_rule, RULES)), lambda _: self.place, fetching)
        self.local = LocalSource([root], 1 << 20)
        self.wanted = self.local.read(str(root / "good")).adapter.digest
        self.sources = Sources(self.local, remote, 1 << 20)


@pytest.mark.parametrize(
    ("faults", "retried"),
    [
        ((), []),
        ((half,), ["truncated"]),
        ((broken, half, broken), ["connection", "truncated", "connection"]),
        ((throttled,) * (MAX_TRIES - 1), ["throttled"] * (MAX_TRIES - 1)),
        ((another,), ["changed"]),
        ((longer,), ["changed"]),
    ],
)
def test_faults_that_pass_are_overcome(faults: tuple, retried: list[str], root: Path) -> None:  # type: ignore[type-arg]
    bench = Bench(root, *faults)
    assert bench.sources.read(URI).adapter.digest == bench.wanted
    assert bench.counts.retried == retried
    assert bench.counts.failed == [] or retried == ["changed"]


def test_a_fetch_goes_on_where_it_stopped(root: Path) -> None:
    bench = Bench(root, lambda body: iter([body]), half)
    bench.sources.read(URI)
    size = (root / "good" / WEIGHTS_FILE).stat().st_size
    assert bench.place.starts == [0, 0, size // 2]
    assert bench.counts.bytes == size + (root / "good" / CONFIG_FILE).stat().st_size


@pytest.mark.parametrize(("fault", "kind"), [(throttled, "throttled"), (another, "changed"), (longer, "changed")])
def test_faults_that_stay_are_refused(fault: Callable[[bytes], Iterator[bytes]], kind: str, root: Path) -> None:
    bench = Bench(root, *[fault] * 20)
    with pytest.raises(SourceUnavailable) as caught:
        bench.sources.read(URI)
    assert caught.value.facts["found"] == kind
    assert bench.counts.failed[-1] == kind


def test_the_time_of_a_fetch_is_bounded(root: Path) -> None:
    with pytest.raises(SourceUnavailable, match=r"--fetch-seconds 0\.3"):
        Bench(root, *[throttled] * 20, seconds=0.3).sources.read(URI)


def test_a_shut_down_ends_a_fetch(root: Path) -> None:
    bench = Bench(root)
    bench.place.faults = [lambda body: bench.clock.stopped.set() or iter([body])]  # type: ignore[func-returns-value]
    with pytest.raises(ShuttingDown):
        bench.sources.read(URI)


def test_a_large_adapter_is_refused_before_it_is_fetched(root: Path) -> None:
    with (root / "good" / WEIGHTS_FILE).open("ab") as file:
        file.truncate(2 << 20)
    place = MisbehavingPlace(root / "good", [])
    fetching = Fetching(60.0, 1 << 40, Clock(), lambda: 0.5, Clock(), Counts())
    sources = Sources(
        LocalSource([root], 1), Remote((parse_rule("memory://store"),), lambda _: place, fetching), 1 << 20
    )
    with pytest.raises(CapacityExceeded):
        sources.read(URI)
    assert place.starts == []


def real(root: Path, cache: Path, *, offline: bool = True, options: bytes = b"{}") -> Sources:
    fetching = Fetching(60.0, 1 << 40, Clock(), lambda: 0.5, Clock(), Counts())
    settings = Settings(RULES, parse_options(options, {}.get), cache, offline)
    return Sources(LocalSource([root], 1 << 20), make_remote(settings, fetching), 1 << 20)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/prefix/../other", "s3://bucket/other", "s3://bucket", "s3://other/prefix", "s3://bucket/prefix2",
        "s3://bucket/prefix/%2e%2e/x", "s3://bucket/prefix/a?versionId=1", "s3://bucket/prefix/a#x",
        "s3://user:secret@bucket/prefix", "s3://bucket/prefix//a", "s3://bucket/prefix/a\n", "s3://bucket/prefix/\0",
        "S3://bucket/prefix/a", "gs://bucket/a", "https://host.invalid/a", "hf://org/repo", "hf://other/repo@main",
        "hf://org@main", "hf://org/../x@main", "hf://org/repo@../../x", "hf://org/repo@a@b", "hf://org/repo@refs/pr/1",
        "s3://bucket/prefix::file:///etc", "simplecache::s3://bucket/prefix", "s3://bucket/prefix/" + "a" * 5000,
    ],
)  # fmt: skip
def test_what_is_not_allowed_is_denied_before_any_request(uri: str, root: Path, tmp_path: Path) -> None:
    for call in (real(root, tmp_path).canonical, real(root, tmp_path).version, real(root, tmp_path).read):
        with pytest.raises(SourceDenied) as caught:
            call(uri)
        assert "secret" not in str(caught.value.facts) + caught.value.message


@pytest.mark.parametrize("text", ["", "/a", "file:///a", "s3://", "s3://a/../b", "s3://a?x", "s3://*/a", "hf://a b"])
def test_a_rule_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(RuleInvalid):
        parse_rule(text)


def test_offline_nothing_is_asked_for(root: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceDenied, match="--offline"):
        real(root, tmp_path).read("s3://bucket/prefix/a")


def test_the_hub_is_read_from_its_cache_offline(root: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    snapshot = cache / "models--org--repo" / "snapshots" / COMMIT
    shutil.copytree(root / "good", snapshot / "folder")
    (cache / "models--org--repo" / "refs").mkdir()
    (cache / "models--org--repo" / "refs" / "main").write_text(COMMIT)
    sources, wanted = real(root, cache), LocalSource([root], 1 << 20).read(str(root / "good")).adapter.digest
    for revision in ("main", COMMIT):
        assert sources.read(f"hf://org/repo/folder@{revision}").adapter.digest == wanted
    assert sources.version("hf://org/repo/folder@main") == sources.version(f"hf://org/repo/folder@{COMMIT}")
    with pytest.raises(SourceUnavailable, match="not in the cache"):
        sources.read("hf://org/repo/folder@v2")
    (snapshot / "folder" / WEIGHTS_FILE).unlink()
    (snapshot / "folder" / WEIGHTS_FILE).symlink_to(root.parent / "secret" / WEIGHTS_FILE)
    with pytest.raises(SourceDenied, match="out of the cache"):
        sources.read("hf://org/repo/folder@main")


@pytest.mark.parametrize(
    ("repository", "offline", "found"),
    [("repo", False, "connection"), ("re..po", False, "refused"), ("re..po", True, "missing")],
)
def test_errors_of_the_hub_are_told_as_ours(
    repository: str, offline: bool, found: str, root: Path, tmp_path: Path
) -> None:
    options = b'{"hf://org/*": {"endpoint": "http://127.0.0.1:1"}}'
    with pytest.raises(SourceUnavailable) as caught:
        real(root, tmp_path, offline=offline, options=options).read(f"hf://org/{repository}@main")
    assert caught.value.facts["found"] == found


def test_a_filesystem_of_fsspec_is_read(root: Path, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        memory.pipe_file(f"/store/good/{name}", (root / "good" / name).read_bytes())
    sources = real(root, tmp_path, offline=False)
    assert sources.read(URI).adapter.digest == LocalSource([root], 1 << 20).read(str(root / "good")).adapter.digest
    before = sources.version(URI)
    memory.pipe_file(f"/store/good/{CONFIG_FILE}", b"{}")
    assert sources.version(URI) != before


class OddFilesystem(MemoryFileSystem):
    """The memory's, with an error of its own wherever a file is read."""

    protocol = "odd"
    cachable = False

    def __init__(self, error: str = "", **options: object) -> None:
        super().__init__(**options)
        self.error = {"": OSError, "forbidden": PermissionError, "gone": FileNotFoundError, "other": LookupError}[error]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        raise self.error("hunter2")


@pytest.mark.parametrize(
    ("error", "found"),
    [("", "connection"), ("forbidden", "forbidden"), ("gone", "changed"), ("other", "failed"), ("nonsense", "failed")],
)
def test_errors_of_a_filesystem_are_told_without_their_texts(
    error: str, found: str, root: Path, tmp_path: Path
) -> None:
    fsspec.register_implementation("odd", OddFilesystem, clobber=True)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        fsspec.filesystem("memory").pipe_file(f"/store/good/{name}", (root / "good" / name).read_bytes())
    options = json.dumps({"odd://store": {"arguments": {"error": error}}}).encode()
    with pytest.raises(SourceUnavailable) as caught:
        real(root, tmp_path, offline=False, options=options).read("odd://store/good")
    assert caught.value.facts["found"] == found
    assert "hunter2" not in caught.value.message


def test_secrets_are_there_by_reference_only(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a-key\n")
    text = json.dumps({"s3://bucket": {"key": {"file": str(tmp_path / "key")}, "secret": {"env": "SECRET"}}})
    (options,) = parse_options(text.encode(), {"SECRET": "a-secret"}.get)
    assert (options.secret("key"), options.secret("secret"), options.secret("token")) == ("a-key", "a-secret", None)
    assert "a-key" not in repr(options)
    assert "a-secret" not in repr(options)
    for wrong in ({"key": "hunter2"}, {"secret": {"env": "A", "file": "b"}}, {"endpoint": 1}, {"hunter": "hunter2"}):
        with pytest.raises(OptionsInvalid) as caught:
            parse_options(json.dumps({"s3://bucket": wrong}).encode(), {}.get)
        assert "hunter2" not in str(caught.value)
