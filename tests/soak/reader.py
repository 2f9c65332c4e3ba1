"""Reads what clients write while they run, has it checked, and deletes it, so that memory and disk stay bounded."""

from __future__ import annotations

import json
import shutil
import threading
from collections import deque
from pathlib import Path
from typing import Any

from tests.soak.checker import Checker, Finding
from tests.soak.records import Record, files, save, unpacked

_STEPS_KEPT = 5000
_DEAD_KEPT = 6
_MOST_FINDINGS = 50
_LOOK_SECONDS = 0.2


class Source:
    """The files of one client. `is_dead`: it writes no more, so that its last file is whole as far as it goes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_dead = False
        self.steps: deque[Any] = deque(maxlen=_STEPS_KEPT)


class Reader:
    """A thread that feeds a checker. Only `add`, `died`, `end` and `failed` are called by others."""

    def __init__(self, checker: Checker) -> None:
        self.checker = checker
        self._sources: list[Source] = []
        self._dead: deque[Source] = deque(maxlen=_DEAD_KEPT)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, folder: Path) -> None:
        """The folder of a new client."""
        with self._lock:
            self._sources.append(Source(folder))

    def died(self, folder: Path) -> None:
        for source in self._sources:
            if source.folder == folder:
                source.is_dead = True

    def end(self, seconds: float) -> None:
        """Reads to the end; every client is dead."""
        self._over.set()
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"the records were not checked in {seconds:g} s"
        self.check()

    def check(self) -> None:
        """Raises what the thread itself failed with."""
        if self._fault is not None:
            raise AssertionError("the checker itself failed") from self._fault

    @property
    def failed(self) -> bool:
        return bool(self.checker.findings) or self._fault is not None

    def _run(self) -> None:
        try:
            while True:
                over = self._over.wait(_LOOK_SECONDS)
                with self._lock:
                    sources = tuple(self._sources)
                for source in sources:
                    self._read(source)
                if over and not self._sources:
                    return
        except BaseException as error:
            self._fault = error

    def _read(self, source: Source) -> None:
        is_dead = source.is_dead
        found = files(source.folder)
        for path in found if is_dead else found[:-1]:
            records, left = unpacked(path.read_bytes())
            if left and path != found[-1]:
                why = f"{path.name} has {left} bytes that are no record"
                self.checker.findings.append(Finding(source.folder.name, why, ()))
            for record in records:
                self._check(source, record)
            path.unlink()
        if is_dead:
            with self._lock:
                self._sources.remove(source)
                self._dead.append(source)
            if not self.checker.findings:
                shutil.rmtree(source.folder)

    def _check(self, source: Source, record: Record) -> None:
        source.steps.append((record.kind, record.facts))
        if len(self.checker.findings) < _MOST_FINDINGS:
            self.checker.check(source.folder.name, record)

    def save(self, folder: Path) -> None:
        """What shows the findings: the failing records, and the last steps of each client."""
        records: dict[int, Record] = {}
        for finding in self.checker.findings:
            records |= {id(record): record for record in finding.records}
        save(folder / "failing.rec", records.values())
        whys = [f"{finding.client}: {finding.why}" for finding in self.checker.findings]
        (folder / "findings.txt").write_text("\n".join([*whys, ""]), encoding="utf-8")
        (folder / "steps").mkdir(exist_ok=True)
        for source in (*self._sources, *self._dead):
            lines = [json.dumps(step) for step in source.steps]
            path = folder / "steps" / f"{source.folder.name}.jsonl"
            path.write_text("\n".join([*lines, ""]), encoding="utf-8")
