"""The chart's memory limit holds as many of the largest bodies as the injector reads at a time."""

from __future__ import annotations

import http.client
import re
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.k8s import charts
from tests.k8s.chart_webhook import ChartWebhook, serving, write_secret

READ_AT_A_TIME = 4
BODY_BYTES = 8 << 20
# What takes the most memory for its size, each in another way: empty objects, and text of which a character is wide.
BODIES = {
    "objects": b"[" + b"{}," * ((BODY_BYTES - 16) // 3) + b"{}]",
    "text": b'"\xf0\x9f\x9a\x97' + b"a" * (BODY_BYTES - 16) + b'"',
}


@pytest.mark.parametrize("name", BODIES)
def test_the_limit_holds_what_is_read_at_a_time(tmp_path: Path, name: str) -> None:
    values = charts.merged(charts.IMAGES, {"serving": {"mostRequests": READ_AT_A_TIME, "bodyBytes": BODY_BYTES}})
    objects = charts.rendered(values)
    write_secret(tmp_path, charts.one(objects, "Secret"))
    with serving(tmp_path, objects) as webhook:
        callers = [threading.Thread(target=call, args=(webhook, BODIES[name])) for _ in range(READ_AT_A_TIME + 2)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert peak_bytes(webhook) < limit_bytes(objects)


def call(webhook: ChartWebhook, data: bytes) -> None:
    """Whatever comes of it: those for whom there is no room in time are refused."""
    with suppress(OSError, http.client.HTTPException):
        webhook.post(data)


def peak_bytes(webhook: ChartWebhook) -> int:
    assert webhook.process is not None
    status = Path(f"/proc/{webhook.process.pid}/status").read_text(encoding="ascii")
    (kibibytes,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kibibytes) << 10


def limit_bytes(objects: list[charts.Json]) -> int:
    (container,) = charts.one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    limit = container["resources"]["limits"]["memory"]
    assert limit.endswith("Mi")
    return int(limit.removesuffix("Mi")) << 20
