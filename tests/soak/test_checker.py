"""The checker of the soak is not blind: each kind of wrong record is found, alone, and a right one never is."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slotcar.v1 import engine_service_pb2 as pb
from slotcar.v1 import layout_pb2, tensor_pb2

from tests.faults.oracle import Library
from tests.soak.actor import Versions
from tests.soak.checker import Checker
from tests.soak.forwards import Asked, Known, ask
from tests.soak.library import write_library
from tests.soak.plan import SITES, Plan, Pools
from tests.soak.records import Journal, Record, files, load, save, unpacked
from tests.soak.slope import least, slope

COUNTS = (3, 2, 4)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return write_library(tmp_path_factory.mktemp("soak"), seed=1)


@pytest.fixture(scope="module")
def pools() -> Pools:
    return Pools.make(1)


@pytest.fixture
def digests(library: Library) -> tuple[str, str, str]:
    """Two adapters with weights at every site of `one_forward`, and the base model between them."""
    whole = [digest for digest, parts in library.parts.items() if {"attn.q", "attn.v"} <= parts.keys()]
    return whole[0], "", whole[1]


def mapped(digests: tuple[str, ...], **changes: Any) -> Record:
    facts = {"epoch": "e", "session": "s", "mapping_id": 1, "generation": 7, "digests": list(digests)}
    facts |= {"refs": ["a" if digest else "" for digest in digests], "answer_epoch": "e", "answer_generation": 8}
    return Record("map", facts | changes)


def answered(library: Library, pools: Pools, digests: tuple[str, ...], **changes: Any) -> Record:
    """What a Forward of q, and of v added to its base, answers when `digests` compute it."""
    start, rows = 5, sum(COUNTS)
    payload = b""
    for site, is_added in (("attn.q", False), ("attn.v", True)):
        inputs, outputs = SITES[site]
        x = torch.from_numpy(pools.x[start : start + rows, :inputs])
        base = torch.from_numpy(pools.base[start : start + rows, :outputs])
        out = (library.rows(digests, COUNTS, site, x) + base.double() * is_added).float()
        payload += out.numpy().tobytes()
    facts = {"epoch": "e", "session": "s", "mapping_id": 1, "generation": 7, "digests": list(digests)}
    facts |= {"counts": list(COUNTS), "x": start, "dtype": "float32", "plane": "unary"}
    facts |= {"items": [["attn.q", False], ["attn.v", True]], "answer_epoch": "e", "answer_generation": 9}
    return Record("forward", facts | changes, payload)


def findings(library: Library, pools: Pools, *records: Record) -> list[str]:
    """What a checker finds in records that were written and read again."""
    checker = Checker(library, pools)
    for record in records:
        read, left = unpacked(record.packed())
        assert not left
        checker.check("c1", read[0])
    return [finding.why for finding in checker.findings]


def test_a_right_record_is_right(library: Library, pools: Pools, digests: tuple[str, str, str]) -> None:
    records = [mapped(digests), answered(library, pools, digests)]
    checker = Checker(library, pools)
    for record in records:
        checker.check("c1", record)
    assert not checker.findings
    assert (checker.tally.rows, checker.tally.base_rows, checker.tally.wrong_rows) == (18, 4, 0)


Corrupt = Callable[[Library, Pools, tuple[str, str, str]], Record]


def of_another_adapter(library: Library, pools: Pools, digests: tuple[str, str, str]) -> Record:
    """One row is the other adapter's."""
    right, wrong = (answered(library, pools, order) for order in (digests, digests[::-1]))
    width = 4 * SITES["attn.q"][1]
    return right._replace(payload=wrong.payload[:width] + right.payload[width:])


def of_a_base_row(library: Library, pools: Pools, digests: tuple[str, str, str]) -> Record:
    """The last bit of a BASE row."""
    record = answered(library, pools, digests)
    payload = bytearray(record.payload)
    payload[4 * SITES["attn.q"][1] * COUNTS[0]] ^= 1
    return record._replace(payload=bytes(payload))


