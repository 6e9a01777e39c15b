# SPDX-License-Identifier: Apache-2.0
"""The report's page: one HTML file with everything in it, which asks no network for anything.

Shown by tests/integration/test_report.py.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from bokeh.embed import components
from bokeh.resources import Resources

from recipe.async_engine.record.events import LOG_PROBS, ROLLOUT, RUN, TRAINER, Class
from recipe.report import charts
from recipe.report.account import KINDS, Kind
from recipe.report.advice import sides, useful_share
from recipe.report.run import Run

REWARDS = ("critic/rewards/mean", "critic/score/mean")
RATIOS = ("rollout_corr/rollout_is_eff_sample_size", "rollout_corr/rollout_is_mean", "rollout_corr/kl")
STALENESS = ("fully_async/staleness/token_mean", "fully_async/staleness/oldest_token_max")

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
"""A heading and the charts below it."""


def write(run: Run, path: Path) -> None:
    """Write the report of ``run`` to ``path``."""
    top = f"<p>{escape(what_happened(run))}</p>{left_out(run)}{_alarms(run)}{advice_list(run)}{_tables(run)}"
    path.write_text(document(f"Report of {run.name}", top, _sections(run), _news(run)), encoding="utf-8")


def document(title: str, top: str, sections: list[Section], bottom: str = "") -> str:
    """A page with everything in it: ``top``, links to the sections, their charts, ``bottom``."""
    script, places = components([plot for _, of_section in sections for plot in of_section])
    of_plot = iter(places)
    links = "".join(f'<a href="#{_anchor(heading)}">{escape(heading)}</a> ' for heading, _ in sections)
    body = "".join(
        f'<section id="{_anchor(heading)}"><h2>{escape(heading)}</h2>'
        f'<div class="{"columns" if len(of_section) > 2 else "stacked"}">'
        + "".join(
            f'<figure class="chart" aria-label="{escape(plot.title.text)}">{next(of_plot)}</figure>'
            for plot in of_section
        )
        + "</div></section>"
        for heading, of_section in sections
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style>{Resources(mode='inline', components=['bokeh']).render()}</head><body><main>"
        f'<h1>{escape(title)}</h1>{top}<nav aria-label="Charts">{links}</nav>{body}{bottom}'
        f"</main>{script}</body></html>\n"
    )


def _anchor(heading: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in heading.lower())


def brief(run: Run) -> list[str]:
    """The three lines that matter: what happened, what took the accelerators' time, what to change."""
    total = sum(run.account.total.values()) or 1.0
    top = sorted(run.account.total.items(), key=lambda item: -item[1])[:5]
    took = ", ".join(f"{charts.words(what)} {seconds / total:.0%}" for what, seconds in top)
    # What became of the tokens only the run itself could say.
    closed = run.account.closes and (run.summary.get("account") or {}).get("closes", True)
    closes = "" if closed else "; the account does not close"
    advised = f"{run.advice[0].reason} ({run.advice[0].share:.0%}): {run.advice[0].change}" if run.advice else "none"
    return [what_happened(run), f"accelerators: {took}{closes}", f"advice: {advised}"]


def what_happened(run: Run) -> str:
    """The run in two sentences."""
    error = run.summary.get("error") or {}
    how = f"failed ({error.get('name')}: {error.get('message')})" if run.state == "failed" else run.state
    first = f"The run {how} after {steps(run)} steps and {run.until:.1f} s"
    if run.later_error is not None:
        first += f" (a later start had no record: {run.later_error})"
    if rang := run.alarms:
        first += f", with alarms ({', '.join(f'{name} {count}' for name, (count, _) in rang.items())})"
    if fallbacks := (run.summary.get("rehearsal") or {}).get("fallbacks"):
        first += f", with {', '.join(fallbacks)} since its rehearsal"
    by_side = sides(run.account)
    shares = ", ".join(f"{side} {100 * useful_share(seconds):.0f}%" for side, seconds in by_side.items())
    lost = {what: seconds for what, seconds in run.account.total.items() if _is_loss(what)}
    if not lost:
        return f"{first}. Useful, without the start-up: {shares}."
    worst = max(lost, key=lambda what: lost[what])
    total = sum(run.account.total.values())
    return (
        f"{first}. Useful, without the start-up: {shares}; most of the rest was {charts.words(worst)}, "
        f"{100 * lost[worst] / total:.0f}% of all accelerators' time."
    )


