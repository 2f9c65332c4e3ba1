"""vllm#47724 over a real socket: slots change while others decode, and each row is recomputed offline.

An adapter load takes a slot, is undone and done again, a server dies: a Forward for slots that changed is refused, or
pins kept them from changing. Every output is compared, row by row, with the adapter's files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
import slotcar_client
import torch
from slotcar.v1 import error_pb2
from slotcar_client import BASE, Client, Session
from slotcar_client.engines.transformers import model_spec

from tests.adapters import make_adapter, tiny_llama
from tests.faults.oracle import Library, spec_file
from tests.faults.raw import RawEngine, array, refusal
from tests.faults.watching import watching
from tests.server import SidecarProcess
from tests.waiting import eventually

SITES = {site.name: (site.in_features, site.out_features) for site in model_spec(tiny_llama()).sites}
LAYER = "model.layers.{}.{}"
SHARED = ("self_attn.q_proj", "self_attn.v_proj"), ("self_attn.o_proj",), ("mlp.down_proj",)
"""The sites of a layer that one call of a decode step carries."""

A, B, C = "a", "b", "c"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Three adapters of PEFT that differ in rank, scale and sites; C has only sites that A and B have not all."""
    library = Library(tmp_path_factory.mktemp("adapters"), SITES)
    model = tiny_llama()
    make_adapter(library.root / A, model, seed=1, r=4, target_modules="all-linear")
    make_adapter(library.root / B, model, seed=2, r=16, target_modules=["q_proj", "v_proj", "o_proj"])
    make_adapter(library.root / C, model, seed=3, r=8, use_rslora=True, target_modules=["v_proj", "down_proj"])
    return library


@pytest.fixture(scope="module")
def digests(library: Library) -> dict[str, str]:
    return {name: library.add(library.root / name) for name in (A, B, C)}


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory, library: Library) -> Iterator[SidecarProcess]:
    """Two slots."""
    folder = tmp_path_factory.mktemp("s")
    with SidecarProcess(folder, library.root, extra=("--model-spec", str(spec_file(folder, SITES)))) as sidecar:
        yield sidecar


@pytest.fixture
def client(sidecar: SidecarProcess, library: Library) -> Iterator[Client]:
    """A client of the sidecar, whose two slots have A and B."""
    if sidecar.process is None or sidecar.process.poll() is not None:
        sidecar.start()
    with slotcar_client.connect(sidecar.target) as client:
        for adapter in client.list():
            client.unload(adapter.name, force=True)
        for name in (A, B):
            client.load(name, library.root / name)
        yield client


class Decoder:
    """An engine in the middle of its work: each step is a Forward per group of sites, and no wrong row passes."""

    def __init__(self, session: Session, library: Library) -> None:
        self.session = session
        self.library = library
        self.steps = 0
        self._generator = torch.Generator().manual_seed(7)

    def step(self, mapping: slotcar_client.Mapping | None = None) -> None:
        """One step with the session's last mapping, or `mapping`."""
        self.steps += 1
        wanted = mapping or self.session.mapping
        assert wanted is not None
        assert wanted.row_counts is not None
        for layer in range(2):
            for group in SHARED:
                sites = [LAYER.format(layer, site) for site in group]
                x = torch.randn(sum(wanted.row_counts), SITES[sites[0]][0], generator=self._generator)
                found = self.session.forward(dict.fromkeys(sites, x), mapping=mapping)
                for site in sites:
                    self.check(wanted.entry_digests, wanted.row_counts, site, x, found[site])

    def check(
        self, digests: Sequence[str], counts: Sequence[int], site: str, x: torch.Tensor, found: torch.Tensor
    ) -> None:
        wrong = self.library.wrong_rows(digests, counts, site, x, found)
        assert not wrong, f"step {self.steps}, {site}: rows {wrong} are not those of {digests}"


class LoadFromOutside:
    """`slotcar load` in a process of its own."""

    def __init__(self, sidecar: SidecarProcess, name: str, source: Path, *options: str) -> None:
        command = [sys.executable, "-m", "slotcar_sidecar", "load", name, str(source), "--json", *options]
        environment = os.environ | {"SLOTCAR_TARGET": sidecar.target}
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def result(self) -> tuple[int, dict[str, object]]:
        """Its exit code, and what it printed."""
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, json.loads(out)


def test_the_truth_tells_the_adapters_apart(library: Library, digests: dict[str, str]) -> None:
    """No comparison below could see a swap otherwise. To see it fail: give two adapters one seed, rank and sites."""
    site = LAYER.format(0, "self_attn.v_proj")
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    for mine in digests.values():
        found = library.rows([mine], [2], site, x).float()
        assert library.wrong_rows([mine], [2], site, x, found) == []
        for other in {"", *digests.values()} - {mine}:
            assert library.wrong_rows([other], [2], site, x, found) == [0, 1]


