# SPDX-License-Identifier: Apache-2.0
"""The charts of a report, as Bokeh figures; a function returns None if the run has no data for its chart.

Contract: the size of a chart does not grow with the run. Time is divided into bins, each of which shows the class that
took most of its time; distributions are histograms; and only a sample of the trajectories is drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from bokeh.models import ColumnDataSource, HoverTool
from bokeh.plotting import figure

from recipe.async_engine.record.events import JOINED, LOST, RUN, WEIGHTS, Class
from recipe.report.account import Piece
from recipe.report.run import Run, about

BINS = 400
WIDE_BINS = 80
MOST_LANES = 24
MOST_LIVES = 150
MOST_POINTS = 2000
VERSIONS = "versions"
HUES = ("#1b7837", "#2c7fb8", "#c51b8a", "#54278f", "#cc4c02", "#006d77")
"""Colors for versions and for lines. They are used in rotation."""
PARTS_OF_A_SYNC = {"stage": "#fdb863", "drain": "#b2abd2", "swap": "#c51b8a", "resume": "#5e3c99"}

COLORS: Mapping[Class, str] = {
    Class.TRAINING: "#1b7837",
    Class.DECODING: "#4daf6c",
    Class.PREFILL: "#8fd19e",
    Class.LOG_PROBS: "#2c7fb8",
    Class.VALIDATING: "#7fb8da",
    Class.RE_PREFILL: "#8c2d04",
    Class.RETRY: "#cc4c02",
    Class.LOST: "#662506",
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
    Class.WAIT_SWITCH: "#bd9e39",
    Class.WAIT_END: "#bdbdbd",
    Class.IDLE_PLACES: "#dadaeb",
    Class.START_UP: "#969696",
    Class.DOWN: "#000000",
    Class.NOT_KNOWN: "#ff0000",
}
"""Colors of the classes of time, in the order in which the charts stack them."""

Bar = tuple[str | int, float, float, str, str]
"""A bar of a chart: the row in which it is drawn, start, end, description and color."""


def words(what: str) -> str:
    return what.replace("_", " ")


def by_device(run: Run) -> figure:
    """Return a chart with the time of each device by class, in percent of the device's total time."""
    devices = dict(reversed([*run.account.devices.items()]))
    present = [what.value for what in COLORS if any(device.seconds.get(what, 0) > 0 for device in devices.values())]
    columns: dict[str, Any] = {"device": [*devices]}
    for what in present:
        columns[what] = [100 * device.seconds.get(what, 0.0) / (device.life or 1) for device in devices.values()]
    plot = _figure("Share of each device's life", 110 + 34 * len(devices), y_range=[*devices], x_range=(0, 100))
    plot.hbar_stack(present, y="device", height=0.8, **_stack(present, COLORS, columns))
    plot.add_tools(HoverTool(tooltips=[("device", "@device"), ("$name", "@$name{0.0} %")]))
    plot.xaxis.axis_label = "percent"
    return _with_legend(plot)


def over_time(run: Run, side: str) -> figure | None:
    """Return a chart of what ``side`` (trainer, engines or log-prob servers) did over time, in percent by class."""
    edges = np.linspace(0, run.until, WIDE_BINS + 1)
    sums = _binned((piece for piece in run.pieces if piece.device.partition(" ")[0] == side), edges)
    if not sums:
        return None
    total = np.maximum(sum(sums.values()), 1e-9)
    present = [what.value for what in COLORS if what in sums]
    columns: dict[str, Any] = {what: 100 * sums[Class(what)] / total for what in present}
    columns["time"] = (edges[:-1] + edges[1:]) / 2
    plot = _time_figure(run, f"{side}: what its accelerators did over time", 260)
    plot.vbar_stack(present, x="time", width=float(edges[1]), **_stack(present, COLORS, columns))
    plot.yaxis.axis_label = "percent"
    return _with_legend(plot)


def _stack(names: Sequence[str], colors: Mapping[Any, str], columns: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "color": [colors[name] for name in names],
        "source": ColumnDataSource(dict(columns)),
        "legend_label": [words(name) for name in names],
    }


def _binned(pieces: Iterable[Piece], edges: np.ndarray) -> dict[Class, np.ndarray]:
    """Return, for each class of time, an array with the seconds in this class in each bin.

    ``edges`` are the bounds of the bins, which all have the same width.
    """
    sums: dict[Class, np.ndarray] = defaultdict(lambda: np.zeros(len(edges) - 1))
    width, last = edges[1] - edges[0], len(edges) - 2
    for piece in pieces:
        if piece.end <= piece.start:
            continue
        first, end = min(last, int(piece.start / width)), min(last, int(piece.end / width))
        overlap = np.minimum(edges[first + 1 : end + 2], piece.end) - np.maximum(edges[first : end + 1], piece.start)
        sums[piece.what][first : end + 1] += np.maximum(overlap, 0) * piece.share
    return sums


