"""A world of rings for each test, from which nothing may be left."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.unit.ring.world import MODEL, World, open_descriptors


@pytest_asyncio.fixture
async def world(modelless: World) -> World:
    modelless.cache.adopt_model(MODEL)
    return modelless


@pytest_asyncio.fixture
async def modelless(tmp_path: Path) -> AsyncIterator[World]:
    """A server that does not know its model yet."""
    gc.collect()  # what other tests left may have descriptors
    before = open_descriptors()
    made = World(tmp_path / "s.shm")
    yield made
    await made.close()
    made.cache.check_integrity()
    gc.collect()
    assert open_descriptors() == before