def test_a_load_from_outside_never_reaches_rows_that_decode(
    client: Client, sidecar: SidecarProcess, library: Library, digests: dict[str, str]
) -> None:
    with client.session("engine") as session, watching(client) as events:
        decoder = Decoder(session, library)
        both = session.set_mapping([(A, 2), (BASE, 1), (B, 3), (A, 1)])
        for _ in range(3):
            decoder.step()

        # Both are in use: the load is refused, and the layout is what it was.
        before = client.snapshot().layout
        outside = LoadFromOutside(sidecar, C, library.root / C)
        while outside.running:
            decoder.step()
        code, printed = outside.result()
        assert (code, printed["error"]["reason"]) == (1, "SLOTS_EXHAUSTED")  # type: ignore[index]
        assert client.snapshot().layout == before
        assert "pinned" in events.wait("refused", name=C).reason
        decoder.step()

        slot_of_b = client.get(B).slot
        # B's user is done: C takes its slot, from another process, while A decodes.
        session.set_mapping([(A, 2)])
        outside = LoadFromOutside(sidecar, C, library.root / C)
        while outside.running:
            decoder.step()
        code, printed = outside.result()
        assert (code, printed["digest"]) == (0, digests[C])
        assert events.wait("evicted").digest == digests[B]
        assert events.wait("loaded").slot == slot_of_b
        decoder.step()

        # The old batch comes back: refused, for B's rows would be C's now.
        with pytest.raises(slotcar_client.MappingNotFound):
            session.forward({LAYER.format(0, "self_attn.q_proj"): torch.ones(7, 64)}, mapping=both)
        with pytest.raises(slotcar_client.AdapterNotResident, match="b"):
            session.set_mapping([(A, 2), (B, 3)])
        client.load(B)
        assert events.wait("evicted").digest == digests[C]
        session.set_mapping([(A, 2), (B, 3)])
        decoder.step()
        assert session.recoveries == {}


@pytest.mark.parametrize("taker", [C, A], ids=["other bytes", "the same bytes again"])
def test_an_engine_that_ignores_everything_is_refused(
    client: Client, sidecar: SidecarProcess, library: Library, digests: dict[str, str], taker: str
) -> None:
    """A, unloaded by force, C in its slot, and perhaps A again: digest and slot are as before, the bytes were not.

    To see it fail, with the same bytes again: compare digests instead of mod_generation in Mapping.check_current.
    """
    site = LAYER.format(1, "self_attn.v_proj")
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    with RawEngine(sidecar.target) as engine:
        engine.open()
        old = engine.map(A, "")
        request = engine.request(old.generation, [2, 1], {site: x.numpy()})
        answer = engine.forward(request)
        assert list(answer.digests) == [digests[A], ""]
        first = torch.from_numpy(array(answer.outputs[0]))
        assert library.wrong_rows(answer.digests, [2, 1], site, x, first) == []

        assert client.unload(A, force=True).pins_ended == 1
        client.load(C, library.root / C)
        assert client.get(C).slot == old.entries[0].slot
        if taker == A:
            client.unload(C)
            client.load(A, library.root / A)
            assert (client.get(A).slot, client.get(A).digest) == (old.entries[0].slot, old.entries[0].digest)

        with pytest.raises(grpc.RpcError) as caught:
            engine.forward(request)
        found = refusal(caught.value)
        assert (found.code, found.reason) == (grpc.StatusCode.ABORTED, "LAYOUT_STALE")
        assert found.facts["entries"] == f"{A}@{digests[A]}"
        newest = client.snapshot().layout.version.generation
        guesses = [engine.request(guess, [2, 1], {site: x.numpy()}) for guess in range(newest + 2)]
        for refused in engine.streamed(request, *guesses):
            assert refused.error.reason == error_pb2.ERROR_REASON_LAYOUT_STALE, refused
        if taker == A:
            again = engine.map(f"{A}@{digests[A]}", "")
            assert again.generation > old.generation
            answer = engine.forward(engine.request(again.generation, [2, 1], {site: x.numpy()}))
            assert torch.equal(torch.from_numpy(array(answer.outputs[0])), first)


def test_a_session_comes_back_by_digest_after_a_c_a(client: Client, library: Library, digests: dict[str, str]) -> None:
    with client.session("engine") as session:
        decoder = Decoder(session, library)
        session.set_mapping([(B, 1), (A, 2)])
        decoder.step()
        client.unload(A, force=True)
        client.load(C, library.root / C)
        with pytest.raises(slotcar_client.AdapterNotFound, match=digests[A]):
            decoder.step()
        client.unload(C)
        client.load(A, library.root / A)
        decoder.step()
        assert session.recoveries == {"LAYOUT_STALE": 2}


