"""However many people look at the page, the server makes it no oftener."""

from __future__ import annotations

import dataclasses
import gzip
import json
from http import HTTPStatus

import pytest
from slotcar_sidecar.ops.state import State
from slotcar_sidecar.process.pages import Pages, _near_alone
from slotcar_sidecar.process.web import Answer, Request

from tests.unit.ops.states import full

PLAIN = Request("/", "", {})
ZIPPED = Request("/", "", {"accept-encoding": "gzip, br"})


class Server:
    """Gives a state of another moment each time, and has a clock to turn."""

    def __init__(self) -> None:
        self.taken, self.now = 0, 100.0
        self.pages = Pages(self.take, lambda: self.now)

    def take(self) -> State:
        self.taken += 1
        return dataclasses.replace(full(), time=float(self.taken))


@pytest.mark.parametrize("request_", [PLAIN, ZIPPED])
@pytest.mark.parametrize("kind", ["page", "data"])
def test_what_was_made_a_moment_ago_is_sent_again(kind: str, request_: Request) -> None:
    server = Server()
    answer = getattr(server.pages, kind)
    first = answer(request_)
    server.now += 0.9
    assert answer(request_).body is first.body
    server.now += 0.2
    assert answer(request_).body != first.body
    assert server.taken == 2


def test_page_and_data_are_of_one_moment_however_they_are_sent() -> None:
    server = Server()
    page, data = server.pages.page, server.pages.data
    assert gzip.decompress(page(ZIPPED).body) == page(PLAIN).body
    assert gzip.decompress(data(ZIPPED).body) == data(PLAIN).body
    assert json.loads(data(PLAIN).body)["time"] == 1.0
    assert [("Content-Encoding", "gzip") in answer(ZIPPED).headers for answer in (page, data)] == [True, True]
    assert all(("Vary", "Accept-Encoding") in answer(PLAIN).headers for answer in (page, data))
    assert server.taken == 1


def test_the_name_that_metrics_are_served_at_is_one_to_ask_by() -> None:
    answer = _near_alone("Pod.Example", lambda request: Answer(HTTPStatus.OK, b""))
    hosts = ("pod.example:9400", "POD.example", "pod.example.", "other.example", "example")
    found = [answer(Request("/", "", {"host": host})).status for host in hosts]
    assert found == [200, 200, 200, 421, 200]
    assert answer(PLAIN).status == 200
