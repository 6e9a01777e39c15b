# SPDX-License-Identifier: Apache-2.0
"""Writes the HTML page of a run, or the page that compares two runs. A page is one file and needs no network.

Shown by tests/integration/test_report.py and test_report_in_a_browser.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bokeh.embed import components
from bokeh.resources import Resources

from recipe.async_engine.record.events import JOINED, LOG_PROBS, LOST, ROLLOUT, RUN, TRAINER, Class
from recipe.report import charts
from recipe.report.account import KINDS, Kind
from recipe.report.advice import sides, useful_share
from recipe.report.run import Run

REWARDS = ("critic/rewards/mean", "critic/score/mean")
RATIOS = ("rollout_corr/rollout_is_eff_sample_size", "rollout_corr/rollout_is_mean", "rollout_corr/kl")
STALENESS = ("fully_async/staleness/token_mean", "fully_async/staleness/oldest_token_max")
MOST_NEWS = 200

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto; max-width: 1200px;
  padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem .2rem 0; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; } .chart { min-width: 0; overflow: hidden; margin: 0; } nav a { margin-right: 1rem; }
.advice li { margin-bottom: .8rem; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 1rem; }
code { background: #f0f0f0; padding: .1rem .3rem; overflow-wrap: anywhere; }
.swatch { display: inline-block; width: .9em; height: .9em; }
a:focus-visible, [tabindex]:focus-visible, .chart:focus-within { outline: 3px solid #1a1a1a; }
"""

Section = tuple[str, list[Any]]
"""A section of a page: a heading, and the charts below it."""


def write(run: Run, path: Path) -> None:
    top = f"<p>{escape(what_happened(run))}</p>{_left_out(run)}{_alarms(run)}{_advice(run)}{_account(run)}"
    path.write_text(_document(f"Report of {run.name}", top, _sections(run), _news(run)), encoding="utf-8")


def write_comparison(first: Run, second: Run, path: Path) -> None:
    """Write a comparison of two runs to ``path``: settings, accelerator time, tokens and learning curves."""
    names = [first.name, second.name]
    if names[0] == names[1]:
        names = [f"A: {names[0]}", f"B: {names[1]}"]
    runs = dict(zip(names, (first, second), strict=True))
    said = "".join(
        f"<p><b>{escape(name)}</b>: {escape(what_happened(run))}</p>{_left_out(run)}" for name, run in runs.items()
    )
    advice = "".join(f"<div><h2>{escape(name)}</h2>{_advice(run, most=3)}</div>" for name, run in runs.items())
    figures = [[escape(name), *(figure(run) for run in runs.values())] for name, figure in FIGURES.items()]
    top = (
        f"{said}{_table('In figures', ['', *runs], figures)}{_settings(runs)}{_account_a_step(runs)}"
        f'<div class="columns">{advice}</div>'
    )
    by_device = []
    for name, run in runs.items():
        plot = charts.by_device(run)
        plot.title.text = f"{name}: share of each device's life"
        by_device.append(plot)
    sections = [("Where each device's time went", by_device), *_learning(runs)]
    path.write_text(_document(" and ".join(names), top, sections), encoding="utf-8")


def brief(run: Run) -> list[str]:
    """Return three lines: how the run ended, what took most accelerator time, and the first piece of advice."""
    total = sum(run.account.total.values()) or 1.0
    top = sorted(run.account.total.items(), key=lambda item: -item[1])[:5]
    took = ", ".join(f"{charts.words(what)} {seconds / total:.0%}" for what, seconds in top)
    # `run.account` was computed without token counts. Only the run's summary says whether the token counts add up.
    closed = run.account.closes and (run.summary.get("account") or {}).get("closes", True)
    closes = "" if closed else "; the account does not close"
    advised = f"{run.advice[0].reason} ({run.advice[0].share:.0%}): {run.advice[0].change}" if run.advice else "none"
    return [what_happened(run), f"accelerators: {took}{closes}", f"advice: {advised}"]