def of_an_added_base_row(library: Library, pools: Pools, digests: tuple[str, str, str]) -> Record:
    record = answered(library, pools, digests)
    payload = bytearray(record.payload)
    at = 4 * (SITES["attn.q"][1] * sum(COUNTS) + SITES["attn.v"][1] * COUNTS[0])
    payload[at] ^= 1
    return record._replace(payload=bytes(payload))


def with_other_digests(library: Library, pools: Pools, digests: tuple[str, str, str]) -> Record:
    """Computed with what it reports, which is not what SetMapping said."""
    return answered(library, pools, digests[::-1])


def too_short(library: Library, pools: Pools, digests: tuple[str, str, str]) -> Record:
    record = answered(library, pools, digests)
    return record._replace(payload=record.payload[:-1])


CORRUPTIONS = [
    (of_another_adapter, "rows [0] of"),
    (of_a_base_row, "attn.q: rows [3] of"),
    (of_an_added_base_row, "attn.v: rows [3] of"),
    (with_other_digests, "other digests than SetMapping"),
    (too_short, "bytes, not"),
]


@pytest.mark.parametrize(("corrupt", "why"), CORRUPTIONS, ids=[corrupt.__name__ for corrupt, _ in CORRUPTIONS])
def test_a_corrupted_forward_is_found(
    library: Library, pools: Pools, digests: tuple[str, str, str], corrupt: Corrupt, why: str
) -> None:
    (found,) = findings(library, pools, mapped(digests), corrupt(library, pools, digests))
    assert why in found


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"answer_epoch": "other"}, "another epoch"),
        ({"epoch": "other", "answer_epoch": "other"}, "never made"),
        ({"generation": 8}, "never made"),
        ({"session": "other"}, "never made"),
        ({"answer_generation": 6}, "older than its mapping"),
    ],
)
def test_a_forward_of_another_time_is_found(
    library: Library, pools: Pools, digests: tuple[str, str, str], changes: dict[str, Any], why: str
) -> None:
    (found,) = findings(library, pools, mapped(digests), answered(library, pools, digests, **changes))
    assert why in found


def test_wrong_mappings_are_found(library: Library, pools: Pools, digests: tuple[str, str, str]) -> None:
    a, base, b = digests
    assert "two mappings" in findings(library, pools, mapped(digests), mapped((b, base, a)))[0]
    assert "another epoch" in findings(library, pools, mapped(digests, answer_epoch="other"))[0]
    assert "newer than its answer" in findings(library, pools, mapped(digests, answer_generation=6))[0]
    assert "one digest per entry" in findings(library, pools, mapped(digests, refs=["a", ""]))[0]
    assert "a became BASE" in findings(library, pools, mapped((base, base, b), refs=["a", "", "b"]))[0]
    assert "BASE became" in findings(library, pools, mapped(digests, refs=["", "", "b"]))[0]
    assert f"became {a}" in findings(library, pools, mapped(digests, refs=[f"a@{b}", "", "b"]))[0]
    assert "nobody wrote" in findings(library, pools, mapped(("sha256:0", base, b)))[0]


def test_what_a_client_found_itself_is_a_finding(library: Library, pools: Pools) -> None:
    assert findings(library, pools, Record("fault", {"why": "a generation went back"})) == ["a generation went back"]


def test_versions_never_go_back() -> None:
    versions = Versions()

    def version(epoch: str, generation: int) -> layout_pb2.LayoutVersion:
        return layout_pb2.LayoutVersion(epoch=epoch, generation=generation)

    first = versions.floor()
    assert not versions.fault(version("e", 5), first)
    # This call was sent before the other was answered.
    assert not versions.fault(version("e", 4), first)
    assert "generation 4 came after 5" in versions.fault(version("e", 4), versions.floor())
    before = versions.floor()
    assert not versions.fault(version("f", 1), before)
    # An answer of the old server that was under way.
    assert not versions.fault(version("e", 6), before)
    assert "epoch e came back after f" in versions.fault(version("e", 7), versions.floor())


