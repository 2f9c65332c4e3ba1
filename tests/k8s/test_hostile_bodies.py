"""What is no review is refused, and changes nothing for the next that is one."""

from __future__ import annotations

import json
import random
import socket

import pytest
from slotcar_injector.denial import BadReview
from slotcar_injector.review import review as answer
from slotcar_injector.settings import Settings

from tests.k8s.cluster import Webhook
from tests.k8s.pods import IMAGE, Json, body, container, good, pod, review

WHOLE = body(review(pod()))
SETTINGS = Settings(defaults={"image": IMAGE})


def with_pod(**fields: object) -> bytes:
    return body(review(pod() | fields))


def with_spec(**fields: object) -> bytes:
    return body(review(pod(**fields)))


BAD = {
    "nothing": b"",
    "half": WHOLE[: len(WHOLE) // 2],
    "all but the end": WHOLE[:-1],
    "more after it": WHOLE + b"{}",
    "no UTF-8": WHOLE.replace(b"default-scheduler", b"default\xff"),
    "UTF-16": WHOLE.decode().encode("utf-16"),
    "gzip": b"\x1f\x8b\x08\x00" + WHOLE,
    "deep lists": b"[" * 500_000,
    "deep objects": b'{"a":' * 500_000,
    "deep in the pod": WHOLE.replace(b'"status": {}', b'"status": ' + b"[" * 200_000 + b"]" * 200_000),
    "a key twice": WHOLE.replace(b'"operation"', b'"uid": "other", "operation"'),
    "a key twice in the pod": WHOLE.replace(b'"containers"', b'"containers": [], "containers"'),
    "NaN": WHOLE.replace(b"30", b"NaN"),
    "a number of 5,000 digits": WHOLE.replace(b"30", b"3" * 5000),
    "a list": b"[]",
    "a text": b'"AdmissionReview"',
    "null": b"null",
    "v1beta1": body(review(pod()) | {"apiVersion": "admission.k8s.io/v1beta1"}),
    "another kind": body(review(pod()) | {"kind": "ConversionReview"}),
    "no request": body({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1"}),
    "a response": body({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "response": {"uid": "x"}}),
    "no uid": body(review(pod(), uid=None)),
    "an empty uid": body(review(pod(), uid="")),
    "a uid that is a number": body(review(pod(), uid=7)),
    "a namespace that is a list": body(review(pod(), namespace=[])),
    "an operation that is a list": body(review(pod(), operation=["CREATE"])),
    "no object": body(review(None)),
    "an object that is a list": body(review([])),  # type: ignore[arg-type]
    "no metadata's object": with_pod(metadata=[]),
    "labels that are a list": with_pod(metadata={"labels": ["slotcar.dev/inject"]}),
    "a label that is true": with_pod(metadata={"labels": {"slotcar.dev/inject": True}}),
    "a spec that is a text": with_pod(spec="x"),
    "containers that are an object": with_spec(containers={"name": "engine"}),
    "a container that is a text": with_spec(containers=["engine"]),
    "a container without a name": with_spec(containers=[{"image": "x"}]),
    "a name that is a number": with_spec(containers=[container(name=3)]),  # type: ignore[arg-type]
    "mounts that are an object": with_spec(containers=[container(volumeMounts={})]),
    "a mount without a path": with_spec(containers=[container(volumeMounts=[{"name": "v"}])]),
    "a variable without a name": with_spec(containers=[container(env=[{"value": "x"}])]),
    "a variable that is a number": with_spec(containers=[container(env=[{"name": "X", "value": 1}])]),
    "a port that is a text": with_spec(containers=[container(ports=[{"containerPort": "9464"}])]),
    "a port that is true": with_spec(containers=[container(ports=[{"containerPort": True}])]),
    "claims that are a number": with_spec(containers=[container(resources={"claims": 3})]),
    "a volume without a name": with_spec(volumes=[{}]),
    "groups that are texts": with_spec(securityContext={"supplementalGroups": ["7"]}),
    "a grace period of half a second": with_spec(terminationGracePeriodSeconds=0.5),
    "an os that is a text": with_spec(os="windows"),
    "a node's os that is a list": with_spec(nodeSelector={"kubernetes.io/os": ["windows"]}),
    "owners that are an object": with_pod(metadata=pod()["metadata"] | {"ownerReferences": {}}),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_review_is_refused(webhook: Webhook, name: str) -> None:
    before = webhook.count("failed", "body_invalid")
    status, text = webhook.post(BAD[name])
    assert status == 400, text
    assert text.endswith(b"\n")
    assert len(text) < 400
    assert webhook.count("failed", "body_invalid") == before + 1
    assert webhook.admit(pod()).operations, "the next one is answered"


def test_a_body_above_the_limit_is_refused(webhook: Webhook) -> None:
    status, _ = webhook.post(b" " * ((8 << 20) + 1))
    assert status == 413
    assert webhook.count("failed", "body_too_large") == 1


def test_a_pod_as_large_as_api_servers_take_is_answered(webhook: Webhook) -> None:
    large = pod()
    large["metadata"]["annotations"]["other"] = "x" * (3 << 20)
    assert webhook.admit(large).operations


@pytest.mark.parametrize("character", ["\ud800", "\x00", "\u2028", "\x1b[31m", "é" * 300])
def test_odd_characters_come_back_as_they_came(webhook: Webhook, character: str) -> None:
    of = pod()
    of["metadata"]["annotations"] |= {"other": character, "slotcar.dev/slots": character}
    refused = webhook.admit(of)
    assert not refused.allowed
    assert refused.message.isprintable()


def test_only_post_and_only_its_path(webhook: Webhook) -> None:
    assert webhook.post(WHOLE, "/")[0] == 404
    connection = webhook.connect()
    connection.request("GET", "/inject")
    assert connection.getresponse().status == 405
    connection.close()


def test_a_body_that_says_gzip_is_not_unpacked(webhook: Webhook) -> None:
    assert webhook.post(WHOLE, **{"Content-Encoding": "gzip"})[0] == 200


@pytest.mark.parametrize(
    "head",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x00\x00",
        b"POST /inject HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /inject HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /inject HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        b"POST /inject HTTP/1.1\r\n" + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
        b"POST /inject HTTP/1.1\r\n" + b"X: a\r\n" * 5000 + b"\r\n",
    ],
)
def test_broken_http_ends_its_connection_only(webhook: Webhook, head: bytes) -> None:
    connection = webhook.connect()
    connection.sock.sendall(head)
    answered = connection.sock.recv(200)
    assert answered.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")) or answered == b""
    connection.close()
    assert webhook.admit(pod()).operations


def test_plain_http_at_the_tls_port_is_closed(webhook: Webhook) -> None:
    with socket.create_connection(("127.0.0.1", webhook.port), timeout=30) as plain:
        plain.sendall(b"POST /inject HTTP/1.1\r\n\r\n")
        assert b"200" not in plain.recv(100)
    assert webhook.admit(pod()).operations


def test_a_caller_that_leaves_in_the_middle_harms_nobody(webhook: Webhook) -> None:
    connection = webhook.connect()
    connection.putrequest("POST", "/inject")
    connection.putheader("Content-Length", "100000")
    connection.endheaders()
    connection.send(WHOLE[:100])
    connection.close()
    assert webhook.admit(pod()).operations
    assert webhook.count("failed", "internal") == 0


def mutated(random_: random.Random, value: object) -> object:
    """The value with one part of it, anywhere, made something else."""
    if isinstance(value, dict) and value and random_.random() < 0.9:
        name = random_.choice(sorted(value))
        return {**value, name: mutated(random_, value[name])}
    if isinstance(value, list) and value and random_.random() < 0.9:
        index = random_.randrange(len(value))
        return [*value[:index], mutated(random_, value[index]), *value[index + 1 :]]
    return random_.choice([None, 0, -1, 1.5, True, "", "slotcar", [], {}, [None], [{}], {"name": None}, "\ud800"])


@pytest.mark.parametrize("name", ["everything", "deployment", "meshed"])
def test_any_part_of_a_review_may_be_something_else(name: str) -> None:
    """Either it is answered as a review, or refused as none; nothing else is ever raised."""
    random_ = random.Random(7)
    refused = 0
    for _ in range(1500):
        changed = mutated(random_, review(good(name)))
        try:
            reviewed = answer(body(changed), SETTINGS)
        except BadReview:
            refused += 1
        else:
            found: Json = json.loads(reviewed.answer)
            assert isinstance(found["response"]["allowed"], bool)
    assert 50 < refused < 1450