def what_happened(run: Run) -> str:
    """Return two sentences: how the run ended, and which share of the accelerator time was useful."""
    error = run.summary.get("error") or {}
    how = f"failed ({error.get('name')}: {error.get('message')})" if run.state == "failed" else run.state
    first = f"The run {how} after {_steps(run)} steps and {run.until:.1f} s"
    if run.later_error is not None:
        first += f" (a later start wrote no events: {run.later_error})"
    if rang := run.alarms:
        first += f", with alarms ({', '.join(f'{name} {count}' for name, (count, _) in rang.items())})"
    if fallbacks := (run.summary.get("rehearsal") or {}).get("fallbacks"):
        first += f", with {', '.join(fallbacks)} since its rehearsal"
    useful = f"{first}. Useful, without the start-up: {_useful(run)}"
    spent = run.account.total
    lost = [what for what in spent if KINDS[Class(what)] not in (Kind.USEFUL, Kind.START_UP)]
    if not lost:
        return f"{useful}."
    worst = max(lost, key=lambda what: spent[what])
    share = 100 * spent[worst] / sum(spent.values())
    return f"{useful}; most of the rest was {charts.words(worst)}, {share:.0f}% of all accelerators' time."


def _useful(run: Run) -> str:
    return ", ".join(f"{side} {useful_share(seconds):.0%}" for side, seconds in sides(run.account).items())


def _document(title: str, top: str, sections: Iterable[Section], bottom: str = "") -> str:
    """Return an HTML page: ``top``, links to the sections, the sections themselves, and ``bottom``.

    Sections without charts are left out.
    """
    shown = [(heading, plots) for heading, plots in sections if plots]
    script, places = components([plot for _, plots in shown for plot in plots])
    of_plot = iter(places)
    links, body = "", ""
    for heading, plots in shown:
        anchor = "".join(letter if letter.isalnum() else "-" for letter in heading.lower())
        links += f'<a href="#{anchor}">{escape(heading)}</a> '
        drawn = "".join(
            f'<figure class="chart" aria-label="{escape(plot.title.text)}">{next(of_plot)}</figure>' for plot in plots
        )
        layout = "columns" if len(plots) > 2 else "stacked"
        body += f'<section id="{anchor}"><h2>{escape(heading)}</h2><div class="{layout}">{drawn}</div></section>'
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style>{Resources(mode='inline', components=['bokeh']).render()}</head><body><main>"
        f'<h1>{escape(title)}</h1>{top}<nav aria-label="Charts">{links}</nav>{body}{bottom}'
        f"</main>{script}</body></html>\n"
    )


def _table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = True) -> str:
    """Return an HTML table with a heading above it.

    The first cell of each row is HTML. The other cells are text; with ``numbers``, they are right-aligned.
    """
    kind = ' class="number"' if numbers else ""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        f"<tr><td>{first}</td>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell in cells) + "</tr>"
        for first, *cells in rows
    )
    return (
        f'<h2>{escape(caption)}</h2><div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><tr>{head}</tr>{body}</table></div>"
    )


def _named(what: str) -> str:
    color = charts.COLORS[Class(what)]
    return f'<span class="swatch" style="background:{color}"></span> {escape(charts.words(what))}'


def _learning(runs: Mapping[str, Run]) -> list[Section]:
    names = {key for run in runs.values() for step in run.metrics for key in step}
    learned = [*REWARDS, *sorted(key for key in names if key.startswith("val-core/") and "/mean@" in key)]
    return [
        ("Learning", charts.curves(runs, learned, "Reward and validation")),
        ("Staleness", charts.curves(runs, STALENESS, "Staleness in versions")[:1]),
    ]


def _sections(run: Run) -> list[Section]:
    alone = {"": run}
    over_time = [charts.over_time(run, side) for side in (TRAINER, ROLLOUT, LOG_PROBS)]
    trajectories = charts.one_by_one(run)
    return [
        ("Where each device's time went", [charts.by_device(run)]),
        ("Over time", [plot for plot in over_time if plot is not None]),
        ("Lanes", [charts.lanes(run)]),
        ("Trajectories by version", [] if trajectories is None else [trajectories]),
        ("Lengths, staleness and waits", charts.histograms(run)),
        *_learning(alone),
        ("Ratios to the sampling policy", charts.curves(alone, RATIOS, "Ratios and effective sample size")[:1]),
    ]


def _left_out(run: Run) -> str:
    """Return an HTML list of notes on the damaged data in the run's folder that was left out of the report."""
    notes = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
    return f"<h2>Not in this report</h2><ul>{notes}</ul>" if notes else ""


def _advice(run: Run, most: int = 6) -> str:
    """Return at most ``most`` pieces of advice as an HTML list."""
    if not run.advice:
        return "<h2>Advice</h2><p>Nothing stands out.</p>"
    items = "".join(
        f"<li><b>{escape(charts.words(advice.what))}{f' of {advice.device}' if advice.device else ''}</b>: "
        f"{100 * advice.share:.0f}% of all accelerators' time without the start-up, {advice.seconds:.1f} "
        f"accelerator-seconds. {escape(advice.reason[:1].upper() + advice.reason[1:])}."
        f"<br>Change: <code>{escape(advice.change)}</code>; expected: at most {100 * advice.share:.0f}% less time.</li>"
        for advice in run.advice[:most]
    )
    return f'<h2>Advice, the greatest loss first</h2><ol class="advice">{items}</ol>'