def test_a_name_with_new_bytes_goes_on_with_the_old_until_its_release(
    client: Client, library: Library, digests: dict[str, str], tmp_path: Path
) -> None:
    """The new bytes are written over the old folder: whoever mapped before keeps the old, whoever maps now has the new.

    To see it fail: let Session._remap send the bare names, or Residency.bind free the slot of the digest before.
    """
    client.unload(B)
    folder = library.root / "moving"
    old = library.write("moving", seed=11, sites=[LAYER.format(layer, "self_attn.q_proj") for layer in range(2)])
    assert client.load("moving", folder).digest == old
    client.unload(A)
    with client.session("old") as before, client.session("new") as after, watching(client) as events:
        mappings = [before.set_mapping([("moving", 2), (BASE, 1)])]
        decoders = [Decoder(before, library)]
        decoders[0].step()
        new = library.write("moving", seed=12, sites=[LAYER.format(layer, "self_attn.o_proj") for layer in range(2)])
        with pytest.raises(slotcar_client.AdapterConflict):
            client.load("moving", folder)
        assert client.load("moving", folder, replace=True).digest == new
        assert events.wait("replaced").digest == new
        draining = events.wait("draining")
        assert draining.digest == old
        mappings.append(after.set_mapping([("moving", 2), (BASE, 1)]))
        decoders.append(Decoder(after, library))
        assert [mapping.entry_digests for mapping in mappings] == [(old, ""), (new, "")]
        states = {slot.digest: slot.state for slot in client.snapshot().layout.slots}
        assert states == {old: "draining", new: "occupied"}
        for _ in range(3):
            for decoder in decoders:
                decoder.step()
        # By its digest the old one can be mapped where it is pinned, and nowhere else.
        before.set_mapping([(f"moving@{old}", 1), ("moving", 1)])
        decoders[0].step()
        with pytest.raises(slotcar_client.AdapterNotFound):
            after.set_mapping([(f"moving@{old}", 1)], mapping_id=7)
        with pytest.raises(slotcar_client.SlotsExhausted):
            client.load(C, library.root / C)
        before.release_mapping()
        freed = events.wait("freed")
        assert (freed.digest, freed.slot) == (old, draining.slot)
        client.load(C, library.root / C)
        assert client.get(C).slot == draining.slot
        after.set_mapping([("moving", 2), (C, 2)])
        decoders[1].step()
        assert before.recoveries == after.recoveries == {}


def test_a_killed_server_comes_back_as_another_epoch(
    client: Client, sidecar: SidecarProcess, library: Library, digests: dict[str, str]
) -> None:
    """kill -9 in mid-decode, the same socket again: nothing old is accepted, and the bytes are the old ones or none."""
    site = LAYER.format(0, "self_attn.v_proj")
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    with client.session("engine") as session, RawEngine(sidecar.target) as old:
        old.open()
        late = old.request(old.map(A, B).generation, [1, 1], {site: x.numpy()})
        old.forward(late)
        decoder = Decoder(session, library)
        session.set_mapping([(A, 2), (BASE, 1), (B, 2)])
        epoch = session.layout.version.epoch
        ends: list[slotcar_client.SlotcarError] = []
        decoding = threading.Event()

        def decode() -> None:
            try:
                while True:
                    decoder.step()
                    decoding.set()
            except slotcar_client.SlotcarError as error:
                ends.append(error)

        thread = threading.Thread(target=decode)
        thread.start()
        assert decoding.wait(30)
        sidecar.kill()
        thread.join(30)
        assert [type(error) for error in ends] == [slotcar_client.Unavailable], "no call may hang, or be served as base"

        sidecar.start()
        eventually(lambda: _answers(client), "the client's channel to the new server")
        snapshot = client.snapshot()
        assert snapshot.layout.version.epoch != epoch
        with RawEngine(sidecar.target) as raw:
            for resume in (False, True):
                with pytest.raises(grpc.RpcError) as caught:
                    raw.open(resume=old.session) if resume else raw.forward(late)
                assert refusal(caught.value)[:2] == (grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND")

        # Other bytes under the name are not what was mapped.
        client.load(A, library.root / C)
        client.load(B, library.root / B)
        for _ in range(2):
            with pytest.raises(slotcar_client.AdapterNotFound, match=f"{A}@{digests[A]}"):
                decoder.step()
        client.load(A, library.root / A, replace=True)
        client.load(B, library.root / B)  # a replace loads the new bytes beside the old, in the other slot
        decoder.step()
        assert session.layout.version.epoch == snapshot.layout.version.epoch
        assert session.recoveries["SESSION_NOT_FOUND"] == 1
        assert {adapter.name: adapter.pins for adapter in client.list()} == {A: 1, B: 1}


def _answers(client: Client) -> bool:
    try:
        client.list()
    except slotcar_client.Unavailable:
        return False
    return True