def lanes(run: Run) -> figure:
    """Return a chart with a row for versions, one for weight syncs, and one for each device.

    The row of a device shows, for each bin of time, the class that took most of it.
    """
    edges = np.linspace(0, run.until, BINS + 1)
    names = [*run.account.devices][:MOST_LANES]
    bars: list[Bar] = []
    for name in names:
        sums = _binned((piece for piece in run.pieces if piece.device == name), edges)
        if sums:
            seconds = np.stack([*sums.values()])
            top = np.where(seconds.max(axis=0) > 0, seconds.argmax(axis=0), -1)
            bars += _most(name, [*sums], top, edges)
    syncs = [event for event in run.events if event.lane == WEIGHTS]
    for event in syncs[:: max(1, len(syncs) // (4 * BINS))]:
        part = f"{event.what} of version {event.version}"
        bars.append((WEIGHTS, event.start, event.end, part, PARTS_OF_A_SYNC.get(event.what, "#636363")))
    bars += versions(run)
    order = [VERSIONS, WEIGHTS, *names[::-1]] if syncs else names[::-1]
    plot = _bars(run, "Lanes: what took most of each moment", 120 + 30 * len(order), bars, y_range=order)
    marks = [event for event in run.events if event.lane == RUN and event.what in (LOST, JOINED)]
    if marks:
        plot.scatter(
            x=[event.start for event in marks],
            y=[event.text if event.text in order else order[-1] for event in marks],
            size=12,
            marker=["x" if event.what == LOST else "triangle" for event in marks],
            color="#d7301f",
            line_width=3,
        )
    return plot


def _most(name: str, classes: Sequence[Class], top: np.ndarray, edges: np.ndarray) -> Iterable[Bar]:
    """Yield one bar for each run of consecutive bins with the same class.

    ``top`` has, for each bin, the index of its class in ``classes``, or -1 for none.
    """
    for which, found in groupby(range(len(top)), key=lambda at: int(top[at])):
        run = list(found)
        if which >= 0:
            yield name, edges[run[0]], edges[run[-1] + 1], words(classes[which]), COLORS[classes[which]]


def versions(run: Run) -> list[Bar]:
    """Return bars that show which version generated when. If there are many versions, a bar covers several."""
    swapped = (event for event in run.events if (event.lane, event.what) == (WEIGHTS, "swap"))
    swaps = sorted((event.end, event.version or 0) for event in swapped)
    if not swaps:
        return []
    begins = [(0.0, swaps[0][1] - 1), *swaps]
    shown = begins[:: -(-len(begins) // BINS)]
    ends = [*(begin for begin, _ in shown[1:]), run.until]
    last = [*(version - 1 for _, version in shown[1:]), swaps[-1][1]]
    return [
        (VERSIONS, begin, end, f"version {first}" if first == until else f"versions {first} to {until}", _hue(first))
        for (begin, first), end, until in zip(shown, ends, last, strict=True)
    ]


def _hue(number: int) -> str:
    return HUES[number % len(HUES)]


def one_by_one(run: Run) -> figure | None:
    """Return a chart of a sample of trajectories, one row each, colored by the version with which they began."""
    begun = about(run.trajectories, "generating").sort_by("start")
    if not begun.num_rows:
        return None
    taken = begun.take(np.unique(np.linspace(0, begun.num_rows - 1, MOST_LIVES).astype(int)))
    ready = about(run.groups, "ready")
    waits = {row["group"]: (row["start"], row["end"]) for row in _rows(ready, "group", "start", "end")}
    rewards = _rows(about(run.trajectories, "reward"), "group", "trajectory", "start", "end")
    scored_at = {(row["group"], row["trajectory"], row["start"]): row["end"] for row in rewards}
    bars: list[Bar] = []
    for line, life in enumerate(taken.to_pylist()):
        group, end = life["group"], life["end"]
        name = f"group {group}, answer {life['trajectory']}"
        what = f"{name}: generating from version {life['version']}"
        bars.append((line, life["start"], end, what, _hue(life["version"])))
        if (scored := scored_at.get((group, life["trajectory"], end))) is not None:
            bars.append((line, end, scored, f"{name}: reward", "#9e9ac8"))
            if group in waits:
                bars.append((line, *waits[group], f"{name}: ready, not yet trained", "#d9d9d9"))
    plot = _bars(run, "Trajectories, one line each: colored while they generate", 360, bars)
    plot.yaxis.visible = False
    return plot


def _rows(table: pa.Table, *names: str) -> list[dict[str, Any]]:
    return table.select(list(names)).to_pylist()


def _seconds(table: pa.Table) -> pa.ChunkedArray:
    return pc.subtract(table["end"], table["start"])


def _histogram(title: str, label: str, values: np.ndarray, weights: np.ndarray | None = None) -> figure | None:
    if not len(values):
        return None
    whole = bool(np.all(values == np.round(values)))
    spread = values.max() - values.min()
    bins = np.arange(values.min() - 0.5, values.max() + 1.5) if whole and spread < 60 else 40
    counts, edges = np.histogram(values, bins=bins, weights=weights)
    plot = _figure(title, 220)
    source = ColumnDataSource({"left": edges[:-1], "right": edges[1:], "count": counts})
    plot.quad(left="left", right="right", bottom=0, top="count", color="#2c7fb8", line_color="#ffffff", source=source)
    plot.add_tools(HoverTool(tooltips=[(label, "@left{0.00} to @right{0.00}"), ("count", "@count{0,0}")]))
    plot.xaxis.axis_label, plot.yaxis.axis_label = label, "count"
    return plot


def histograms(run: Run) -> list[figure]:
    """Return histograms of answer length, token staleness, waiting time of ready groups, tool time, and reward time."""
    lengths = about(run.trajectories, "generating")["tokens"].drop_null().to_numpy()
    ages = np.array([int(age) for age in run.tokens["what"].to_pylist()])
    found = [
        _histogram("Tokens of an answer", "tokens", lengths),
        _histogram("Staleness of trained tokens", "versions", ages, run.tokens["tokens"].to_numpy()),
    ]
    for title, table, what in (
        ("Wait of a ready group until it is trained", run.groups, "ready"),
        ("From the last token to the reward", run.trajectories, "reward"),
        ("Time in tools, for answers that used tools", run.trajectories, "tools"),
    ):
        found.append(_histogram(title, "seconds", _seconds(about(table, what)).to_numpy()))
    return [plot for plot in found if plot is not None]


def _axes(run: Run) -> dict[str, list[Any]]:
    """Return the x values of the curves, by axis label: steps, seconds and trained tokens."""
    tokens = np.cumsum([step.get("fully_async/sampled_tokens") or 0 for step in run.metrics])
    return {
        "step": [step.get("training/global_step") for step in run.metrics],
        "seconds since the start": [step.get("wall_seconds") for step in run.metrics],
        "tokens trained": tokens.tolist(),
    }


def curves(runs: Mapping[str, Run], keys: Sequence[str], title: str) -> list[figure]:
    """Return charts of the metrics ``keys`` against steps, time and tokens. Metrics that no run has are left out.

    The keys of ``runs`` are the runs' names in the legends; a single run has the key "".
    """
    present = [key for key in keys if any(step.get(key) is not None for run in runs.values() for step in run.metrics)]
    along = {name: _axes(run) for name, run in runs.items()}
    lines = [(f"{name}: {key}" if name else key, name, key) for key in present for name in runs]
    plots = []
    for label in next(iter(along.values())) if lines else ():
        plot = _figure(title, 240)
        for number, (named, name, key) in enumerate(lines):
            metrics = runs[name].metrics
            points = list(zip(along[name][label], metrics, strict=True))[:: max(1, len(metrics) // MOST_POINTS)]
            found = [(x, step[key]) for x, step in points if x is not None and step.get(key) is not None]
            if found:
                xs, ys = zip(*found, strict=True)
                plot.line(xs, ys, color=_hue(number), line_width=2, legend_label=named)
                plot.scatter(xs, ys, color=_hue(number), size=4, legend_label=named)
        plot.xaxis.axis_label = label
        plots.append(_with_legend(plot, columns=1))
    return plots


def _figure(title: str, height: int, **options: Any) -> figure:
    tools = "pan,xwheel_zoom,box_zoom,reset,save"
    plot = figure(title=title, height=height, sizing_mode="stretch_width", tools=tools, **options)
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.title.text_font_size = "15px"
    return plot


def _time_figure(run: Run, title: str, height: int, **options: Any) -> figure:
    plot = _figure(title, height, x_range=(0, run.until), **options)
    plot.xaxis.axis_label = "seconds since the run's trainer began"
    return plot


def _bars(run: Run, title: str, height: int, bars: Sequence[Bar], **options: Any) -> figure:
    plot = _time_figure(run, title, height, **options)
    names = ("lane", "start", "end", "what", "color")
    columns = dict(zip(names, zip(*bars, strict=True) if bars else [()] * len(names), strict=True))
    drawn = plot.hbar(y="lane", left="start", right="end", height=0.8, color="color", source=ColumnDataSource(columns))
    tips = [("lane", "@lane"), ("what", "@what"), ("from", "@start{0.00} s"), ("to", "@end{0.00} s")]
    plot.add_tools(HoverTool(renderers=[drawn], tooltips=tips))
    return plot


def _with_legend(plot: figure, columns: int = 6) -> figure:
    """Move the chart's legend below the chart, where it covers no data; return the chart."""
    if plot.legend:
        legend = plot.legend[0]
        legend.label_text_font_size = "11px"
        legend.ncols = columns
        plot.add_layout(legend, "below")
        plot.height += 24 * -(-len(legend.items) // columns)
    return plot
