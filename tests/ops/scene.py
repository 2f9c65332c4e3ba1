"""A sidecar to look at: adapters in every tier, engines that pin slots, a replace, evictions, refusals, a file."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import slotcar_client
import torch
from slotcar_client import BASE, AdapterInvalid, Client, Session, SourceDenied

from tests.faults.oracle import Library, spec_file
from tests.server import SidecarProcess

SLOTS = 6
SITES = {f"model.layers.{layer}.self_attn.{name}_proj": (512, 512) for layer in range(4) for name in "qkvo"}
NAMES = ("support/en", "support/de", "sql", "legal-review", "code-assist", "summaries", "tone-of-voice", "moderation")
_DECLARED = """
apiVersion: slotcar.dev/v1
default: {{state: present, tier: host}}
adapters:
  - {{name: sql, source: {root}/sql, state: keep}}
  - {{name: moderation, source: {root}/moderation}}
  - {{name: experimental/rag, source: {root}/not-there}}
  - {{name: old-support, state: absent}}
  - {{name: "no such\u202e name", source: {root}/sql}}
"""


@dataclass
class Scene:
    """What there is to see; `first` has a mapping, a hold and a reserved slot, `second` a mapping."""

    sidecar: SidecarProcess
    client: Client
    library: Library
    first: Session
    second: Session

    @property
    def url(self) -> str:
        return page_url(self.sidecar)


def page_url(sidecar: SidecarProcess) -> str:
    """Where the page of its last life is."""
    return re.findall(r"(http://127\.0\.0\.1:\d+/)metrics", sidecar.log)[-1]


def make_library(folder: Path) -> Library:
    """The adapters of NAMES, a second version of one, and one that is broken."""
    library = Library(folder, SITES)
    for seed, name in enumerate((*NAMES, "sql-v2")):
        library.write(name, seed, list(SITES), rank=8)
    broken = folder / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 16}', encoding="utf-8")
    (broken / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    return library


@contextlib.contextmanager
def staged(folder: Path, *extra: str) -> Iterator[Scene]:
    """The scene, in files below `folder`, until the context ends."""
    home = folder / "server"
    home.mkdir()
    library = make_library(folder / "adapters")
    declared = home / "adapters.yaml"
    declared.write_text(_DECLARED.format(root=library.root), encoding="utf-8")
    settings = ("--model-spec", str(spec_file(home, SITES)), "--metrics", "127.0.0.1:0", "--adapters", str(declared))
    settings += ("--disk", str(home / "disk"), "--host-bytes", "8MiB", "--mapping-idle-seconds", "600", *extra)
    with (
        SidecarProcess(home, library.root, slots=SLOTS, extra=settings) as sidecar,
        slotcar_client.connect(sidecar.target) as client,
        client.session("vllm-0", reserved_slots=1) as first,
        client.session("batch-scorer", transport="stream") as second,
    ):
        _play(client, library, first)
        second.set_mapping(["legal-review", BASE], load=True)
        second.forward(dict.fromkeys(SITES, torch.ones(2, 512)), [1, 1])
        yield Scene(sidecar, client, library, first, second)


def _play(client: Client, library: Library, session: Session) -> None:
    for name in NAMES:
        client.load(name, library.root / name, tier="device" if name != "moderation" else "host")
    session.set_mapping(["support/en", "sql", BASE, "code-assist"], load=True)
    session.hold("summaries", hold_id=17, slot=True)
    x = torch.ones(4, 512)
    session.forward(dict.fromkeys(SITES, x), [1, 1, 1, 1])
    client.load("code-assist", library.root / "sql-v2", replace=True)
    client.load("tone-of-voice")
    with pytest.raises(AdapterInvalid):
        client.load("legal-draft", library.root / "broken")
    with pytest.raises(SourceDenied):
        client.load("secret", "/etc")
