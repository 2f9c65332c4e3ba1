"""The annotation that a pass leaves on the pod: what was injected, by which version, for the next pass to compare."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from slotcar_injector import places
from slotcar_injector.shape import Json, field


@dataclass(frozen=True, slots=True)
class Status:
    """`digest` is of the pieces; all fields are "" in a status that is not ours."""

    version: str = ""
    digest: str = ""
    mode: str = ""
    container: str = ""

    def text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


def status_of(pod: Json) -> Status | None:
    """None for a pod that has not been through this webhook."""
    text = field(field(pod, "metadata"), "annotations").get(places.STATUS)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return Status()
    names = Status.__dataclass_fields__
    if not isinstance(found, dict) or not all(isinstance(found.get(name), str) for name in names):
        return Status()
    return Status(**{name: found[name] for name in names})
