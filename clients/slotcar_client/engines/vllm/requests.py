"""Which adapter a LoRARequest of vLLM is for, and the name, id and path that carry one version of it.

vLLM compares LoRARequests by name, finds them by id and keys its prefix cache by name and path. Invariant: what this
module makes has the digest in all three, so that equal ones mean equal bytes, in every process and on every engine.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slotcar_client.errors import RequestInvalid

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

SCHEME = "slotcar:"
# Between a name and the digest that it had when somebody looked; no name has it.
_LOOKED_UP = "~"
_ID_BITS = 62


@dataclass(frozen=True, slots=True)
class Asked:
    """What a LoRARequest asks for.

    `ref` is a name, or name@digest. `source` is where to load the name from, "" for what the sidecar has under it;
    `replace`: the name may move to other bytes. `by_name`: the digest is the one that the name had, and where it is
    gone, the one that the name has now is as good.
    """

    ref: str
    source: str = ""
    replace: bool = False
    by_name: bool = True

    @property
    def name(self) -> str:
        return plain_name(self.ref)

    @property
    def fixed(self) -> bool:
        """The version is known."""
        return "@" in self.ref


def asked_by(request: LoRARequest) -> Asked:
    """`slotcar:REF` as path is what the sidecar has as REF, or under the request's name; else it is a source.

    Raises RequestInvalid for a source of a name that has a digest already.
    """
    if request.lora_path.startswith(SCHEME):
        ref = request.lora_path.removeprefix(SCHEME) or request.lora_name
        return Asked(ref.replace(_LOOKED_UP, "@", 1), by_name="@" not in ref)
    if "@" in request.lora_name:
        raise RequestInvalid(
            f"lora_name is {request.lora_name!r} with the source {request.lora_path!r}, wanted a name without a digest",
            field="lora_name",
            found=request.lora_name,
            wanted="a name without a digest",
        )
    return Asked(request.lora_name, request.lora_path, request.load_inplace)


def version_ref(name: str, digest: str) -> str:
    """`name@sha256:…`: one version of a name."""
    return f"{name}@{digest}"


def plain_name(ref: str) -> str:
    """The name of a ref, without its digest."""
    return ref.partition("@")[0]


def engine_id(version: str) -> int:
    """vLLM's id of a version: the same everywhere, at least 1, within 62 bits."""
    digest = hashlib.sha256(version.encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> (64 - _ID_BITS)) or 1


def version_request(version: str) -> LoRARequest:
    """The request by which the engine knows a version."""
    return named_request(version, version)


def named_request(name: str, version: str) -> LoRARequest:
    """A request for a version that answers to `name`, as its user asked for it: by name alone, or for that digest."""
    from vllm.lora.request import LoRARequest

    ref = version if "@" in name else version.replace("@", _LOOKED_UP, 1)
    return LoRARequest(name, engine_id(version), SCHEME + ref)
