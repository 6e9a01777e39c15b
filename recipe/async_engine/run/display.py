# SPDX-License-Identifier: Apache-2.0
"""Shows a run on the terminal: a progress bar, lines about trainer and rollout, and a summary at the end.

Contract: on a large enough terminal, bar and lines are a panel that is updated in place. Elsewhere (no terminal,
`TERM=dumb`, a small window) the bar is an ordinary line, and the other lines are printed every `PLAIN_S` seconds. The
cursor is never hidden, so a main process that is killed leaves the terminal as it was. If nothing can be written any
more (the terminal was closed, the reader of the pipe has ended), the run continues and shows nothing. Shown by
tests/core/test_display.py.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from recipe.async_engine.core.alarms import Ended
from recipe.async_engine.core.rehearsed import table
from recipe.async_engine.record.figures import STEP, percent, sides

logger = logging.getLogger(__name__)

PLAIN_S = 30.0
ENDED = {Ended.WELL: "well", Ended.WITH_ALARMS: "with alarms", Ended.FAILED: "with an error"}
COLUMNS, LINES = 90, 12
"""Smallest window for which a panel is shown."""


class Bar:
    """A progress bar for any stream. Every `PLAIN_S` seconds it also prints lines about trainer and rollout."""

    def __init__(
        self, mode: str, total_steps: int, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._clock = stream, clock
        self._bar = tqdm(total=total_steps or None, desc=mode, unit="step", file=stream, dynamic_ncols=True)
        self._lines_at = clock() + PLAIN_S

    def resume(self, step: int) -> None:
        self._bar.reset(total=self._bar.total)
        self._bar.update(step)

    def step(self, step: int, shown: Mapping[str, str]) -> None:
        self._bar.set_postfix(dict(shown))
        self._bar.update(step - self._bar.n)

    def live(self, lines: list[tuple[str, str]]) -> None:
        if self._clock() >= self._lines_at:
            self._lines_at = self._clock() + PLAIN_S
            self._bar.write("\n".join(f"{name}: {text}" for name, text in lines), file=self._stream)

    def close(self) -> None:
        self._bar.close()


class _Console(Console):
    """A console that never hides the cursor, because after a `kill -9` nothing would show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class LivePanel:
    """A panel with the progress bar and the lines about trainer and rollout.

    It is updated in place, below the process's other output.
    """

    def __init__(self, mode: str, total_steps: int, stream: TextIO) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[shown]}"),
        )
        self._task = self._progress.add_task(mode, total=total_steps or None, shown="")
        self._lines: list[tuple[str, str]] = []
        self._console = _Console(file=stream)
        self._live = Live(
            get_renderable=self._panel,
            console=self._console,
            refresh_per_second=2,
            # Capture standard output only if it is a terminal: if the user has redirected it to a file, it must still
            # go there.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._live.start()

    def resume(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def step(self, step: int, shown: Mapping[str, str]) -> None:
        words = ", ".join(f"{name} {value}" for name, value in shown.items())
        self._progress.update(self._task, completed=step, shown=words)

    def live(self, lines: list[tuple[str, str]]) -> None:
        self._lines = lines

    def close(self) -> None:
        self._live.stop()

    def _panel(self) -> Panel:
        # Ask for the size of this stream's terminal at every update, because it may change. rich would ask the terminal
        # of standard input.
        with suppress(OSError):  # a terminal that was closed has no size
            self._console.size = ConsoleDimensions(*os.get_terminal_size(self._console.file.fileno()))
        table = Table.grid(padding=(0, 2))
        for name, text in self._lines:
            table.add_row(Text(name, style="bold"), Text(text))
        return Panel(Group(self._progress, table))


def has_room(stream: TextIO) -> bool:
    """Return whether ``stream`` is a terminal that is large enough and on which shown text can be overwritten."""
    if not stream.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return False
    size = os.get_terminal_size(stream.fileno())
    return size.columns >= COLUMNS and size.lines >= LINES


class Display:
    """Shows a run on standard error or on ``stream``, in the way that the module's docstring describes."""

    def __init__(self, mode: str, total_steps: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        kind = LivePanel if has_room(self._stream) else Bar
        self._is_lost = False
        self._shown: Bar | LivePanel = kind(mode, total_steps, self._stream)

    @contextmanager
    def _while_it_can_be_written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._is_lost:
                logger.warning("the run continues, but can no longer be shown: %s", error)
            self._is_lost = True

    def resume(self, step: int) -> None:
        """Set the bar to ``step``, the step of the checkpoint from which the run resumes."""
        with self._while_it_can_be_written():
            self._shown.resume(step)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of a training step that has ended."""
        seconds = metrics.get("timing_s/step")
        samples = metrics.get("fully_async/trained_samples")
        shown = {
            "reward": metrics.get("critic/score/mean"),
            "staleness": metrics.get("training/off_policy/trajectory_staleness_worst/mean"),
            "samples/s": samples / seconds if samples and seconds else None,
            "val": next((v for k, v in metrics.items() if k.startswith("val-core/") and "/mean@" in k), None),
        }
        said = {name: f"{value:.3g}" for name, value in shown.items() if value is not None}
        with self._while_it_can_be_written():
            self._shown.step(int(metrics[STEP]), said)

    def live(self, figures: Mapping[str, Any]) -> None:
        """Show what the trainer and the rollout are doing, from the figures of `recipe.async_engine.record.figures`."""
        with self._while_it_can_be_written():
            self._shown.live(sides(figures))

    def end(self, summary: Mapping[str, Any]) -> None:
        """Close the bar and show the summary."""
        with self._while_it_can_be_written():
            self._shown.close()
        ledger, staleness, validation = summary["ledger"], summary["staleness"], summary["validation"]
        alarms = summary["alarms"]
        lines = [
            f"the run ended {ENDED[summary['ended']]}",
            *(f"alarm {name}, {alarm['count']} {alarm['unit']}: {alarm['said']}" for name, alarm in alarms.items()),
            f"steps {summary['steps']}, versions {summary['versions']}, wall {summary['wall_seconds']:.0f} s, "
            f"peak memory {_shown(summary['peak_memory_gib'], ' GiB')}",
            f"validation score {_shown(validation['first'])} -> {_shown(validation['last'])}",
            f"staleness max {staleness['max']}, mean {staleness['mean']:.2f}, bound {staleness['bound']}; "
            f"{summary['interrupted']} trajectories interrupted and resumed",
            f"trainer waited {_share(summary['trainer_wait_share'])}, rollout idle "
            f"{_share(summary['rollout_idle_share'])}, weight sync {summary['weight_sync_seconds']:.1f} s",
            "groups " + ", ".join(f"{name} {count}" for name, count in ledger.items()),
        ]
        if summary["rehearsal"] is not None:
            lines += table(summary["rehearsal"])
        with self._while_it_can_be_written():
            self._stream.write("\n".join(lines) + "\n")
            self._stream.flush()


def _shown(value: float | None, unit: str = "") -> str:
    return "not measured" if value is None else f"{value:.3f}{unit}"


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{percent(value)} of its time"
