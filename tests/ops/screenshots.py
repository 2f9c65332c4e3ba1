"""Takes the pictures of the status page that the documentation shows: `python -m tests.ops.screenshots`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from tests.ops.browser import Browser, browser
from tests.ops.scene import NAMES, Scene, staged

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
_MOST_BYTES = 200_000
_MAPPINGS, _PAUSE_SECONDS = 24, 1.5
SHOTS = {
    "status-light": (1440, 1180, "light"),
    "status-dark": (1440, 1180, "dark"),
    "status-narrow": (390, 1400, "light"),
}


def live(scene: Scene) -> None:
    """Lets half a minute of work pass, so that there is a time line."""
    for number in range(_MAPPINGS):
        time.sleep(_PAUSE_SECONDS)
        scene.second.set_mapping([NAMES[number * 5 % len(NAMES)]], load=True)


def take(found: Browser, url: str, folder: Path) -> None:
    """Writes one PNG for each of SHOTS."""
    for name, (width, height, scheme) in SHOTS.items():
        found.look(width, height, scheme)
        found.open(url)
        path = folder / f"{name}.png"
        path.write_bytes(found.driver.get_screenshot_as_png())
        with Image.open(path) as image:
            few = image.convert("RGB").quantize(256, Image.Quantize.MEDIANCUT, kmeans=1, dither=Image.Dither.NONE)
            few.save(path, optimize=True)
        assert path.stat().st_size < _MOST_BYTES, path


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work, staged(Path(work)) as scene, browser(Path(work)) as found:
        live(scene)
        take(found, scene.url, folder)


if __name__ == "__main__":
    main()
