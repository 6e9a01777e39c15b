# SPDX-License-Identifier: Apache-2.0
"""The charts of a report. Each function gives one Bokeh figure, or None where the run has nothing for it.

Contract: what a chart has does not grow with the run: times are put into `BINS` bins, trajectories are counted, and of
lanes with many spans each bin shows what took most of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from bokeh.models import ColumnDataSource, HoverTool
from bokeh.plotting import figure

from recipe.async_engine.record.events import RUN, WEIGHTS, Class
from recipe.report.account import KINDS, Kind, Piece
from recipe.report.run import Run, about

BINS = 400
WIDE_BINS = 80
MOST_LANES = 24
MOST_VERSIONS = 60
MOST_LIVES = 150
VERSIONS = "versions"
SWAPPED = (WEIGHTS, "swap")
VERSION_COLORS = ("#1b7837", "#2c7fb8", "#c51b8a", "#54278f", "#cc4c02", "#006d77")

COLORS: Mapping[Class, str] = {
    Class.TRAINING: "#1b7837",
    Class.DECODING: "#4daf6c",
    Class.PREFILL: "#8fd19e",
    Class.LOG_PROBS: "#2c7fb8",
    Class.VALIDATING: "#7fb8da",
    Class.RE_PREFILL: "#8c2d04",
    Class.RETRY: "#cc4c02",
    Class.LOST: "#662506",
    Class.WAIT_RANKS: "#3f007d",
    Class.WAIT_BATCH: "#6a51a3",
    Class.WAIT_REWARD: "#9e9ac8",
    Class.WAIT_LOG_PROBS: "#1d91c0",
    Class.WAIT_DRIVER: "#54278f",
    Class.WAIT_WEIGHTS: "#c51b8a",
    Class.WAIT_GATE: "#e0a100",
    Class.WAIT_TAIL: "#f0c75e",
    Class.WAIT_PROMPTS: "#8c6d31",
    Class.WAIT_TOOLS: "#7a0177",
    Class.WAIT_AGENTS: "#dd1c77",
    Class.WAIT_REQUESTS: "#cbc9e2",
    Class.WAIT_VALIDATION: "#3182bd",
    Class.WAIT_CHECKPOINT: "#636363",
    Class.WAIT_OTHER_SIDE: "#e7ba52",
    Class.WAIT_END: "#bdbdbd",
    Class.IDLE_PLACES: "#dadaeb",
    Class.START_UP: "#969696",
    Class.DOWN: "#000000",
    Class.NOT_KNOWN: "#ff0000",
}
ORDER = [*COLORS]


def words(what: str) -> str:
    return what.replace("_", " ")


def by_device(run: Run) -> figure:
    """Where each device's time went, in percent of its life."""
    names = [*run.account.devices][::-1]
    present = [what for what in ORDER if any(run.account.devices[name].seconds.get(what, 0) > 0 for name in names)]
    columns: dict[str, Any] = {"device": names}
    for what in present:
        of_life = [
            _share(run.account.devices[name].seconds.get(what, 0.0), run.account.devices[name].life) for name in names
        ]
        columns[what.value] = of_life
    plot = _figure("Share of each device's life", height=110 + 34 * len(names), y_range=names, x_range=(0, 100))
    bars = plot.hbar_stack(
        [what.value for what in present],
        y="device",
        height=0.8,
        color=[COLORS[what] for what in present],
        source=ColumnDataSource(columns),
        legend_label=[words(what) for what in present],
    )
    for bar, what in zip(bars, present, strict=True):
        tips = [("device", "@device"), (words(what), f"@{{{what.value}}}{{0.0}} %")]
        plot.add_tools(HoverTool(renderers=[bar], tooltips=tips))
    plot.xaxis.axis_label = "percent"
    return _with_legend(plot)


