"""Opens remote places by scheme, each with the options that the operator gave for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from slotcar_sidecar.core.errors import SourceDenied
from slotcar_sidecar.store.sources.fetch import Fetching, Place
from slotcar_sidecar.store.sources.filesystem import FilesystemPlace
from slotcar_sidecar.store.sources.hub import HubPlace
from slotcar_sidecar.store.sources.options import Options, options_for
from slotcar_sidecar.store.sources.router import Remote
from slotcar_sidecar.store.sources.rules import HUB, Target, parse_rule
from slotcar_sidecar.store.sources.s3 import S3Buckets

__all__ = ["Settings", "make_remote"]


class Settings(NamedTuple):
    """What the operator said: prefixes that are allowed, options, the hub's cache, and whether there is a network."""

    rules: Sequence[str]
    options: tuple[Options, ...]
    hub_cache: Path
    offline: bool


def make_remote(settings: Settings, fetching: Fetching) -> Remote:
    """Raises RuleInvalid."""
    rules = tuple(parse_rule(text) for text in settings.rules)
    return Remote(rules, _opener(settings), fetching)


def _opener(settings: Settings) -> Callable[[Target], Place]:
    def open_place(target: Target) -> Place:
        options = options_for(target, settings.options)
        if target.scheme == HUB:
            return HubPlace(target, settings.hub_cache, options, offline=settings.offline)
        if settings.offline:
            raise SourceDenied(
                f"{target} is on a network, and the server is --offline", found=target.scheme, wanted="no --offline"
            )
        return S3Buckets(options).open(target) if target.scheme == "s3" else FilesystemPlace(target, options)

    return open_place
