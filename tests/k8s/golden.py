"""Rewrites tests/k8s/golden, the chart's copies, and the table in docs/kubernetes.md: `python -m tests.k8s.golden`."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from slotcar_injector.annotations import ANNOTATIONS, PREFIX
from slotcar_injector.review import inject
from slotcar_injector.settings import Settings

from tests.golden.pages import page_with
from tests.k8s import charts, kustomize
from tests.k8s.pods import GOOD, IMAGE, good

FOLDER = Path(__file__).parent / "golden"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "kubernetes.md"


def injected_text(name: str) -> str:
    """What a pod becomes, without the fields that nobody reads, as YAML."""
    pod, _, warnings = inject(good(name), Settings(defaults={"image": IMAGE}, version="0.0.0"))
    pod = json.loads(json.dumps(pod))
    pod.pop("status", None)
    comments = "".join(f"# warning: {warning}\n" for warning in warnings)
    return comments + str(yaml.safe_dump(pod, sort_keys=False, width=120))


def table() -> str:
    """One row per annotation: its name, its default and what it is."""
    lines = [f"| annotation `{PREFIX}…` | default | |", "|---|---|---|"]
    for each in ANNOTATIONS:
        default = "" if each.default is None else f"`{each.default}`"
        lines.append(f"| `{each.name}` | {default} | {each.text} Value: {each.wanted}. |")
    return "\n".join(lines) + "\n"


def page_with_table(text: str) -> str:
    """The page with a fresh table between its two marks."""
    return page_with(text, "annotations", table())


if __name__ == "__main__":
    for name in GOOD:
        (FOLDER / f"{name}.yaml").write_text(injected_text(name), encoding="utf-8")
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    charts.write()
    kustomize.write()
