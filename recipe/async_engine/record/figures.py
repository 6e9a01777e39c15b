# SPDX-License-Identifier: Apache-2.0
"""Selects and formats the metrics of a run's progress.

Contract: the run's terminal, ``python -m recipe.report --follow``, trackers and Prometheus show the same metrics, named
as in docs/metrics.md. The first two also say what the trainer and the rollout do now. Shown by
tests/core/test_figures.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import floor
from typing import Any, NamedTuple

from recipe.async_engine.core.alarms import ALL, METRIC

STEP = "training/global_step"
TRAINER_DOES, ROLLOUT_DOES = "fully_async/trainer/does", "fully_async/rollouter/does"
SHARE = "fully_async/trainer/share/"
ROLLOUTER = "fully_async/rollouter/"
STALENESS = "fully_async/staleness/"
COUNT = "fully_async/count/"
SERVERS = "model_engine_server/"

Figures = Mapping[str, Any]


class Exported(NamedTuple):
    """A metric as exported to Prometheus. Ray adds the prefix ``ray_`` to its name."""

    name: str
    meaning: str


EXPORTED: Mapping[str, Exported] = {
    STEP: Exported("recipe_step", "Current or last step"),
    f"{COUNT}current_param_version": Exported("recipe_version", "Version from which training continues"),
    f"{COUNT}announced_version": Exported("recipe_version_announced", "Newest version with which replicas generate"),
    f"{COUNT}live_replicas": Exported("recipe_rollout_replicas", "Rollout replicas that get requests"),
    f"{COUNT}restarts": Exported(
        "recipe_replica_restarts", "Replicas and log-prob servers started to replace lost ones"
    ),
    f"{ROLLOUTER}generating_trajectories": Exported("recipe_generating", "Trajectories that generate"),
    f"{ROLLOUTER}slots": Exported("recipe_generation_slots", "Trajectories that may generate at once"),
    f"{ROLLOUTER}groups_running": Exported("recipe_groups_running", "Prompt groups that are issued but not complete"),
    f"{ROLLOUTER}groups_ready": Exported("recipe_groups_ready", "Complete prompt groups that wait for the trainer"),
    f"{ROLLOUTER}occupancy": Exported("recipe_rollout_occupancy", "Share of the generation slots' time that was used"),
    f"{ROLLOUTER}idle_share": Exported("recipe_rollout_idle_share", "Share of time in which nothing generated"),
    "fully_async/rewards/scoring": Exported("recipe_rewards_under_way", "Trajectories whose reward is computed"),
    f"{STALENESS}token_mean": Exported("recipe_staleness_mean", "Mean age of the last batch's tokens, in versions"),
    f"{STALENESS}oldest_token_max": Exported("recipe_staleness_max", "Age of the last batch's oldest token"),
    f"{STALENESS}bound": Exported("recipe_staleness_bound", "Staleness bound, in versions"),
    "fully_async/ledger/trained": Exported("recipe_groups_trained", "Prompt groups trained so far"),
    "fully_async/ledger/filtered": Exported("recipe_groups_filtered", "Prompt groups filtered so far"),
    "fully_async/ledger/failed": Exported("recipe_groups_failed", "Prompt groups that failed so far"),
    "fully_async/sampled_tokens": Exported("recipe_step_tokens", "Sampled tokens of the last batch"),
    "fully_async/weight_sync/seconds": Exported("recipe_weight_sync_seconds", "Seconds of the last weight sync"),
    "fully_async/weight_sync/generation_paused_seconds": Exported(
        "recipe_generation_paused_seconds", "Seconds that generation paused for the last weight sync"
    ),
    f"{SERVERS}servers": Exported("recipe_log_prob_servers", "Log-prob servers that answer"),
    f"{SERVERS}waiting": Exported("recipe_log_prob_waiting", "Answers that wait for their log-probs"),
    f"{SERVERS}version_lag": Exported(
        "recipe_log_prob_version_lag", "Versions by which the slowest log-prob server is behind"
    ),
    f"{METRIC}{ALL}": Exported("recipe_alarms", "Number of alarms raised so far"),
    "timing_s/step": Exported("recipe_step_seconds", "Seconds of the last step"),
    "critic/score/mean": Exported("recipe_score_mean", "Mean score of the last batch"),
}
TRAINER_SHARE = Exported("recipe_trainer_share", "Share of the trainer's time so far, by phase")


def sides(figures: Figures) -> list[tuple[str, str]]:
    """Return the lines to display, as (name, text), about trainer, rollout, log-probs, alarms and staleness.

    Lines without text are left out.
    """
    lines = [
        ("trainer", _trainer(figures)),
        ("rollout", _rollout(figures)),
        ("log-probs", _joined(*(_said(figures, key, words) for key, words in SERVERS_SAY.items()))),
        ("alarms", _alarms(figures)),
        ("staleness", _joined(*(_said(figures, key, words) for key, words in STALENESS_SAYS.items()))),
    ]
    return [(name, text) for name, text in lines if text]


def _trainer(figures: Figures) -> str:
    shares = {key.removeprefix(SHARE): value for key, value in figures.items() if key.startswith(SHARE)}
    largest = sorted(shares.items(), key=lambda share: -share[1])[:4]
    return _joined(
        figures.get(TRAINER_DOES),
        ", ".join(f"{phase} {percent(share)}" for phase, share in largest if percent(share) != "0%"),
        _said(figures, STEP, "step {:.0f}"),
        _said(figures, f"{COUNT}current_param_version", "version {:.0f}"),
    )


def _rollout(figures: Figures) -> str:
    slots = _said(figures, f"{ROLLOUTER}generating_trajectories", "{:.0f}")
    if slots and (of := _said(figures, f"{ROLLOUTER}slots", "{:.0f}")):
        slots = f"{slots} of {of}"
    shares = [
        f"{name} {percent(figures[key])}" if figures.get(key) is not None else ""
        for name, key in (("busy", f"{ROLLOUTER}occupancy"), ("idle", f"{ROLLOUTER}idle_share"))
    ]
    queue = [
        _said(figures, f"{ROLLOUTER}groups_running", "{:.0f} groups run"),
        _said(figures, f"{ROLLOUTER}groups_ready", "{:.0f} ready"),
        _said(figures, "fully_async/rewards/scoring", "{:.0f} rewards"),
    ]
    return _joined(
        figures.get(ROLLOUT_DOES),
        slots and f"{slots} slots",
        ", ".join(filter(None, shares)),
        ", ".join(filter(None, queue)),
        _said(figures, f"{COUNT}announced_version", "version {:.0f}"),
        _said(figures, f"{COUNT}live_replicas", "{:.0f} replicas"),
    )


SERVERS_SAY = {
    f"{SERVERS}servers": "{:.0f} servers",
    f"{SERVERS}waiting": "{:.0f} answers wait",
    f"{SERVERS}version_lag": "{:.0f} versions behind",
    f"{SERVERS}tokens_per_second": "{:.0f} tokens/s",
}
STALENESS_SAYS = {
    f"{STALENESS}token_mean": "mean {:.2f}",
    f"{STALENESS}oldest_token_max": "oldest {:.0f}",
    f"{STALENESS}bound": "bound {:.0f}",
}


def percent(share: float) -> str:
    """Return a share in whole percent, rounding halves up; ``:.0%`` would round 0.5% and 2.5% down but 1.5% up."""
    return f"{floor(round(100 * share, 9) + 0.5)}%"


def _alarms(figures: Figures) -> str:
    rang = {key.removeprefix(METRIC): count for key, count in figures.items() if key.startswith(METRIC) and count}
    return ", ".join(f"{name} {count:.0f}" for name, count in rang.items() if name != ALL)


def _said(figures: Figures, key: str, words: str) -> str:
    value = figures.get(key)
    return "" if value is None else words.format(value)


def _joined(*parts: str | None) -> str:
    return "; ".join(filter(None, parts))
