# SPDX-License-Identifier: Apache-2.0
"""Takes a picture of a report: ``python tools/report_picture.py runs/demo/report.html docs/report.png``.

Needs Chromium (``apt install chromium``) and Pillow, which no lock has.
"""

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LIMIT_S = 120
COLORS = 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--height", type=int, default=1200, help="of the page's top, in pixels")
    options = parser.parse_args()
    browser = next((found for found in map(shutil.which, BROWSERS) if found), None)
    if browser is None:
        sys.stderr.write(f"none of {', '.join(BROWSERS)} is installed\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "taken.png"
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            # Charts are drawn by scripts.
            "--virtual-time-budget=10000",
            f"--user-data-dir={folder}/profile",
            f"--window-size={options.width},{options.height}",
            f"--screenshot={taken}",
            options.page.resolve().as_uri(),
        ]
        subprocess.run(command, check=True, timeout=LIMIT_S, capture_output=True)
        picture = io.BytesIO()
        Image.open(taken).convert("RGB").quantize(COLORS).save(picture, "PNG", optimize=True)
    options.picture.write_bytes(picture.getvalue())
    return 0


if __name__ == "__main__":
    sys.exit(main())
