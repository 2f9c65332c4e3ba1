"""Runs the game day: `python -m tests.ops.gameday`. Exits with 1 if a trouble is not seen everywhere it should be."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from tests.ops.gameday import report
from tests.ops.gameday.pace import Pace
from tests.ops.gameday.report import Played
from tests.ops.gameday.scenarios import SCENARIOS, Scenario
from tests.ops.gameday.stage import stage

PACE = Pace(20)
_COLUMNS = 160


def play(scenario: Scenario, folder: Path, pace: Pace, binary: str) -> Played:
    """Whatever goes wrong is told, and the others are played still."""
    start = time.monotonic()
    try:
        with stage(folder, pace, binary) as place:
            sightings = tuple(scenario.play(place))
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        return Played(scenario.name, scenario.does, time.monotonic() - start, failure=failure)
    return Played(scenario.name, scenario.does, time.monotonic() - start, sightings)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.ops.gameday", description=__doc__)
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--only", choices=names, action="append", help="play this one; may be given again")
    parser.add_argument("--pace", type=int, default=PACE.factor, help="how many times shorter the rules' times are")
    parser.add_argument("--json", type=Path, help="also write what was seen to this file")
    parser.add_argument("--write", type=Path, help="also write the page of the documentation, if all went well")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    binary, pace = shutil.which("prometheus"), Pace(arguments.pace)
    if binary is None:
        sys.exit("prometheus is missing: `make apt` installs it")
    console = Console() if sys.stdout.isatty() else Console(width=_COLUMNS)
    console.print(f"The rules' windows and `for` are {pace.factor} times shorter than in earnest; thresholds are not.")
    all_played = []
    with tempfile.TemporaryDirectory() as work:
        for number, scenario in enumerate(SCENARIOS):
            if arguments.only and scenario.name not in arguments.only:
                continue
            all_played.append(play(scenario, Path(work) / f"scenario-{number}", pace, binary))
            report.show(console, all_played[-1])
    if arguments.json:
        arguments.json.write_text(report.as_json(all_played, pace), encoding="utf-8")
    failed = [played.name for played in all_played if played.failure]
    if arguments.write and not failed:
        report.write_page(arguments.write, all_played, pace)
    console.print(f"{len(all_played) - len(failed)} of {len(all_played)} were seen in all four places.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
