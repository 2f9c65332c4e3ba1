"""Runs every benchmark, each in a process of its own: `python -m tests.bench [--quick|--smoke] [--out FILE.jsonl]`.

The lines go to standard output and, with `--out`, into a file, from which `tests.bench.report` makes the table. After
them come, for people, the targets with what was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from tests.bench.sizes import Size, add_sizes
from tests.bench.targets import TARGETS, Line

BENCHES = ("planes", "mapping", "clients", "e2e", "step", "load", "beside", "hits", "kernels")
# One thread each, in every process: two OpenMP threads on a busy core make kernels many times slower.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def lines_of(bench: str, size: Size) -> Iterator[str]:
    """What the benchmark prints, as it does. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", f"tests.bench.{bench}", *size.flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | _ENVIRONMENT) as process:
        assert process.stdout is not None
        yield from process.stdout
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def run(benches: Sequence[str], size: Size, outs: Sequence[TextIO]) -> tuple[list[Line], list[str]]:
    """Runs them in order; returns their lines, and those benchmarks that failed, which keep no other from running."""
    lines: list[Line] = []
    failed = []
    for bench in benches:
        start = time.monotonic()
        try:
            for text in lines_of(bench, size):
                lines.append(json.loads(text))
                for out in outs:
                    print(text, end="", file=out, flush=True)
        except subprocess.CalledProcessError as error:
            failed.append(bench)
            print(error, file=sys.stderr)
        print(f"{bench}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    return lines, failed


def show_targets(lines: Sequence[Line]) -> None:
    """What was found for each target, on standard error, beside the lines."""
    measured = [line for line in lines if "skipped" not in line]
    for target in TARGETS:
        values, text = target.values(measured), target.measure.text
        if values:
            verdict = "met" if target.is_met_by(values[0]) else "missed"
            found = f"{text(values[0])} to {text(values[-1])}"
            print(
                f"{target.bench:8} {target.text:56} wanted {target.wanted:10} found {found:22} {verdict}",
                file=sys.stderr,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("benches", nargs="*", default=BENCHES, metavar="BENCH", help=", ".join(BENCHES))
    parser.add_argument("--out", type=Path, help="file for the lines")
    add_sizes(parser)
    arguments = parser.parse_args()
    if unknown := set(arguments.benches) - set(BENCHES):
        parser.error(f"no benchmark {', '.join(unknown)}")
    with contextlib.ExitStack() as stack:
        outs: list[TextIO] = [sys.stdout]
        if arguments.out is not None:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            outs.append(stack.enter_context(arguments.out.open("w", encoding="utf-8")))
        lines, failed = run(arguments.benches, arguments.size, outs)
    show_targets(lines)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
