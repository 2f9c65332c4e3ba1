"""Starts the log and the audit stream that the settings ask for, and puts their files in force anew."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slotcar_sidecar.config import Config
from slotcar_sidecar.core.errors import SlotcarError
from slotcar_sidecar.ops import audit, logs
from slotcar_sidecar.ops.metrics import Metrics
from slotcar_sidecar.process.lines import AppendedFile, Descriptor, Lines, open_appended
from slotcar_sidecar.process.reload import Reloads
from slotcar_sidecar.process.sockets import StartError
from slotcar_sidecar.sync.file import contents

__all__ = ["Output", "start"]

_log = logging.getLogger("slotcar")

_STANDARD_ERROR = 2
_MOST_LEVEL_BYTES = 64


@dataclass(frozen=True, slots=True)
class Output:
    """Where lines go; `audit` is None where the audit stream is part of the log."""

    log: Lines
    audit: Lines | None = None
    audit_file: AppendedFile | None = None

    def observe(self, metrics: Metrics) -> None:
        """Counts the lines that are lost."""
        self.log.observe(metrics.log_lost)
        if self.audit is not None:
            self.audit.observe(metrics.audit_lost)

    def follow(self, config: Config, reloads: Reloads) -> None:
        """Takes the level from its file when that changes, and the audit log's path when it is another file."""
        if (file := config.log_level_file) is not None:
            reloads.add("log level", lambda: (file,), lambda: logs.set_level(_level_in(file)))
            with contextlib.suppress(OSError):  # it may have changed since the start
                logs.set_level(_level_in(file))
        if (path := config.audit_log) is not None:
            reloads.add("audit log", _no_files, lambda: self._reopen(path))

    def _reopen(self, path: Path) -> None:
        """Raises OSError; then the file of before goes on."""
        assert self.audit is not None
        assert self.audit_file is not None
        file, descriptor = self.audit_file, open_appended(path)
        try:
            self.audit.after_lines(lambda: file.go_on_in(descriptor))
        except OSError:
            os.close(descriptor)
            raise


def start(config: Config) -> Output:
    """Raises StartError."""
    log = Lines(Descriptor(_STANDARD_ERROR), "log")
    logs.configure(log, config.log_format, config.log_level)
    if config.log_level_file is not None:
        try:
            logs.set_level(_level_in(config.log_level_file))
        except OSError as error:
            raise StartError(f"--log-level-file {config.log_level_file} cannot be used: {error}") from error
    if config.audit_log is None:
        audit.configure(None)
        return Output(log)
    try:
        file = AppendedFile(config.audit_log, _tell_failure)
    except OSError as error:
        raise StartError(f"--audit-log {config.audit_log} cannot be written: {error.strerror}") from error
    lines = Lines(file, "audit")
    audit.configure(lines)
    return Output(log, lines, file)


def _tell_failure(error: OSError) -> None:
    """In the thread that writes the audit log."""
    _log.error("the audit log cannot be written", extra={"fields": {"reason": error.strerror}})


def _no_files() -> Iterable[Path]:
    """Whoever rotates the log says so with SIGHUP: the file itself changes with each line."""
    return ()


def _level_in(file: Path) -> str:
    """The one word in a file. Raises OSError."""
    try:
        found = contents(file, _MOST_LEVEL_BYTES).decode("utf-8", "replace").strip()
    except SlotcarError as error:
        raise OSError(error.message) from error
    if found not in logs.LEVELS:
        raise OSError(f"{file} has {found!r}: wanted {', '.join(logs.LEVELS)}")
    return found
