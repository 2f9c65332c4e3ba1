"""The HTTP address of a real sidecar: metrics, status page and data, read-only, without secrets, for any client."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import re
import socket
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
import slotcar_client

from tests.faults.oracle import Library, spec_file
from tests.server import SidecarProcess
from tests.waiting import eventually

SITES = {"layer.q": (32, 48)}
PATIENCE_SECONDS = 30.0
SECRET = "hunter2hunter2"
HOSTILE = (b"GET / HTTP/1.1\r\nX: ", b"\x16\x03\x01", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 20)
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    library = Library(tmp_path_factory.mktemp("adapters"), SITES)
    library.write("sql", 1, list(SITES))
    return library


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory, library: Library) -> Iterator[SidecarProcess]:
    home = tmp_path_factory.mktemp("server")
    options = home / "sources.json"
    options.write_text(
        json.dumps(
            {"s3://bucket": {"endpoint": "http://127.0.0.1:9", "key": {"env": "KEY"}, "secret": {"env": "KEY"}}}
        ),
        encoding="utf-8",
    )
    extra = ("--metrics", "127.0.0.1:0", "--source", "s3://bucket", "--source-options", str(options))
    extra += ("--model-spec", str(spec_file(home, SITES)), "--fetch-seconds", "1")
    with SidecarProcess(home, library.root, extra=extra, environment={"KEY": SECRET}) as sidecar:
        yield sidecar


def address(sidecar: SidecarProcess) -> tuple[str, int]:
    host, port = re.findall(r"at=http://([\d.]+):(\d+)/metrics", sidecar.log)[-1]
    return host, int(port)


def ask(sidecar: SidecarProcess, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(*address(sidecar), timeout=PATIENCE_SECONDS)
    with contextlib.closing(connection):
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response, response.read()


def state(sidecar: SidecarProcess) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ask(sidecar, "/debug/state.json")[1])
    return found


def test_metrics_are_negotiated_as_before(sidecar: SidecarProcess) -> None:
    plain, text = ask(sidecar, "/metrics")
    assert plain.headers["Content-Type"].startswith("text/plain; version=")
    assert b"\nslotcar_slots{" in text
    open_metrics, text = ask(sidecar, "/metrics", Accept=OPENMETRICS, Accept_Encoding="gzip")
    assert open_metrics.headers["Content-Type"].startswith("application/openmetrics-text")
    assert gzip.decompress(text).endswith(b"# EOF\n")
    for version in ("x", "1.a", "", "-1", "1..0", "1.0.0;version=x", "\xb2", "1" * 5000):
        for kind in ("text/plain", "application/openmetrics-text"):
            strange, _ = ask(sidecar, "/metrics", Accept=f"{kind}; version={version}")
            assert strange.status == 200, version
            assert strange.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            known, _ = ask(sidecar, "/metrics", Accept=f"{kind};version={version},{OPENMETRICS}")
            assert known.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    some, text = ask(sidecar, "/metrics?name[]=slotcar_thrash_total")
    assert some.status == 200
    assert {line.split()[0] for line in text.decode().splitlines() if not line.startswith("#")} == {
        "slotcar_thrash_total"
    }


def test_the_page_and_its_data(sidecar: SidecarProcess) -> None:
    page, text = ask(sidecar, "/")
    assert (page.status, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["Content-Security-Policy"].startswith("default-src 'none'")
    data, found = ask(sidecar, "/debug/state.json", Accept_Encoding="gzip")
    assert (data.headers["Content-Type"], data.headers["Content-Encoding"]) == ("application/json", "gzip")
    assert json.loads(gzip.decompress(found))["server"]["epoch"] in text.decode()
    for response in (page, data):
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Cache-Control"] == "no-store"
    assert ask(sidecar, "/", "HEAD")[1] == b""


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:9400", "LOCALHOST.", "127.0.0.1:9400", "[::1]:9400", "10.1.2.3", "slotcar-0", ""),
        *("slotcar.team-a.svc:9400", "slotcar.team-a.svc.cluster.local", "pod.localhost"),
    ],
)
def test_the_page_answers_to_names_that_mean_nothing_elsewhere(sidecar: SidecarProcess, host: str) -> None:
    assert [ask(sidecar, path, Host=host)[0].status for path in ("/", "/debug/state.json")] == [200, 200]


@pytest.mark.parametrize(
    "host",
    [
        *("attacker.example", "attacker.example:9400", "127.0.0.1.attacker.example", "localhost.attacker.example"),
        *("localhost@attacker.example", "svc.example", "attacker.example.", "[::1", "[not]:1", "0x7f.1"),
    ],
)
def test_a_page_of_another_name_cannot_read_it(sidecar: SidecarProcess, host: str) -> None:
    """Its name would be pointed at this machine (DNS rebinding). Scrapers may have any name for it."""
    assert [ask(sidecar, path, Host=host)[0].status for path in ("/", "/debug/state.json")] == [421, 421]
    assert ask(sidecar, "/metrics", Host=host)[0].status == 200


@pytest.mark.parametrize("path", ["/", "/metrics", "/debug/state.json"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(sidecar: SidecarProcess, path: str, method: str) -> None:
    response, _ = ask(sidecar, path, method)
    assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")


def test_what_there_is_not(sidecar: SidecarProcess) -> None:
    for path in ("/nothing", "/metrics/", "//", "/debug/../metrics", "http://elsewhere/", "/%00"):
        assert ask(sidecar, path)[0].status == 404


def test_it_shows_what_happens_and_keeps_secrets(sidecar: SidecarProcess, library: Library) -> None:
    with slotcar_client.connect(sidecar.target) as client, client.session("engine", transport="stream") as session:
        client.load("sql", library.root / "sql")
        session.set_mapping(["sql"])
        with pytest.raises(slotcar_client.SlotcarError):
            client.load("remote", f"s3://user:{SECRET}@bucket/adapter")
        eventually(lambda: state(sidecar)["sessions"])
        found = state(sidecar)
        assert found["slots"][0]["names"] == ["sql"]
        assert found["slots"][0]["pins"][0]["session"] == session.session_id[:8]
        assert found["server"]["readiness"] == "ready"
        assert [load["name"] for load in found["loads"]] == ["sql"]
        assert [stage for stage, _ in found["loads"][0]["stages"]] == ["read", "wait", "fill"]
        assert {adapter["name"] for adapter in found["adapters"]} == {"sql", "remote"}
        for path in ("/", "/debug/state.json", "/metrics"):
            text = ask(sidecar, path)[1].decode()
            assert session.session_id not in text
            assert SECRET not in text


def test_hostile_clients_hold_up_neither_others_nor_the_end(tmp_path: Path, library: Library) -> None:
    with contextlib.ExitStack() as stack:
        sidecar = stack.enter_context(SidecarProcess(tmp_path, library.root, extra=("--metrics", "127.0.0.1:0")))
        for number in range(200):
            client = stack.enter_context(socket.create_connection(address(sidecar), timeout=PATIENCE_SECONDS))
            client.sendall(
                (b"GET / HTTP/1.1\r\nX: ", b"\x16\x03\x01", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 20)[number % 3]
            )
        assert ask(sidecar, "/metrics")[0].status == 200
        assert "waits for a ModelSpec" in state(sidecar)["attention"][0]["text"]
        assert sidecar.stop() == 0
        assert "Traceback" not in sidecar.log


@pytest.mark.parametrize(
    ("host", "flags", "status"),
    [
        ("127.0.0.1", ("--pages", "never"), 404),
        ("0.0.0.0", (), 404),
        ("0.0.0.0", ("--insecure",), 404),
        ("0.0.0.0", ("--pages", "always"), 200),
    ],
)
def test_the_page_is_on_loopback_alone_unless_asked_for(
    tmp_path: Path, library: Library, host: str, flags: tuple[str, ...], status: int
) -> None:
    """It names adapters and clients to whoever reaches it."""
    with SidecarProcess(tmp_path, library.root, extra=("--metrics", f"{host}:0", *flags)) as sidecar:
        found = [ask(sidecar, path)[0].status for path in ("/metrics", "/", "/debug/state.json")]
    assert found == [200, status, status]
