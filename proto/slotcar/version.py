"""Which versions of client and server work together."""

from __future__ import annotations

import re

_NUMBER = "(0|[1-9][0-9]{0,5})"
_VERSION = re.compile(rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}([.+a-z-][0-9a-z.+-]{{0,40}})?")
WANTED = "the same major number and a minor number that differs by at most 1"


def compatible(ours: str, theirs: str) -> bool:
    """Whether the versions have the same major number and neighbouring minor numbers; an empty one is not compared."""
    if not ours or not theirs:
        return True
    a, b = _VERSION.fullmatch(ours), _VERSION.fullmatch(theirs)
    if a is None or b is None:
        return False
    return a[1] == b[1] and abs(int(a[2]) - int(b[2])) <= 1
