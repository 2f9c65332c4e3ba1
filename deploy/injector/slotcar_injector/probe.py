"""Asks a webhook about a pod, over TLS as an API server would: what `helm test` and an operator see it answer by."""

from __future__ import annotations

import http.client
import json
import ssl
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from slotcar_injector.places import LABEL
from slotcar_injector.review import API_VERSION

_UID = "slotcar-injector-probe"


class ProbeFailed(Exception):
    """What an API server would not have taken as an answer."""


def ask(url: str, authority: str, seconds: float) -> str:
    """What came of a dry run of a labelled pod with one container. Raises ProbeFailed.

    A denial is an answer: the injector's defaults may ask for what only its pods have.
    """
    try:
        status, body = _post(url, authority, seconds)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ProbeFailed(f"{url}: {error}") from error
    if status != 200:
        raise ProbeFailed(f"{url} answered {status}: {body[:200].decode(errors='replace').strip()}")
    return _outcome(body)


def _post(url: str, authority: str, seconds: float) -> tuple[int, bytes]:
    where = urlsplit(url)
    if where.scheme != "https" or not where.hostname:
        raise ValueError("wanted an address with https://")
    if not authority.isascii():
        raise ValueError("the authority is no PEM")
    # Trusts nothing else: a default context would take the system's authorities in place of an empty text.
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trust.load_verify_locations(cadata=authority)
    with closing(http.client.HTTPSConnection(where.hostname, where.port, timeout=seconds, context=trust)) as connection:
        connection.request("POST", where.path, json.dumps(_review()), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()


def _review() -> dict[str, Any]:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe", "labels": {LABEL: "true"}},
        "spec": {"containers": [{"name": "engine", "image": "engine"}]},
    }
    resource = {"group": "", "version": "v1", "resource": "pods"}
    request = {"uid": _UID, "resource": resource, "operation": "CREATE", "dryRun": True, "object": pod}
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "request": request}


def _outcome(body: bytes) -> str:
    try:
        response = json.loads(body)["response"]
        if response["uid"] != _UID:
            raise ProbeFailed(f"the answer is to {response['uid']}, wanted {_UID}")
        return "injected" if response["allowed"] else f"denied: {response['status']['message']}"
    except (ValueError, KeyError, TypeError) as error:
        raise ProbeFailed(f"the answer is no AdmissionReview: {body[:200]!r}") from error
