"""An engine outside the container, whose every row is compared with what the adapter's files say."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import slotcar_client
import torch
from slotcar_client import BASE, Client, Session, SlotcarError

from tests.faults.oracle import Library
from tests.image.conftest import FEATURES, NAMES, SITE
from tests.waiting import eventually

COUNTS = (3, 1, 2)


def load(client: Client) -> None:
    """Loads the library's adapters, from where the container sees them."""
    for name in NAMES:
        client.load(name, Path("/adapters", name))


def forward_is_right(session: Session, library: Library, seed: int = 0) -> None:
    """Rows of both adapters and of the base model, mixed, are what the files of the adapters compute."""
    mapping = session.set_mapping([NAMES[0], BASE, NAMES[1]], load=True)
    rows_are_right(session, mapping.entry_digests, library, seed)


def rows_are_right(session: Session, digests: tuple[str, ...], library: Library, seed: int = 0) -> None:
    x = torch.randn(sum(COUNTS), FEATURES[0], generator=torch.Generator().manual_seed(seed))
    found = session.forward({SITE: x}, COUNTS)[SITE]
    assert library.wrong_rows(digests, COUNTS, SITE, x, found) == []


class Load:
    """An engine that computes without end in a thread, until its server refuses; what ended it is in `end`."""

    def __init__(self, target: str, plane: str, library: Library) -> None:
        self.answers = 0
        self.end: BaseException | None = None
        self._target, self._plane, self._library = target, plane, library
        self._thread = threading.Thread(target=self._run, name=f"load by {plane}")

    def _run(self) -> None:
        try:
            with slotcar_client.connect(self._target) as client, client.session(transport=self._plane) as session:
                mapping = session.set_mapping([NAMES[0], BASE, NAMES[1]], load=True)
                while True:
                    rows_are_right(session, mapping.entry_digests, self._library, self.answers)
                    self.answers += 1
        except (SlotcarError, AssertionError) as error:
            self.end = error

    def __enter__(self) -> Self:
        self._thread.start()
        eventually(lambda: self.answers > 10 or self.end, f"ten answers by {self._plane}")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._thread.join()
