"""A request's version is fixed and held before the engine's queue, whatever happens to its name meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from slotcar.v1 import adapter_pb2, adapter_service_pb2
from slotcar_client import effects
from slotcar_client.effects import Call, Effect, Plan
from slotcar_client.engines.vllm.admission import TRIES, Admission
from slotcar_client.engines.vllm.calls import run_blocking
from slotcar_client.engines.vllm.requests import Asked, engine_id
from slotcar_client.errors import AdapterConflict, AdapterNotFound, Unavailable

A, B, C = (f"sha256:{letter * 64}" for letter in "abc")


class World:
    """A sidecar that knows names, workers that hold what has a name, and the calls that both got.

    `before_hold` happens between the answer about a name and the hold; `sources` are the digests of what can be loaded.
    """

    def __init__(self, **names: str) -> None:
        self.names = names
        self.sources: dict[str, str] = {}
        self.calls: list[str] = []
        self.before_hold: list[Callable[[], Any]] = []

    def admission(self, held_versions: int = 4) -> Admission:
        return Admission(self._perform, self._hold, held_versions)

    async def _perform(self, plan: Plan[Any]) -> Any:
        return effects.run(plan, self._answer)

    def _answer(self, effect: Effect) -> Any:
        assert isinstance(effect, Call)
        request: Any = effect.request
        if isinstance(request, adapter_service_pb2.LoadAdapterRequest):
            self.calls.append(f"load {request.ref}")
            assert request.target_tier == adapter_pb2.TIER_HOST
            digest = self.sources[request.source]
            replace = request.on_conflict == adapter_service_pb2.ON_CONFLICT_REPLACE
            if self.names.get(request.ref, digest) != digest and not replace:
                raise AdapterConflict(request.ref)
            self.names[request.ref] = digest
            return adapter_service_pb2.LoadAdapterResponse(adapter=self._adapter(request.ref))
        self.calls.append(f"get {request.ref}")
        if request.ref not in self.names:
            raise AdapterNotFound(request.ref)
        return adapter_service_pb2.GetAdapterResponse(adapter=self._adapter(request.ref))

    def _adapter(self, name: str) -> adapter_pb2.Adapter:
        return adapter_pb2.Adapter(name=name, digest=self.names[name])

    async def _hold(self, version: str) -> None:
        self.calls.append(f"hold {version}")
        if self.before_hold:
            self.before_hold.pop(0)()
        name, _, digest = version.partition("@")
        if self.names.get(name) != digest:
            raise RuntimeError(f"Call to add_lora method failed: slotcar ADAPTER_NOT_FOUND: {version}")


async def test_a_version_is_held_once() -> None:
    world = World(sql=A)
    admission = world.admission()
    for _ in range(3):
        assert await admission.admit(Asked("sql")) == f"sql@{A}"
    assert world.calls == ["get sql", f"hold sql@{A}", "get sql", "get sql"]


async def test_a_fixed_version_is_not_asked_for_by_name() -> None:
    world = World(sql=A)
    assert await world.admission().admit(Asked(f"sql@{A}")) == f"sql@{A}"
    assert world.calls == [f"hold sql@{A}"]


async def test_a_replaced_name_gives_new_requests_the_new_version() -> None:
    world = World(sql=A)
    admission = world.admission()
    await admission.admit(Asked("sql"))
    world.names["sql"] = B
    assert await admission.admit(Asked("sql")) == f"sql@{B}"
    assert world.calls[2:] == ["get sql", f"hold sql@{B}"]


async def test_a_replace_before_the_hold_is_followed() -> None:
    world = World(sql=A)
    world.before_hold = [lambda: world.names.update(sql=B), lambda: world.names.update(sql=C)]
    assert await world.admission().admit(Asked("sql")) == f"sql@{C}"


async def test_a_name_that_comes_back_to_the_same_version_is_followed_too() -> None:
    world = World(sql=A)

    def away_and_back() -> None:
        world.names["sql"] = A
        raise AdapterNotFound(f"sql@{A} was gone")

    world.before_hold = [away_and_back]
    assert await world.admission().admit(Asked("sql")) == f"sql@{A}"
    assert world.calls == ["get sql", f"hold sql@{A}", "get sql", f"hold sql@{A}"]


async def test_a_name_that_never_rests_is_given_up() -> None:
    world = World(sql=A)

    def move() -> None:
        raise AdapterNotFound("moved")

    world.before_hold = [move] * 100
    with pytest.raises(AdapterNotFound, match="moved"):
        await world.admission().admit(Asked("sql"))
    assert world.calls.count(f"hold sql@{A}") == TRIES


async def test_a_fixed_version_that_is_gone_is_never_another_one() -> None:
    world = World(sql=B)
    with pytest.raises(RuntimeError, match="ADAPTER_NOT_FOUND"):
        await world.admission().admit(Asked(f"sql@{A}", by_name=False))


async def test_a_version_that_a_name_had_gives_way_to_the_one_that_it_has() -> None:
    world = World(sql=B)
    assert await world.admission().admit(Asked(f"sql@{A}")) == f"sql@{B}"
    assert world.calls == [f"hold sql@{A}", "get sql", f"hold sql@{B}"]


async def test_an_unload_before_the_hold_is_not_found() -> None:
    world = World(sql=A)
    world.before_hold = [world.names.clear]
    with pytest.raises(AdapterNotFound):
        await world.admission().admit(Asked("sql"))


async def test_a_hold_that_fails_for_another_reason_fails_the_request() -> None:
    world = World(sql=A)

    def fail() -> None:
        raise Unavailable("no sidecar")

    world.before_hold = [fail]
    admission = world.admission()
    with pytest.raises(Unavailable):
        await admission.admit(Asked("sql"))
    assert await admission.admit(Asked("sql")) == f"sql@{A}"


async def test_only_the_latest_versions_are_believed_to_be_held() -> None:
    world = World(a=A, b=A, c=A)
    admission = world.admission(held_versions=2)
    for name in ("a", "b", "a", "c"):
        await admission.admit(Asked(name))
    world.calls.clear()
    for name in ("a", "c", "b"):
        await admission.admit(Asked(name))
    assert [call for call in world.calls if call.startswith("hold")] == [f"hold b@{A}"]


async def test_anew_asks_the_workers_again() -> None:
    world = World(sql=A)
    admission = world.admission()
    await admission.admit(Asked("sql"))
    await admission.admit(Asked("sql"), anew=True)
    assert world.calls.count(f"hold sql@{A}") == 2


async def test_a_source_is_loaded_once_and_again_when_its_name_is_gone() -> None:
    world = World()
    world.sources["/x"] = A
    admission = world.admission()
    asked = Asked("sql", "/x")
    for _ in range(2):
        assert await admission.admit(asked) == f"sql@{A}"
    world.names.clear()
    assert await admission.admit(asked) == f"sql@{A}"
    assert world.calls == ["load sql", f"hold sql@{A}", "get sql", "get sql", "load sql"]


async def test_a_source_with_other_bytes_is_a_conflict_or_a_replace() -> None:
    world = World(sql=A)
    world.sources["/x"] = B
    admission = world.admission()
    with pytest.raises(AdapterConflict):
        await admission.admit(Asked("sql", "/x"))
    assert await admission.admit(Asked("sql", "/x", replace=True)) == f"sql@{B}"


async def test_requests_at_once_get_one_version() -> None:
    world = World(sql=A)
    admission = world.admission()
    found = await asyncio.gather(*(admission.admit(Asked("sql")) for _ in range(20)))
    assert set(found) == {f"sql@{A}"}


async def test_users_ids_are_translated_until_forgotten() -> None:
    world = World(sql=A)
    admission = world.admission()
    version = await admission.admit(Asked("sql"))
    admission.remember_id(7, version)
    assert admission.engine_id(7) == engine_id(version) == admission.engine_id(engine_id(version))
    assert admission.engine_id(8) == 8
    admission.forget(7)
    world.calls.clear()
    await admission.admit(Asked("sql"))
    assert f"hold {version}" in world.calls


def test_the_blocking_face_runs_the_same_coroutine() -> None:
    world = World(sql=A)
    assert run_blocking(world.admission().admit(Asked("sql"))) == f"sql@{A}"
    with pytest.raises(AdapterNotFound):
        run_blocking(world.admission().admit(Asked("chat")))


def test_a_coroutine_that_waits_is_not_for_the_blocking_face() -> None:
    with pytest.raises(AssertionError, match="suspended"):
        run_blocking(asyncio.sleep(0))
