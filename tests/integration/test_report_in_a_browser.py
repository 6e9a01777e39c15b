# SPDX-License-Identifier: Apache-2.0
"""Report and trace opened by a real browser: no error, all drawn, and the report by keyboard and on narrow screens.

Needs Chromium (`apt install chromium`) and Playwright's driver (`pip install playwright`), which no lock has: a machine
with Python packages alone has no browser. It is skipped there, in words.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_report import CHARTS, run_of
from test_trace import ANSWERS, STEPS, record, step, traced

from recipe.report.__main__ import main
from tools.pictures import CHROMIUM, open_trace, perfetto_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="NOT TESTED: no Chromium here (apt install chromium)"),
]

DRAWN = """() => {
  return [...Bokeh.index.roots].filter(view => view.model.type === 'Figure').map(view => ({
    title: view.model.title.text,
    rows: view.model.renderers.map(r => r.data_source ? r.data_source.get_length() : 0),
    width: view.el.getBoundingClientRect().width,
  }));
}"""
CONTRAST = """() => {
  const channel = c => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const light = c => { const [r, g, b] = c.match(/[0-9.]+/g).map(Number);
    return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b); };
  const below = e => { for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor; if (!c.endsWith(', 0)')) return c; } return 'rgb(255, 255, 255)'; };
  return [...document.querySelectorAll('h1,h2,p,li,td,th,a,code')].filter(e => e.textContent.trim()).map(e => {
    const a = light(getComputedStyle(e).color), b = light(below(e));
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); });
}"""

TRACKS = "() => [...document.querySelectorAll('.pf-track__title-popup')].map(e => e.textContent)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: pip install playwright")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    first, second = (tmp_path_factory.mktemp("runs") / name for name in ("before", "after"))
    run_of(first, settings={"max_staleness": 1}).close()
    run_of(second, settings={"max_staleness": 2}, waits=0.5).close()
    return first, second


def opened(browser: Any, path: Path, width: int = 1280) -> tuple[Any, list[str]]:
    """The page, and what its console has of errors and warnings."""
    page = browser.new_page(viewport={"width": width, "height": 800})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(path.as_uri())
    page.wait_for_function("() => document.querySelectorAll('.bk-Figure').length > 0")
    page.wait_for_timeout(1000)
    return page, said


@pytest.mark.parametrize("width", [1280, 360])
def test_every_chart_is_drawn_with_its_data_and_nothing_is_complained_of(
    browser: Any, folders: tuple[Path, Path], width: int
) -> None:
    assert main([str(folders[0])]) == 0
    page, said = opened(browser, folders[0] / "report.html", width)
    assert said == []
    drawn = page.evaluate(DRAWN)
    assert len(drawn) == CHARTS
    assert all(sum(chart["rows"]) > 0 for chart in drawn), drawn
    # Nothing is wider than the screen.
    assert all(0 < chart["width"] <= width for chart in drawn), drawn
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width


def test_words_are_told_from_what_is_behind_them(browser: Any, folders: tuple[Path, Path]) -> None:
    """As WCAG AA asks of text."""
    assert main([str(folders[0])]) == 0
    page, _ = opened(browser, folders[0] / "report.html")
    ratios = page.evaluate(CONTRAST)
    assert len(ratios) > 50
    assert min(ratios) >= 4.5


def test_every_section_and_chart_is_reached_by_the_keyboard(browser: Any, folders: tuple[Path, Path]) -> None:
    assert main([str(folders[0])]) == 0
    page, _ = opened(browser, folders[0] / "report.html")
    reached, links = set(), 0
    for _ in range(400):
        page.keyboard.press("Tab")
        name, tag, outlined = page.evaluate(
            "() => { const at = document.activeElement, e = at.closest('.chart') || at; return ["
            "e.getAttribute('aria-label') || e.textContent, e.tagName, getComputedStyle(e).outlineStyle !== 'none']; }"
        )
        if tag == "BODY":
            break
        assert outlined, name
        links += tag == "A"
        reached.add(name)
    titles = {chart["title"] for chart in page.evaluate(DRAWN)}
    assert titles <= reached
    assert links == page.evaluate("() => document.querySelectorAll('section').length")
    page.focus("nav a:last-of-type")
    page.keyboard.press("Enter")
    assert page.evaluate("() => document.querySelector(location.hash).tagName") == "SECTION"


def test_two_runs_side_by_side_are_drawn(browser: Any, folders: tuple[Path, Path]) -> None:
    assert main([str(each) for each in folders]) == 0
    page, said = opened(browser, folders[1] / "compared.html", 360)
    assert said == []
    assert all(sum(chart["rows"]) > 0 for chart in page.evaluate(DRAWN))
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360


# What Perfetto's page complains of without a network and in each trace: its vendor's hosts, a trace processor of one's
# own, and what its WebAssembly misses of a system.
OF_THE_PAGE = ("Content-Security-Policy", "Failed to load resource", "LiveReload", "__syscall_", "Loading trace")


def test_perfettos_page_opens_a_trace_and_has_its_tracks_in_order(browser: Any, tmp_path: Path) -> None:
    record(tmp_path / "run", [step(number) for number in range(STEPS)]).close()
    said: list[str] = []
    with perfetto_page(traced(tmp_path / "run")) as address:
        page = browser.new_page(viewport={"width": 1280, "height": 2000})
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        open_trace(page, address)
        names = page.evaluate(TRACKS)
    assert [line for line in said if not any(known in line for known in OF_THE_PAGE)] == []
    begin = names.index("accelerators")
    assert names[begin:] == [
        "accelerators",
        *("trainer (2 accelerators)", "phases", "account", "age of tokens, mean of a batch", "batches 1"),
        *("rollout 0", "decoding", "idle_places", "wait_gate", "places in use"),
        "run",
        *("weight syncs", "versions 1", "why nothing begins"),
        *("prompt groups", "groups 1", "groups 2"),
        *("trajectories", *(f"trajectory {n + 1}" for n in range(2 * ANSWERS))),
    ]
