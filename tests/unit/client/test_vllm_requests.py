"""What a LoRARequest asks for, and the ids of versions; how failures travel as text. Nothing here imports vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import pytest
from slotcar_client.engines.vllm import failures
from slotcar_client.engines.vllm.requests import Asked, asked_by, engine_id, plain_name, version_ref
from slotcar_client.errors import (
    BY_REASON,
    AdapterNotFound,
    DeadlineExceeded,
    InternalError,
    RequestInvalid,
    SlotcarError,
    SlotsExhausted,
    SourceDenied,
    Unavailable,
)

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


@dataclass
class Request:
    """The fields of vLLM's LoRARequest that count."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


@pytest.mark.parametrize(
    ("name", "path", "wanted"),
    [
        ("sql", "slotcar:sql", Asked("sql")),
        ("sql", "slotcar:", Asked("sql")),
        ("mine", "slotcar:sql", Asked("sql")),
        ("sql", f"slotcar:sql~{A}", Asked(f"sql@{A}")),
        ("sql", f"slotcar:sql@{A}", Asked(f"sql@{A}", by_name=False)),
        (f"sql@{A}", "slotcar:", Asked(f"sql@{A}", by_name=False)),
        ("sql", "/adapters/sql", Asked("sql", "/adapters/sql")),
        ("sql", "hf://org/sql@main", Asked("sql", "hf://org/sql@main")),
    ],
)
def test_the_path_says_what_is_asked_for(name: str, path: str, wanted: Asked) -> None:
    request: Any = Request(name, path)
    assert asked_by(request) == wanted
    assert wanted.name == "sql"
    assert wanted.fixed is ("@sha256:" in wanted.ref)


def test_load_inplace_replaces_only_what_has_a_source() -> None:
    with_source: Any = Request("sql", "/adapters/sql", load_inplace=True)
    without: Any = Request("sql", "slotcar:sql", load_inplace=True)
    assert asked_by(with_source).replace
    assert not asked_by(without).replace


def test_a_version_has_no_source() -> None:
    request: Any = Request(f"sql@{A}", "/adapters/sql")
    with pytest.raises(RequestInvalid, match=r"lora_name is 'sql@sha256:a+' with the source '/adapters/sql'"):
        asked_by(request)


def test_an_id_is_of_the_version_alone() -> None:
    first, second = version_ref("sql", A), version_ref("sql", B)
    assert engine_id(first) == engine_id(f"sql@{A}") != engine_id(second)
    assert engine_id(version_ref("chat", A)) != engine_id(first)
    # Written down, as two processes of different releases must agree.
    assert engine_id("sql@sha256:00") == 1044063280133658951
    assert all(0 < engine_id(version_ref(f"adapter-{n}", A)) < 1 << 62 for n in range(1000))
    assert plain_name(first) == "sql" == plain_name("sql")


# As it comes from the core of an engine, and from a worker behind it.
FROM_CORE = "Call to add_lora method failed: {}"
FROM_WORKER = FROM_CORE.format("Worker failed with error '{}', please check the stack trace above for the root cause")


@pytest.mark.parametrize("around", ["{}", FROM_CORE, FROM_WORKER])
@pytest.mark.parametrize("kind", [*BY_REASON.values(), Unavailable, DeadlineExceeded])
def test_a_failure_survives_as_text(kind: type[SlotcarError], around: str) -> None:
    error = kind("the adapter 'sql'\nis: gone")
    found = failures.from_text(around.format(failures.as_text(error)))
    assert type(found) is kind
    assert (found.reason, found.message) == (error.reason, error.message)
    assert failures.reason_text(f"{error.reason}: {error.message}") == failures.as_text(error)


def test_a_reason_of_a_newer_worker_is_an_error_too() -> None:
    found = failures.from_text("slotcar ADAPTER_TIRED: sleeps")
    assert type(found) is SlotcarError
    assert (found.reason, failures.http_status(found)) == ("ADAPTER_TIRED", HTTPStatus.INTERNAL_SERVER_ERROR)


@pytest.mark.parametrize("text", ["", "length", "slotcar", "slotcar went away", "the slotcar REASON"])
def test_other_texts_are_no_failures_of_slotcar(text: str) -> None:
    assert failures.from_text(text) is None


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (AdapterNotFound("x"), HTTPStatus.NOT_FOUND),
        (RequestInvalid("x"), HTTPStatus.BAD_REQUEST),
        (SourceDenied("x"), HTTPStatus.FORBIDDEN),
        (SlotsExhausted("x"), HTTPStatus.SERVICE_UNAVAILABLE),
        (Unavailable("x"), HTTPStatus.SERVICE_UNAVAILABLE),
        (DeadlineExceeded("x"), HTTPStatus.GATEWAY_TIMEOUT),
        (InternalError("x"), HTTPStatus.INTERNAL_SERVER_ERROR),
    ],
)
def test_the_status_follows_the_code(error: SlotcarError, status: HTTPStatus) -> None:
    assert failures.http_status(error) is status
