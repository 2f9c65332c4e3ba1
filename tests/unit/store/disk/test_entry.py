"""An entry gives back every bit that it was given, or says how it is damaged."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slotcar_sidecar.store.disk.entry import (
    Damaged,
    entry_bytes,
    holds_pieces,
    pieces_of,
    read_adapter,
    read_entry,
    write_pieces,
)
from slotcar_sidecar.store.weights import HostWeights

from tests.fakes.stored import same, stored_weights

ADAPTER = stored_weights(1)
DIGEST = ADAPTER.adapter.digest


def write(path: Path, weights: HostWeights = ADAPTER) -> bytes:
    pieces = pieces_of(weights, 1000.0)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        write_pieces(descriptor, pieces)
        assert holds_pieces(descriptor, pieces)
        assert os.fstat(descriptor).st_size == entry_bytes(pieces)
    finally:
        os.close(descriptor)
    return path.read_bytes()


def read(path: Path, *, verify: bool = True) -> HostWeights:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert read_adapter(descriptor, DIGEST).digest == DIGEST
        return read_entry(descriptor, DIGEST, verify=verify)
    finally:
        os.close(descriptor)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "entry"


def test_every_bit_comes_back(path: Path) -> None:
    write(path)
    for verify in (True, False):
        assert same(ADAPTER, read(path, verify=verify))


def test_tensors_are_aligned(path: Path) -> None:
    write(path)
    assert all(tensor.data_ptr() % 8 == 0 for tensor in read(path).a.values())
    assert all(piece.start % 64 == 0 for piece in pieces_of(ADAPTER, 0.0))


def test_bytes_that_are_not_those_are_seen_when_read_back(path: Path) -> None:
    write(path)
    other = pieces_of(stored_weights(2), 1000.0)
    descriptor = os.open(path, os.O_RDONLY)
    assert not holds_pieces(descriptor, other)
    os.close(descriptor)


@settings(max_examples=300)
@given(st.data())
def test_no_flipped_bit_comes_through(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """But in the gaps between tensors, which nobody reads."""
    path = tmp_path_factory.getbasetemp() / "flipped"
    good = write(path)
    bad = bytearray(good)
    bit = data.draw(st.integers(0, 8 * len(good) - 1))
    bad[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bad)
    try:
        assert same(ADAPTER, read(path))
    except Damaged:
        return
    pieces = pieces_of(ADAPTER, 1000.0)
    assert not any(piece.start <= bit // 8 < piece.start + len(piece.data) for piece in pieces)


def test_no_cut_comes_through(path: Path) -> None:
    good = write(path)
    for size in (0, 1, 47, 48, 100, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(Damaged):
            read(path)


@pytest.mark.parametrize("length", [0, 1, 1 << 40, (1 << 64) - 1])
def test_a_length_that_cannot_be_takes_no_memory(path: Path, length: int) -> None:
    good = write(path)
    path.write_bytes(good[:8] + struct.pack("<Q", length) + good[16:])
    with pytest.raises(Damaged):
        read(path)


def test_the_entry_of_another_adapter_is_not_this_one(path: Path) -> None:
    write(path, stored_weights(2))
    with pytest.raises(Damaged, match="it is the entry of sha256:"):
        read(path)


@given(st.binary(max_size=300))
def test_whatever_lies_there_is_damaged(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "junk"
    path.write_bytes(junk)
    with pytest.raises(Damaged):
        read(path)
