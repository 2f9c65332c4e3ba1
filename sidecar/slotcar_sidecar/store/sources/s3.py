"""Reads files of S3 buckets through botocore: each request pinned to the ETag, and to the version where there are some.

Credentials, profiles, proxies and certificates of this process's environment and home have no part in it unless the
options say `"ambient": true`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slotcar_sidecar.core.errors import SlotcarError, SourceDenied, SourceUnavailable
from slotcar_sidecar.store.sources.fetch import Broken, Changed, RemoteFile
from slotcar_sidecar.store.sources.options import Options
from slotcar_sidecar.store.sources.rules import Target

__all__ = ["S3Buckets"]

_PART_BYTES = 256 << 10
# A connection that is silent for so long is broken, and shut-down waits no longer for it.
_SILENT_SECONDS = 5.0
_MISSING = ("NoSuchKey", "404", "NotFound")


class S3Buckets:
    """Makes places of the buckets that one set of options is for. Safe for threads, as botocore's clients are."""

    def __init__(self, options: Options) -> None:
        """Raises SourceDenied when botocore is not installed, and SourceUnavailable for options that it cannot use."""
        try:
            from botocore import UNSIGNED
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError
        except ImportError as error:
            raise SourceDenied(
                "s3:// needs botocore: pip install 'slotcar[s3]'", found="no botocore", wanted="slotcar[s3]"
            ) from error
        key, secret = options.secret("key"), options.secret("secret")
        config = Config(
            signature_version=UNSIGNED if key is None and not options.ambient else None,
            retries={"total_max_attempts": 1},
            connect_timeout=_SILENT_SECONDS,
            read_timeout=_SILENT_SECONDS,
            s3={"addressing_style": "path"} if options.endpoint else {},
            ignore_configured_endpoint_urls=not options.ambient,
            proxies=None if options.ambient else {},
        )
        try:
            self._client = _session(ambient=options.ambient).create_client(
                "s3",
                region_name=options.region or "us-east-1",
                endpoint_url=options.endpoint,
                verify=None if options.ambient else True,
                aws_access_key_id=key,
                aws_secret_access_key=secret,
                aws_session_token=options.secret("token"),
                config=config,
            )
        except (BotoCoreError, ValueError) as error:
            raise SourceUnavailable(
                f"the options of {options.rule} cannot be used ({type(error).__name__})",
                found="options",
                wanted="an endpoint that is a URL, a region, and key and secret both or none",
            ) from None

    def open(self, target: Target) -> S3Place:
        return S3Place(self._client, target)


class S3Place:
    """A prefix of a bucket, as Place."""

    scheme = "s3"

    def __init__(self, client: Any, target: Target) -> None:
        self._client = client
        self._bucket, *prefix = target.path
        self._prefix = "".join(f"{part}/" for part in prefix)
        self.uri = str(target)

    def look(self, name: str) -> RemoteFile | None:
        try:
            with self._translated(name):
                found = self._client.head_object(Bucket=self._bucket, Key=self._prefix + name)
        except FileNotFoundError:
            return None
        if "ETag" not in found or "ContentLength" not in found:
            raise self._unavailable("failed", f"an answer without ETag or length for {name}")
        return RemoteFile(found["ContentLength"], _version(found))

    @contextmanager
    def stream(self, name: str, file: RemoteFile, start: int) -> Iterator[Iterator[bytes]]:
        etag, _, version = file.version.partition(" ")
        wanted: dict[str, str] = {"IfMatch": etag} | ({"VersionId": version} if version else {})
        key = self._prefix + name
        with self._translated(name):
            try:
                found = self._client.get_object(Bucket=self._bucket, Key=key, Range=f"bytes={start}-", **wanted)
            except self._client.exceptions.NoSuchKey as error:
                raise Changed from error
            with found["Body"] as body:
                span = f"bytes {start}-{file.bytes - 1}/{file.bytes}"
                if _version(found) != file.version or found.get("ContentRange", span) != span:
                    raise Changed
                if "ContentRange" not in found and start:
                    raise Broken("range", f"{name} came from its beginning, wanted from byte {start}")
                # As they come: a read of a whole part from a slow connection would see neither deadline nor shut-down,
                # and lose what came of it when the connection breaks.
                yield iter(lambda: body.read1(_PART_BYTES), b"")

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        """botocore's errors as ours; none of their texts is passed on, as they may quote what was sent."""
        from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError  # noqa: A004
        from botocore.parsers import ResponseParserError
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ClientError as error:
            raise self._refusal(error, name) from None
        except (ConnectionError, HTTPClientError, HTTPError) as error:
            raise Broken("connection", f"the connection for {name} broke ({type(error).__name__})") from None
        except (ResponseParserError, ValueError) as error:
            raise self._unavailable(
                "failed", f"an answer that is not S3's, {type(error).__name__}, for {name}"
            ) from None
        except BotoCoreError as error:
            raise self._unavailable("failed", f"{type(error).__name__} for {name}") from None

    def _refusal(self, error: Any, name: str) -> Exception:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code == "NoSuchBucket":
            return self._unavailable("missing", f"there is no bucket {self._bucket}")
        if status == 412:
            return Changed()
        if status == 404 or code in _MISSING:
            return FileNotFoundError(name)
        if status >= 500 or status in (408, 429) or code in ("SlowDown", "RequestTimeout", "Throttling"):
            return Broken("throttled" if status in (429, 503) else "server", f"status {status} for {name}")
        if status in (401, 403):
            return self._unavailable("forbidden", f"status {status} for {name}: its credentials may not read it")
        return self._unavailable("refused", f"status {status} for {name}")

    def _unavailable(self, kind: str, what: str) -> SlotcarError:
        return SourceUnavailable(f"cannot read {self.uri}: {what}", found=kind, wanted="files that may be read")


def _session(*, ambient: bool) -> Any:
    """A session of botocore; without `ambient` no variable, file or profile sets anything of it."""
    from botocore.session import Session

    if ambient:
        return Session()
    variables = {
        name: (None, None, default, convert) for name, (_, _, default, convert) in Session.SESSION_VARIABLES.items()
    }
    no_file = (None, None, os.devnull, None)
    session = Session(session_vars=variables | {"config_file": no_file, "credentials_file": no_file})
    session.register_component("data_loader", _loader())
    return session


@functools.cache
def _loader() -> Any:
    """Descriptions of services as botocore ships them, read once; the default one looks in the home, too."""
    from botocore.loaders import Loader

    return Loader(extra_search_paths=[Loader.BUILTIN_DATA_PATH], include_default_search_paths=False)


def _version(found: Any) -> str:
    etag, version = found.get("ETag"), found.get("VersionId")
    return f"{etag} {version}" if version and version != "null" else str(etag)
