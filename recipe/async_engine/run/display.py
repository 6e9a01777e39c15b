# SPDX-License-Identifier: Apache-2.0
"""What a person sees of a run: one progress bar, and a summary at its end."""

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from tqdm import tqdm

from recipe.async_engine.run.record import STEP


class Display:
    """A progress bar with step, reward, staleness and samples per second, on the driver's terminal."""

    def __init__(self, mode: str, total_steps: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._bar = tqdm(total=total_steps, desc=mode, unit="step", file=self._stream, dynamic_ncols=True)

    def resume(self, step: int) -> None:
        """Go on after ``step``."""
        self._bar.reset(total=self._bar.total)
        self._bar.update(step)

    def step(self, metrics: Mapping[str, Any]) -> None:
        seconds = metrics.get("timing_s/step")
        samples = metrics.get("fully_async/trained_samples")
        shown = {
            "reward": metrics.get("critic/score/mean"),
            "staleness": metrics.get("fully_async/staleness/oldest_token_mean"),
            "samples/s": samples / seconds if samples and seconds else None,
            "val": next((v for k, v in metrics.items() if k.startswith("val-core/") and "/mean@" in k), None),
        }
        self._bar.set_postfix({name: f"{value:.3g}" for name, value in shown.items() if value is not None})
        self._bar.update(int(metrics[STEP]) - self._bar.n)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Close the bar and show the summary."""
        self._bar.close()
        ledger, staleness, validation = summary["ledger"], summary["staleness"], summary["validation"]
        lines = [
            f"steps {summary['steps']}, versions {summary['versions']}, wall {summary['wall_seconds']:.0f} s, "
            f"peak memory {_shown(summary['peak_memory_gib'], ' GiB')}",
            f"validation score {_shown(validation['first'])} -> {_shown(validation['last'])}",
            f"staleness max {staleness['max']}, mean {staleness['mean']:.2f}, bound {staleness['bound']}; "
            f"{summary['interrupted']} trajectories interrupted and resumed",
            f"trainer waited {_share(summary['trainer_wait_share'])}, rollout idle "
            f"{_share(summary['rollout_idle_share'])}, weight sync {summary['weight_sync_seconds']:.1f} s, "
            f"updates skipped {summary['skipped_updates']}, versions with unchanged weights "
            f"{summary['unchanged_versions']}",
            "groups " + ", ".join(f"{name} {count}" for name, count in ledger.items()),
        ]
        self._stream.write("\n".join(lines) + "\n")
        self._stream.flush()


def _shown(value: float | None, unit: str = "") -> str:
    return "not measured" if value is None else f"{value:.3f}{unit}"


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.0%} of its time"
