"""Prints how many states each configuration has: `python -m tests.property.reader_writer`, about a minute."""

from __future__ import annotations

from tests.property.reader_writer.configurations import CONFIGURATIONS, LARGE_CONFIGURATIONS
from tests.property.reader_writer.explore import explore


def main() -> None:
    for configuration in (*CONFIGURATIONS, *LARGE_CONFIGURATIONS):
        print(f"{configuration}: {explore(configuration)}", flush=True)


if __name__ == "__main__":
    main()
