"""A scrape stays small however many adapters there are."""

from __future__ import annotations

from tests.scale.scrape import MOST_BYTES, measure


def test_a_scrape_with_10_000_adapters_of_which_64_are_resident() -> None:
    """`python -m tests.scale.scrape` prints the figures of more scrapes."""
    cost = measure(10_000, 64, scrapes=10)
    print(cost)
    assert cost.bytes < MOST_BYTES
