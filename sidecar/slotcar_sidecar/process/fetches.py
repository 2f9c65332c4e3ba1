"""Builds the sources that the settings allow, with the clock and the randomness of this process."""

from __future__ import annotations

import secrets
import threading
import time

from slotcar_sidecar.config import Config, environment_value
from slotcar_sidecar.ops.metrics import Metrics
from slotcar_sidecar.process.sockets import StartError
from slotcar_sidecar.store.base_model import BaseModel
from slotcar_sidecar.store.sources.fetch import Fetching
from slotcar_sidecar.store.sources.local import LocalSource
from slotcar_sidecar.store.sources.options import OptionsInvalid, parse_options
from slotcar_sidecar.store.sources.remotes import Settings, make_remote
from slotcar_sidecar.store.sources.router import Sources
from slotcar_sidecar.store.sources.rules import RuleInvalid

__all__ = ["make_sources"]


def make_sources(config: Config, base: BaseModel | None, metrics: Metrics, stop: threading.Event) -> Sources:
    """What the settings allow to be read. Raises StartError."""
    rate, random = config.fetch_rate, secrets.SystemRandom().random
    fetching = Fetching(config.fetch_seconds, rate, time.monotonic, random, stop, metrics)
    try:
        text = config.source_options.read_bytes() if config.source_options is not None else b"{}"
        options = parse_options(text, environment_value)
        remote = make_remote(Settings(config.source, options, config.hf_cache, config.offline), fetching)
    except RuleInvalid as error:
        raise StartError(f"--source {' '.join(config.source)} cannot be used: wanted {error}") from error
    except (OptionsInvalid, OSError) as error:
        raise StartError(f"--source-options {config.source_options} cannot be used: {error}") from error
    local = LocalSource(config.root, config.max_adapter_bytes, base)
    return Sources(local, remote, config.max_adapter_bytes, base)
