"""Which client and which server work together."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from slotcar.version import compatible


@pytest.mark.parametrize(
    ("ours", "theirs", "together"),
    [
        ("0.1.0", "0.1.7", True),
        ("0.1.0", "0.2.0", True),
        ("0.2.0", "0.1.0", True),
        ("0.1.0", "0.3.0", False),
        ("0.9.9", "0.10.0", True),
        ("1.0.0", "0.1.0", False),
        ("1.0.0", "2.0.0", False),
        ("0.1.0", "0.2.0rc1", True),
        ("0.1.0", "0.1.0.dev3+g12ab", True),
        ("0.1.0", "", True),
        ("", "0.1.0", True),
        ("0.1.0", "latest", False),
        ("0.1.0", "0.1", False),
        ("0.1.0", "0.01.0", False),
        ("0.1.0", "٠.١.٠", False),
        ("0.1.0", "0.1.0\n", False),
        ("0.1.0", "0." + "1" * 100 + ".0", False),
    ],
)
def test_neighbouring_minor_versions_work_together(ours: str, theirs: str, together: bool) -> None:
    assert compatible(ours, theirs) is together


def test_this_version_is_one_that_can_be_compared() -> None:
    assert compatible(version("slotcar"), version("slotcar"))