def test_a_journal_ends_with_its_last_whole_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    lengths = []
    for number in range(3):
        journal.append("step", {"verb": "v", "result": "OK", "number": number}, bytes(10))
        (path,) = files(tmp_path)
        lengths.append(path.stat().st_size)
    data = path.read_bytes()
    records, left = unpacked(data[:-1])
    assert [record.facts["number"] for record in records] == [0, 1]
    assert left == lengths[2] - lengths[1] - 1
    save(tmp_path / "saved", records)
    assert list(load(tmp_path / "saved")) == records


def test_choices_follow_from_the_seed_alone(pools: Pools) -> None:
    known = Known("e", "s", 1, 7, ("sha256:a", "", "sha256:b"))
    asked = [[ask(made, pools, known, 0) for _ in range(20)] for made in (random.Random("1"), random.Random("1"))]
    assert asked[0] == asked[1]


def test_a_record_of_an_answer_can_be_recomputed(library: Library, pools: Pools, digests: tuple[str, ...]) -> None:
    """From a request as it travels to its record as it is read: nothing is lost, whatever was asked."""
    generator = random.Random("2")
    known = Known("e", "s", 1, 7, digests)
    for _ in range(40):
        asked = ask(generator, pools, known, 0)
        answer = computed(library, asked, digests)
        assert asked.fault(answer) == ""
        record = Record("forward", *asked.record(answer, "unary"))
        facts = json.loads(json.dumps(record.facts))
        assert findings(library, pools, mapped(digests), Record("forward", facts, record.payload)) == []


def computed(library: Library, asked: Asked, digests: tuple[str, ...]) -> pb.ForwardResponse:
    """What the reference answers to a request, from the bytes in it."""
    answer = pb.ForwardResponse(layout=layout_pb2.LayoutVersion(epoch="e", generation=9), digests=digests)
    x = torch.empty(0)
    for item in asked.request.items:
        x = tensor(item.x) if item.HasField("x") else x
        out = library.rows(digests, list(asked.request.row_counts), item.site, x)
        if item.mode == pb.FORWARD_MODE_ADD:
            out += tensor(item.base).double()
        data = out.to(x.dtype).numpy().tobytes()
        dtype = asked.request.items[0].x.dtype
        answer.outputs.add(dtype=dtype, rows=out.shape[0], columns=out.shape[1], inline=data)
    return answer


def tensor(ref: tensor_pb2.TensorRef) -> torch.Tensor:
    dtype = torch.float16 if ref.dtype == tensor_pb2.DTYPE_FLOAT16 else torch.float32
    flat = torch.frombuffer(bytearray(ref.inline), dtype=dtype) if ref.rows else torch.empty(0, dtype=dtype)
    return flat.reshape(ref.rows, ref.columns)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = Plan(seed=7, seconds=3.0, server_death_gap=(1.0, 2.0))
    plan.write(tmp_path)
    assert Plan.read(tmp_path) == plan


def test_slope_is_percent_per_ten_minutes() -> None:
    found = slope([(float(at), 1000 + at) for at in range(0, 601, 10)])
    assert found is not None
    assert (round(found.percent, 2), found.seconds) == (46.15, 600.0)
    assert slope([(1.0, 5), (2.0, 5)]) is None


def test_what_is_in_flight_is_no_growth_and_what_stays_is() -> None:
    busy = [(float(at), 1000 + (500 if at % 20 else 0) * (at > 300)) for at in range(0, 600, 5)]
    calm, growing = slope(least(busy, 20.0)), slope(least([(at, size + int(at / 10)) for at, size in busy], 20.0))
    assert calm is not None
    assert calm.percent == 0.0
    assert growing is not None
    assert growing.percent == pytest.approx(100 * 60 / 1030, rel=0.05)
