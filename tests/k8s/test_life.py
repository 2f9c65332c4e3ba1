"""Start, deadlines, load and stop of a real process."""

from __future__ import annotations

import signal
import socket
import threading
from pathlib import Path

import pytest
import trustme

from tests.k8s.cluster import Webhook, running, write_pair
from tests.k8s.pods import body, pod, review

WHOLE = body(review(pod()))
HEAD = f"POST /inject HTTP/1.1\r\nHost: x\r\nContent-Length: {len(WHOLE)}\r\n\r\n".encode()


def open_review(webhook: Webhook, sent: bytes) -> socket.socket:
    """A connection on which so much of a review has been sent."""
    connection = webhook.connect()
    connection.sock.sendall(sent)
    return connection.sock


def rest(connection: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    found = b""
    while part := connection.recv(65536):
        found += part
    connection.close()
    return found


@pytest.mark.parametrize(
    "sent",
    [
        HEAD,
        HEAD + WHOLE[:-1],
        b"POST /inject HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
        b"POST /inject HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfff",
    ],
)
def test_a_body_that_does_not_come_is_given_up_at_the_deadline(tmp_path: Path, sent: bytes) -> None:
    with running(tmp_path, "--deadline-seconds=0.2") as webhook:
        answer = rest(open_review(webhook, sent))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"no whole body within 0.2 s" in answer
        assert webhook.count("failed", "deadline") == 1
        assert webhook.admit(pod()).operations


def test_bytes_that_trickle_do_not_move_the_deadline(tmp_path: Path) -> None:
    with running(tmp_path, "--deadline-seconds=0.5") as webhook:
        connection = open_review(webhook, b"POST /inject HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        stopping = threading.Event()

        def trickle() -> None:
            while not stopping.wait(0.05):
                try:
                    connection.sendall(b"1\r\n \r\n")
                except OSError:
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        answer = connection.recv(65536)
        stopping.set()
        thread.join()
        connection.close()
        assert answer.startswith(b"HTTP/1.1 503 ")


def test_more_slow_callers_than_there_is_room_for_end_at_the_deadline(tmp_path: Path) -> None:
    with running(tmp_path, "--deadline-seconds=0.5", "--most-requests=4") as webhook:
        slow = [open_review(webhook, HEAD) for _ in range(12)]
        answers = [rest(each) for each in slow]
        assert all(answer.startswith(b"HTTP/1.1 503 ") for answer in answers)
        assert webhook.admit(pod()).operations


def test_a_connection_that_says_nothing_is_closed(tmp_path: Path) -> None:
    with running(tmp_path, "--idle-seconds=0.2") as webhook:
        assert rest(open_review(webhook, b"")) == b""
        assert rest(open_review(webhook, b"POST /inject HTTP/1.1\r\nX: ")) == b""


def test_many_callers_at_a_time_are_all_answered(tmp_path: Path) -> None:
    with running(tmp_path) as webhook:
        statuses: list[int] = []

        def call() -> None:
            for _ in range(5):
                statuses.append(webhook.post(WHOLE)[0])  # noqa: PERF401 - as they come

        threads = [threading.Thread(target=call) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == [200] * 100
        assert webhook.count("injected", "new") == 100


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_answers_what_has_begun_and_ends_with_0(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path) as webhook:
        assert webhook.process is not None
        begun = open_review(webhook, HEAD + WHOLE[:10])
        idle = webhook.connect()
        idle.request("POST", "/inject", WHOLE)
        idle.getresponse().read()
        webhook.process.send_signal(number)
        webhook.wait_for("stopping")
        begun.sendall(WHOLE[10:])
        assert rest(begun).startswith(b"HTTP/1.1 200 ")
        assert webhook.process.wait(60) == 0
        assert webhook.whole_lines()[-1]["event"] == "stopped"
        idle.close()


def test_while_it_drains_it_is_not_ready_and_answers(tmp_path: Path) -> None:
    with running(tmp_path, "--drain-seconds=600") as webhook:
        assert webhook.process is not None
        assert webhook.get("/readyz") == (200, "ok\n")
        kept = webhook.connect()
        webhook.process.send_signal(signal.SIGTERM)
        webhook.wait_for("stopping")
        assert webhook.get("/readyz") == (503, "stopping\n")
        assert webhook.get("/healthz")[0] == 200
        assert webhook.admit(pod()).operations
        kept.request("POST", "/inject", WHOLE)
        response = kept.getresponse()
        assert (response.status, response.getheader("Connection")) == (200, "close"), "callers go to the others"
        kept.close()
        webhook.process.send_signal(signal.SIGTERM)
        assert webhook.process.wait(60) == 0, "a second signal ends the wait"


def test_a_stop_before_there_is_a_certificate_ends_with_0(tmp_path: Path) -> None:
    webhook = Webhook(tmp_path, trustme.CA())
    webhook.start()
    assert webhook.end() == 0


def test_health_is_on_both_ports(tmp_path: Path) -> None:
    with running(tmp_path) as webhook:
        connection = webhook.connect()
        connection.request("GET", "/readyz")
        assert connection.getresponse().status == 200
        connection.close()
        assert webhook.get("/inject")[0] == 404


def test_a_port_that_is_taken_ends_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        webhook = Webhook(tmp_path, trustme.CA())
        write_pair(tmp_path, webhook.authority)
        with pytest.raises(AssertionError, match=r"start_failed.*address already in use"):
            webhook.start(f"--port={taken.getsockname()[1]}")


def test_every_admission_is_measured(tmp_path: Path) -> None:
    with running(tmp_path) as webhook:
        webhook.admit(pod())
        webhook.post(b"x")
        _, text = webhook.get("/metrics")
        assert "slotcar_injector_admission_seconds_count 2.0" in text
        assert "slotcar_injector_reviews_in_flight 0.0" in text
        assert "_created" not in text