def _share(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


def over_time(run: Run, side: str) -> figure | None:
    """One side's accelerators over time, in percent."""
    edges = np.linspace(0, run.until, WIDE_BINS + 1)
    of_side = [piece for piece in run.pieces if piece.device.partition(" ")[0] == side]
    if not of_side:
        return None
    sums = _binned(of_side, edges, by=lambda piece: piece.what)
    total = sum(sums.values())
    present = [what for what in ORDER if what in sums]
    columns = {what.value: 100 * sums[what] / np.maximum(total, 1e-9) for what in present}
    columns["time"] = (edges[:-1] + edges[1:]) / 2
    plot = _time_figure(run, f"{side}: what its accelerators did over time", 260)
    plot.vbar_stack(
        [what.value for what in present],
        x="time",
        width=float(edges[1] - edges[0]),
        color=[COLORS[what] for what in present],
        source=ColumnDataSource(columns),
        legend_label=[words(what) for what in present],
    )
    plot.yaxis.axis_label = "percent"
    return _with_legend(plot)


def _binned(of_side: Iterable[Piece], edges: np.ndarray, by: Any) -> dict[Any, np.ndarray]:
    """Seconds in each bin by key."""
    sums: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros(len(edges) - 1))
    width = edges[1] - edges[0]
    last = len(edges) - 2
    for piece in of_side:
        if piece.end <= piece.start:
            continue
        bins = sums[by(piece)]
        first, end = min(last, int(piece.start / width)), min(last, int(piece.end / width))
        if first == end:
            bins[first] += (piece.end - piece.start) * piece.share
            continue
        inside = np.arange(first, end + 1)
        overlap = np.minimum(edges[inside + 1], piece.end) - np.maximum(edges[inside], piece.start)
        bins[inside] += np.maximum(overlap, 0) * piece.share
    return sums


