"""What holds for every property test of the units."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says more of the machine than of the code.
settings.register_profile("slotcar", deadline=None)
settings.load_profile("slotcar")