def left_out(run: Run) -> str:
    """What is damaged in the run's folder, as a list."""
    notes = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
    return f"<h2>Not in this report</h2><ul>{notes}</ul>" if notes else ""


def steps(run: Run) -> int:
    return max((int(step.get("training/global_step") or 0) for step in run.metrics), default=0)


def steps_of_start(run: Run) -> int:
    """Without those of earlier starts in the folder, which the record and its account do not have."""
    resumed = (run.summary.get("resumed") or {}).get("step")
    if resumed is not None:
        return steps(run) - int(resumed)
    return min(steps(run), len(run.tokens["start"].unique()))


def _is_loss(what: str) -> bool:
    return KINDS[Class(what)] not in (Kind.USEFUL, Kind.START_UP)


def learned(*runs: Run) -> list[str]:
    """The metrics that show what was learned."""
    names = {key for run in runs for step in run.metrics for key in step}
    return [*REWARDS, *sorted(key for key in names if key.startswith("val-core/") and "/mean@" in key)]


def _sections(run: Run) -> list[Section]:
    time_charts = [charts.over_time(run, side) for side in (TRAINER, ROLLOUT, LOG_PROBS)]
    lives = [charts.one_by_one(run), charts.lives(run)]
    sections = [
        ("Where each device's time went", [charts.by_device(run)]),
        ("Over time", [plot for plot in time_charts if plot is not None]),
        ("Lanes", [charts.lanes(run)]),
        ("Trajectories by version", [plot for plot in lives if plot is not None]),
        ("Lengths, staleness and waits", charts.histograms(run)),
        ("Learning", charts.curves({"": run}, learned(run), "Reward and validation")),
        ("Staleness", charts.curves({"": run}, STALENESS, "Staleness in versions")[:1]),
        ("Ratios to the sampling policy", charts.curves({"": run}, RATIOS, "Ratios and effective sample size")[:1]),
    ]
    return [(title, plots) for title, plots in sections if plots]


def advice_list(run: Run, most: int = 6) -> str:
    """What to change, as a list."""
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


def _tables(run: Run) -> str:
    total = sum(run.account.total.values()) or 1.0
    rows = "".join(
        f'<tr><td><span class="swatch" style="background:{charts.COLORS[Class(what)]}"></span> '
        f"{escape(charts.words(what))}</td><td>{charts.kind_of(what).value.replace('_', ' ')}</td>"
        f'<td class="number">{seconds:.1f}</td><td class="number">{100 * seconds / total:.1f}%</td></tr>'
        for what, seconds in sorted(run.account.total.items(), key=lambda item: -item[1])
    )
    closes = "close" if all(device.closes for device in run.account.devices.values()) else "do not close"
    tokens = (run.summary.get("account") or {}).get("tokens")
    of_tokens = ""
    if tokens:
        cells = "".join(
            f'<tr><td>{escape(charts.words(name))}</td><td class="number">{count:,}</td></tr>'
            for name, count in tokens.items()
        )
        of_tokens = f"<h2>Tokens</h2><table><tr><th>what</th><th>tokens</th></tr>{cells}</table>"
    return (
        f"<h2>The account: accelerator-seconds, which {closes}</h2>"
        '<div class="wide" tabindex="0" role="region" aria-label="The account"><table>'
        f"<tr><th>class</th><th>kind</th><th>seconds</th><th>share</th></tr>{rows}</table></div>{of_tokens}"
    )


def _alarms(run: Run) -> str:
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="number">{count}</td><td>{escape(said)}</td></tr>'
        for name, (count, said) in run.alarms.items()
    )
    return f"<h2>Alarms</h2><table><tr><th>alarm</th><th>times</th><th>what</th></tr>{rows}</table>" if rows else ""


def _news(run: Run) -> str:
    news = [event for event in run.events if event.lane == RUN and event.what in ("lost", "joined")]
    if not news:
        return ""
    rows = "".join(
        f'<tr><td class="number">{event.start:.1f} s</td><td>{escape(str(event.text))}</td><td>{event.what}</td></tr>'
        for event in news[:200]
    )
    return f"<h2>Deaths and replacements</h2><table><tr><th>when</th><th>device</th><th>what</th></tr>{rows}</table>"