def lanes(run: Run) -> figure:
    """What each device did most at each moment, and the versions on their way."""
    edges = np.linspace(0, run.until, BINS + 1)
    names = [*run.account.devices][:MOST_LANES]
    rows: list[tuple[str, float, float, str, str]] = []
    for name in names:
        sums = _binned([piece for piece in run.pieces if piece.device == name], edges, by=lambda piece: piece.what)
        if not sums:
            continue
        kinds = list(sums)
        seconds = np.stack([sums[what] for what in kinds])
        top = np.where(seconds.max(axis=0) > 0, seconds.argmax(axis=0), -1)
        rows += [
            (name, edges[first], edges[end], words(kinds[which]), COLORS[kinds[which]])
            for which, first, end in _runs(top)
            if which >= 0
        ]
    syncs = [event for event in run.events if event.lane == WEIGHTS]
    shown = syncs[:: max(1, len(syncs) // (4 * BINS))]
    parts = {"stage": "#fdb863", "drain": "#b2abd2", "swap": "#c51b8a", "resume": "#5e3c99"}
    rows += [
        (WEIGHTS, event.start, event.end, f"{event.what} of version {event.version}", parts.get(event.what, "#636363"))
        for event in shown
    ]
    rows += versions(run)
    order = [VERSIONS, WEIGHTS, *names[::-1]] if syncs else names[::-1]
    plot = _time_figure(run, "Lanes: what took most of each moment", 120 + 30 * len(order), y_range=order)
    names_of = ("lane", "start", "end", "what", "color")
    columns = dict(zip(names_of, zip(*rows, strict=True) if rows else ([],) * len(names_of), strict=True))
    bars = plot.hbar(y="lane", left="start", right="end", height=0.8, color="color", source=ColumnDataSource(columns))
    tips = [("lane", "@lane"), ("what", "@what"), ("from", "@start{0.00} s"), ("to", "@end{0.00} s")]
    plot.add_tools(HoverTool(renderers=[bars], tooltips=tips))
    marks = [event for event in run.events if event.lane == RUN and event.what in ("lost", "joined")]
    if marks:
        named = [event.text for event in marks]
        plot.scatter(
            x=[event.start for event in marks],
            y=[name if name in order else order[-1] for name in named],
            size=12,
            marker=["x" if event.what == "lost" else "triangle" for event in marks],
            color="#d7301f",
            line_width=3,
        )
    return plot


def versions(run: Run) -> list[tuple[str, float, float, str, str]]:
    """A lane of which version generates from when to when, several as one where they are many."""
    swaps = sorted((event.end, event.version or 0) for event in run.events if (event.lane, event.what) == SWAPPED)
    if not swaps:
        return []
    begins = [(0.0, swaps[0][1] - 1), *swaps]
    shown = begins[:: -(-len(begins) // BINS)]
    ends = [*(begin for begin, _ in shown[1:]), run.until]
    last = [*(version - 1 for _, version in shown[1:]), swaps[-1][1]]
    return [
        (VERSIONS, begin, end, f"version {first}" if first == until else f"versions {first} to {until}", color(first))
        for (begin, first), end, until in zip(shown, ends, last, strict=True)
    ]


def color(version: int) -> str:
    """Of a version, told from its neighbours."""
    return VERSION_COLORS[version % len(VERSION_COLORS)]


def one_by_one(run: Run) -> figure | None:
    """The lives of some trajectories, evenly taken, one line each, colored by the version that they began at."""
    begun = about(run.trajectories, "generating").sort_by("start")
    if not begun.num_rows:
        return None
    taken = begun.take(np.unique(np.linspace(0, begun.num_rows - 1, MOST_LIVES).astype(int)))
    ready = about(run.groups, "ready")
    waits = dict(
        zip(
            ready["group"].to_pylist(),
            zip(ready["start"].to_pylist(), ready["end"].to_pylist(), strict=True),
            strict=True,
        )
    )
    rewards = about(run.trajectories, "reward")
    keys = zip(
        rewards["group"].to_pylist(), rewards["trajectory"].to_pylist(), rewards["start"].to_pylist(), strict=True
    )
    ends = dict(zip(keys, rewards["end"].to_pylist(), strict=True))
    rows = []
    for line, life in enumerate(taken.to_pylist()):
        name = f"group {life['group']}, answer {life['trajectory']}"
        rows.append(
            (
                line,
                life["start"],
                life["end"],
                f"{name}: generating from version {life['version']}",
                color(life["version"]),
            )
        )
        scored = ends.get((life["group"], life["trajectory"], life["end"]))
        if scored is not None:
            rows.append((line, life["end"], scored, f"{name}: reward", "#9e9ac8"))
        if scored is not None and life["group"] in waits:
            rows.append((line, *waits[life["group"]], f"{name}: ready, not yet trained", "#d9d9d9"))
    plot = _time_figure(run, "Trajectories, one line each: colored while they generate", 360)
    columns = dict(zip(("line", "start", "end", "what", "color"), zip(*rows, strict=True), strict=True))
    bars = plot.hbar(y="line", left="start", right="end", height=0.8, color="color", source=ColumnDataSource(columns))
    plot.add_tools(
        HoverTool(renderers=[bars], tooltips=[("", "@what"), ("from", "@start{0.00} s"), ("to", "@end{0.00} s")])
    )
    plot.yaxis.visible = False
    return plot


def _runs(values: np.ndarray) -> list[tuple[int, int, int]]:
    """(value, first, end) of each run of equal values."""
    changes = np.flatnonzero(np.diff(values)) + 1
    firsts = np.concatenate([[0], changes])
    ends = np.concatenate([changes, [len(values)]])
    return [(int(values[first]), int(first), int(end)) for first, end in zip(firsts, ends, strict=True)]


def lives(run: Run) -> figure | None:
    """Mean seconds that trajectories spent generating, with their reward, and ready, by the version they began at."""
    stages: dict[str, dict[int, float]] = {}
    for stage, table in (("generating", run.trajectories), ("reward", run.trajectories), ("ready", run.groups)):
        rows = about(table, stage)
        if not rows.num_rows:
            continue
        rows = pa.table({"version": rows["version"], "seconds": pc.subtract(rows["end"], rows["start"])})
        means = rows.group_by("version").aggregate([("seconds", "mean")])
        stages[stage] = dict(zip(means["version"].to_pylist(), means["seconds_mean"].to_pylist(), strict=True))
    if "generating" not in stages:
        return None
    versions = sorted(stages["generating"])
    shown = versions[:: -(-len(versions) // MOST_VERSIONS)]
    columns: dict[str, Any] = {"version": shown}
    for stage, means_of in stages.items():
        columns[stage] = [means_of.get(version, 0.0) for version in shown]
    plot = _figure("A trajectory's life, by the version it began at (mean seconds)", height=260)
    step = shown[1] - shown[0] if len(shown) > 1 else 1
    colors = {"generating": "#4daf6c", "reward": "#9e9ac8", "ready": "#e0a100"}
    plot.vbar_stack(
        list(stages),
        x="version",
        width=0.8 * step,
        color=[colors[stage] for stage in stages],
        source=ColumnDataSource(columns),
        legend_label=[stage if stage != "ready" else "ready, not yet trained" for stage in stages],
    )
    plot.xaxis.axis_label, plot.yaxis.axis_label = "version", "seconds"
    return _with_legend(plot)


def histogram(title: str, label: str, values: np.ndarray, weights: np.ndarray | None = None) -> figure | None:
    """How often each value was there."""
    if not len(values):
        return None
    whole = bool(np.all(values == np.round(values)))
    spread = values.max() - values.min()
    bins = np.arange(values.min() - 0.5, values.max() + 1.5) if whole and spread < 60 else 40
    counts, edges = np.histogram(values, bins=bins, weights=weights)
    plot = _figure(title, height=220)
    source = ColumnDataSource({"left": edges[:-1], "right": edges[1:], "count": counts})
    plot.quad(left="left", right="right", bottom=0, top="count", color="#2c7fb8", line_color="#ffffff", source=source)
    plot.add_tools(HoverTool(tooltips=[(label, "@left{0.00} to @right{0.00}"), ("count", "@count{0,0}")]))
    plot.xaxis.axis_label, plot.yaxis.axis_label = label, "count"
    return plot


def histograms(run: Run) -> list[figure]:
    """Length, staleness by token, wait of ready groups, time in tools and to the reward."""
    trajectories, groups = run.trajectories, run.groups

    def seconds(table: pa.Table, what: str) -> np.ndarray:
        rows = about(table, what)
        return pc.subtract(rows["end"], rows["start"]).to_numpy(zero_copy_only=False)

    lengths = about(trajectories, "generating")["tokens"].drop_null()
    ages = np.array([int(age) for age in run.tokens["what"].to_pylist()])
    found = [
        histogram("Tokens of an answer", "tokens", lengths.to_numpy()),
        histogram("Staleness of trained tokens", "versions", ages, run.tokens["tokens"].to_numpy()),
        histogram("Wait of a ready group until it is trained", "seconds", seconds(groups, "ready")),
        histogram("From the last token to the reward", "seconds", seconds(trajectories, "reward")),
        histogram("In tools, of an answer that used some", "seconds", seconds(trajectories, "tools")),
    ]
    return [plot for plot in found if plot is not None]


def axes(run: Run) -> dict[str, list[Any]]:
    """Of each step: its number, when it ended, and the tokens trained by then."""
    tokens = np.cumsum([step.get("fully_async/sampled_tokens") or 0 for step in run.metrics])
    return {
        "step": [step.get("training/global_step") for step in run.metrics],
        "seconds since the start": [step.get("wall_seconds") for step in run.metrics],
        "tokens trained": tokens.tolist(),
    }


def curves(runs: Mapping[str, Run], keys: Sequence[str], title: str) -> list[figure]:
    """Metrics of the runs' steps against steps, time and tokens; keys that no run has are left out.

    ``runs``: by the name that their lines have, "" for one alone.
    """
    present = [key for key in keys if any(step.get(key) is not None for run in runs.values() for step in run.metrics)]
    along = {name: axes(run) for name, run in runs.items()}
    lines = [(f"{name}: {key}" if name else key, name, key) for key in present for name in runs]
    plots = []
    for label in next(iter(along.values())) if lines else ():
        plot = _figure(title, height=240)
        for number, (named, name, key) in enumerate(lines):
            metrics = runs[name].metrics
            points = [
                (x, step[key])
                for x, step in list(zip(along[name][label], metrics, strict=True))[:: max(1, len(metrics) // 2000)]
                if x is not None and step.get(key) is not None
            ]
            if points:
                xs, ys = zip(*points, strict=True)
                shade = ("#1b7837", "#c51b8a", "#2c7fb8", "#cc4c02", "#54278f", "#006d77")[number % 6]
                plot.line(xs, ys, color=shade, line_width=2, legend_label=named)
                plot.scatter(xs, ys, color=shade, size=4, legend_label=named)
        plot.xaxis.axis_label = label
        plots.append(_with_legend(plot, columns=1))
    return plots


def kind_of(what: str) -> Kind:
    return KINDS[Class(what)]


def _figure(title: str, height: int, **options: Any) -> figure:
    plot = figure(
        title=title,
        height=height,
        sizing_mode="stretch_width",
        tools="pan,xwheel_zoom,box_zoom,reset,save",
        **options,
    )
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.title.text_font_size = "15px"
    return plot


def _time_figure(run: Run, title: str, height: int, **options: Any) -> figure:
    plot = _figure(title, height, x_range=(0, run.until), **options)
    plot.xaxis.axis_label = "seconds since the run's trainer began"
    return plot


def _with_legend(plot: figure, columns: int = 6) -> figure:
    """The legend below the chart, never on its data."""
    if plot.legend:
        legend = plot.legend[0]
        legend.label_text_font_size = "11px"
        legend.ncols = columns
        plot.add_layout(legend, "below")
        plot.height += 24 * -(-len(legend.items) // columns)
    return plot
