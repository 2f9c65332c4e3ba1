"""Makes a base fit for a user without rights: no file gives any, and the user has folders for sockets and caches."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

USER = 65532
# Where they go if nothing is mounted there.
FOLDERS = (Path("/run/slotcar"), Path("/var/cache/slotcar"))


def privileged(root: Path) -> Iterator[Path]:
    """The files of this file system that run with their owner's or group's rights."""
    device = root.stat().st_dev
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if Path(folder, name).lstat().st_dev == device]
        for path in (Path(folder, name) for name in names):
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
                yield path


def harden() -> None:
    """Takes setuid and setgid from all files, and makes FOLDERS."""
    for path in privileged(Path("/")):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~(stat.S_ISUID | stat.S_ISGID))
    for path in FOLDERS:
        path.mkdir(parents=True)
        os.chown(path, USER, USER)


if __name__ == "__main__":
    harden()
