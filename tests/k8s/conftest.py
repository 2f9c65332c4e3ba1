"""Fixtures: `webhook` is one real injector for a whole file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.k8s.cluster import Webhook, running


@pytest.fixture(scope="module")
def webhook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Webhook]:
    with running(tmp_path_factory.mktemp("webhook")) as started:
        yield started