def _account(run: Run) -> str:
    total = sum(run.account.total.values()) or 1.0
    rows = [
        [_named(what), charts.words(KINDS[Class(what)]), f"{seconds:.1f}", f"{100 * seconds / total:.1f}%"]
        for what, seconds in sorted(run.account.total.items(), key=lambda item: -item[1])
    ]
    closes = "close" if all(device.closes for device in run.account.devices.values()) else "do not close"
    heading = f"The account: accelerator-seconds, which {closes}"
    tokens = (run.summary.get("account") or {}).get("tokens") or {}
    of_tokens = [[escape(charts.words(name)), f"{count:,}"] for name, count in tokens.items()]
    found = _table(heading, ["class", "kind", "seconds", "share"], rows)
    return found + (_table("Tokens", ["what", "tokens"], of_tokens) if of_tokens else "")


def _alarms(run: Run) -> str:
    rows = [[escape(name), str(count), said] for name, (count, said) in run.alarms.items()]
    return _table("Alarms", ["alarm", "times", "what"], rows, numbers=False) if rows else ""


def _news(run: Run) -> str:
    news = [event for event in run.events if event.lane == RUN and event.what in (LOST, JOINED)]
    rows = [[f"{event.start:.1f} s", str(event.text), event.what] for event in news[:MOST_NEWS]]
    return _table("Deaths and replacements", ["when", "device", "what"], rows, numbers=False) if rows else ""


def _steps(run: Run) -> int:
    return max((int(step.get("training/global_step") or 0) for step in run.metrics), default=0)


def _steps_of_start(run: Run) -> int:
    """Return the number of steps that the newest launch has trained. The report is about this launch alone."""
    resumed = (run.summary.get("resumed") or {}).get("step")
    if resumed is not None:
        return _steps(run) - int(resumed)
    return min(_steps(run), len(run.tokens["start"].unique()))


def _running_s(run: Run) -> float:
    """Return the seconds of the run without its start-up, which ends as soon as one device has started."""
    starts = (device.seconds.get(Class.START_UP, 0.0) for device in run.account.devices.values())
    return run.until - min(starts, default=0.0)


def _score(run: Run) -> str:
    found = run.summary.get("validation") or {}
    first, last = found.get("first"), found.get("last")
    return "not measured" if first is None or last is None else f"{first:.3f} -> {last:.3f}"


def _tokens_a_second(run: Run) -> str:
    tokens = sum(count or 0 for count in run.tokens["tokens"].to_pylist())
    return f"{tokens / _running_s(run):.0f}" if _running_s(run) else ""


FIGURES: Mapping[str, Callable[[Run], str]] = {
    "steps": lambda run: str(_steps(run)),
    "seconds without the start-up": lambda run: f"{_running_s(run):.1f}",
    "seconds a step": lambda run: f"{_running_s(run) / _steps_of_start(run):.3f}" if _steps_of_start(run) else "",
    "trained tokens a second": _tokens_a_second,
    "validation score": _score,
    "useful, without the start-up": _useful,
    "staleness of the oldest token, max": lambda run: str((run.summary.get("staleness") or {}).get("max", "")),
}


def _settings(runs: Mapping[str, Run]) -> str:
    first, second = (run.settings for run in runs.values())
    rows = [
        [f"<code>{escape(name)}</code>", str(first.get(name)), str(second.get(name))]
        for name in sorted({*first, *second})
        if first.get(name) != second.get(name)
    ]
    return _table("Settings that differ, among those that advice uses", ["", *runs], rows)


def _account_a_step(runs: Mapping[str, Run]) -> str:
    """Return a table of the accelerator-seconds per step that each run spent in each class of the time account.

    Seconds per step can be compared between runs of different lengths.
    """
    first, second = (
        {what: seconds / max(1, _steps_of_start(run)) for what, seconds in run.account.total.items()}
        for run in runs.values()
    )
    spent = {what: (first.get(what, 0.0), second.get(what, 0.0)) for what in charts.COLORS if what != Class.START_UP}
    rows = [
        [_named(what), f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}"]
        for what, (before, after) in sorted(spent.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
        if before or after
    ]
    caption = "Accelerator-seconds a step, without the start-up; the greatest difference first"
    return _table(caption, ["class", *runs, "difference"], rows)
