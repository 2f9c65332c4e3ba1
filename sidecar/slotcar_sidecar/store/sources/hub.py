"""Reads files of a model hub through huggingface_hub, by exact names and at one commit; offline, only from its cache.

No code of a repository is read, and no file but those that an adapter consists of.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from slotcar_sidecar.core.errors import SlotcarError, SourceDenied, SourceUnavailable
from slotcar_sidecar.store.sources.fetch import Broken, Changed, RemoteFile
from slotcar_sidecar.store.sources.options import Options
from slotcar_sidecar.store.sources.rules import Target

__all__ = ["HubPlace"]

_PART_BYTES = 1 << 20
_SILENT_SECONDS = 10.0


class HubPlace:
    """A folder of a repository at the commit that its revision names when it is first looked at, as Place."""

    scheme = "hf"

    def __init__(self, target: Target, cache: Path, options: Options, *, offline: bool) -> None:
        """Raises SourceDenied when huggingface_hub is not installed."""
        try:
            import huggingface_hub  # noqa: F401
        except ImportError as error:
            raise SourceDenied(
                "hf:// needs huggingface_hub: pip install 'slotcar[hf]'",
                found="no huggingface_hub",
                wanted="slotcar[hf]",
            ) from error
        organisation, repository, *folder = target.path
        self.uri = str(target)
        self._repo = f"{organisation}/{repository}"
        self._folder = "".join(f"{part}/" for part in folder)
        self._revision = target.revision
        self._cache = cache
        self._options = options
        self._offline = offline

    def look(self, name: str) -> RemoteFile | None:
        if self._offline:
            path = self._cached(name, self._commit)
            return None if path is None else RemoteFile(path.stat().st_size, self._commit)
        return self._look_online(name)

    @contextmanager
    def stream(self, name: str, file: RemoteFile, start: int) -> Iterator[Iterator[bytes]]:
        path = self._cached(name, file.version) if self._offline else self._download(name, file.version)
        if path is None:
            raise Changed
        with self._translated(name), path.open("rb") as opened:
            opened.seek(0, 2)
            if opened.tell() != file.bytes:
                raise Changed
            opened.seek(start)
            yield iter(lambda: opened.read(_PART_BYTES), b"")

    @cached_property
    def _commit(self) -> str:
        """Raises SourceUnavailable for a repository or revision that is not there."""
        if not self._offline:
            return self._commit_online()
        folder = self._cache / f"models--{self._repo.replace('/', '--')}"
        if (folder / "snapshots" / self._revision).is_dir():
            return self._revision
        try:
            commit = (folder / "refs" / self._revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            commit = ""
        if not commit.isalnum():
            raise self._unavailable("missing", "it is not in the cache, and --offline allows nothing else")
        return commit

    def _cached(self, name: str, commit: str) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        with self._translated(name):
            found = try_to_load_from_cache(self._repo, self._folder + name, cache_dir=self._cache, revision=commit)
        return self._inside(found) if isinstance(found, str) else None

    def _inside(self, found: str) -> Path:
        """Files of the cache are links into it; what leads elsewhere is not read."""
        path = Path(found).resolve()
        if not path.is_relative_to(self._cache.resolve()):
            raise SourceDenied(f"{self.uri} leads out of the cache", found="a link", wanted="a file of the cache")
        return path

    def _commit_online(self) -> str:
        from huggingface_hub import HfApi

        with self._translated(self._repo):
            api = HfApi(endpoint=self._options.endpoint, token=self._token)
            found = api.model_info(self._repo, revision=self._revision, timeout=_SILENT_SECONDS).sha
        if not found:
            raise self._unavailable("missing", "the hub names no commit")
        return str(found)

    def _look_online(self, name: str) -> RemoteFile | None:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import EntryNotFoundError

        endpoint = self._options.endpoint
        url = hf_hub_url(self._repo, self._folder + name, revision=self._commit, endpoint=endpoint)
        try:
            with self._translated(name):
                size = get_hf_file_metadata(url, token=self._token, timeout=_SILENT_SECONDS, endpoint=endpoint).size
        except EntryNotFoundError:
            return None
        if size is None:
            raise self._unavailable("refused", f"the hub names no size of {name}")
        return RemoteFile(size, self._commit)

    def _download(self, name: str, commit: str) -> Path:
        from huggingface_hub import hf_hub_download

        with self._translated(name):
            found = hf_hub_download(
                self._repo,
                self._folder + name,
                revision=commit,
                cache_dir=self._cache,
                token=self._token,
                endpoint=self._options.endpoint,
                etag_timeout=_SILENT_SECONDS,
            )
        return self._inside(str(found))

    @property
    def _token(self) -> str | bool:
        """Never one that the user of this machine logged in with."""
        return self._options.secret("token") or False

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError

        try:
            yield
        except LocalEntryNotFoundError:
            raise Broken("connection", f"no connection for {name}") from None
        except (EntryNotFoundError, SlotcarError, Broken, Changed):
            raise
        except RepositoryNotFoundError:
            raise self._unavailable("missing", "there is no such repository, or it is private") from None
        except OSError as error:
            raise self._failed(error, name) from None
        except ValueError as error:
            raise self._unavailable("refused", f"{type(error).__name__} for {name}") from None
        except Exception as error:  # the HTTP library's own; which one it is, is huggingface_hub's business
            raise Broken("connection", f"{type(error).__name__} for {name}") from None

    def _failed(self, error: OSError, name: str) -> Exception:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status in (401, 403):
            return self._unavailable("forbidden", f"status {status} for {name}")
        if 400 <= status < 500 and status not in (408, 429):
            return self._unavailable("refused", f"status {status} for {name}")
        kind = "throttled" if status in (429, 503) else "connection"
        return Broken(kind, f"{type(error).__name__} for {name}")

    def _unavailable(self, kind: str, what: str) -> SourceUnavailable:
        return SourceUnavailable(f"cannot read {self.uri}: {what}", found=kind, wanted="a revision that may be read")
