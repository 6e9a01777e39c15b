# SPDX-License-Identifier: Apache-2.0
"""Two runs side by side on one page: what differs between them in settings, time, tokens and learning.

Shown by tests/integration/test_report.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path

from recipe.async_engine.record.events import Class
from recipe.report import charts
from recipe.report.advice import sides, useful_share
from recipe.report.page import STALENESS, advice_list, document, learned, left_out, steps, steps_of_start, what_happened
from recipe.report.run import Run


def write(first: Run, second: Run, path: Path) -> None:
    """Write the comparison to ``path``."""
    names = [first.name, second.name]
    if names[0] == names[1]:
        names = [f"A: {names[0]}", f"B: {names[1]}"]
    runs = dict(zip(names, (first, second), strict=True))
    said = "".join(
        f"<p><b>{escape(name)}</b>: {escape(what_happened(run))}</p>{left_out(run)}" for name, run in runs.items()
    )
    advice = "".join(f"<div><h2>{escape(name)}</h2>{advice_list(run, most=3)}</div>" for name, run in runs.items())
    top = f'{said}{_figures(runs)}{_settings(runs)}{_account(runs)}<div class="columns">{advice}</div>'
    by_device = []
    for name, run in runs.items():
        plot = charts.by_device(run)
        plot.title.text = f"{name}: share of each device's life"
        by_device.append(plot)
    sections = [
        ("Where each device's time went", by_device),
        ("Learning", charts.curves(runs, learned(first, second), "Reward and validation")),
        ("Staleness", charts.curves(runs, STALENESS, "Staleness in versions")[:1]),
    ]
    text = document(" and ".join(names), top, [(title, plots) for title, plots in sections if plots])
    path.write_text(text, encoding="utf-8")


def _table(caption: str, heads: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        f"<tr><td>{row[0]}</td>" + "".join(f'<td class="number">{escape(cell)}</td>' for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return (
        f'<h2>{escape(caption)}</h2><div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><tr>{head}</tr>{body}</table></div>"
    )


def running_s(run: Run) -> float:
    """Seconds of the run without its start-up: from the first device's end of it."""
    starts = (device.seconds.get(Class.START_UP, 0.0) for device in run.account.devices.values())
    return run.until - min(starts, default=0.0)


def _tokens(run: Run) -> float:
    return sum(count or 0 for count in run.tokens["tokens"].to_pylist())


def _score(run: Run) -> str:
    found = run.summary.get("validation") or {}
    first, last = found.get("first"), found.get("last")
    return "not measured" if first is None or last is None else f"{first:.3f} -> {last:.3f}"


FIGURES: Mapping[str, Callable[[Run], str]] = {
    "steps": lambda run: str(steps(run)),
    "seconds without the start-up": lambda run: f"{running_s(run):.1f}",
    "seconds a step": lambda run: f"{running_s(run) / steps_of_start(run):.3f}" if steps_of_start(run) else "",
    "trained tokens a second": lambda run: f"{_tokens(run) / running_s(run):.0f}" if running_s(run) else "",
    "validation score": _score,
    "useful, without the start-up": lambda run: ", ".join(
        f"{side} {useful_share(seconds):.0%}" for side, seconds in sides(run.account).items()
    ),
    "staleness of the oldest token, max": lambda run: str((run.summary.get("staleness") or {}).get("max", "")),
}


def _figures(runs: Mapping[str, Run]) -> str:
    rows = [[escape(name), *(figure(run) for run in runs.values())] for name, figure in FIGURES.items()]
    return _table("In figures", ["", *runs], rows)


def _settings(runs: Mapping[str, Run]) -> str:
    first, second = (run.settings for run in runs.values())
    rows = [
        [f"<code>{escape(name)}</code>", str(first.get(name)), str(second.get(name))]
        for name in sorted({*first, *second})
        if first.get(name) != second.get(name)
    ]
    return _table("Settings that differ, of those that advice names", ["", *runs], rows)


def _account(runs: Mapping[str, Run]) -> str:
    """Accelerator-seconds a step by class, since two runs hardly have as many steps."""
    totals = []
    for run in runs.values():
        count = max(1, steps_of_start(run))
        totals.append({what: seconds / count for what, seconds in run.account.total.items()})
    first, second = totals
    present = [
        what for what in charts.ORDER if (first.get(what, 0.0) or second.get(what, 0.0)) and what != Class.START_UP
    ]
    present.sort(key=lambda what: -abs(second.get(what, 0.0) - first.get(what, 0.0)))
    rows = [
        [
            f'<span class="swatch" style="background:{charts.COLORS[what]}"></span> {escape(charts.words(what))}',
            f"{first.get(what, 0.0):.3f}",
            f"{second.get(what, 0.0):.3f}",
            f"{second.get(what, 0.0) - first.get(what, 0.0):+.3f}",
        ]
        for what in present
    ]
    return _table(
        "Accelerator-seconds a step, without the start-up; the greatest difference first",
        ["class", *runs, "difference"],
        rows,
    )
