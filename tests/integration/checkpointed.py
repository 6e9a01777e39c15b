# SPDX-License-Identifier: Apache-2.0
"""The rollout side of a run's checkpoints, for tests about something else."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from recipe.async_engine.config.sections import AsyncTraining
from recipe.async_engine.rollout.group_run import TrajectoryScored

SCORED = TrajectoryScored(1.0, 0, 0, True, 0, 0, 4)
BATCH, STALENESS = 2, 1


def plan(**values: Any) -> Any:
    """Return the parts of a `RunPlan` that checkpoints need: batches of two groups, bound 1."""
    found = {
        "settings": SimpleNamespace(async_training=AsyncTraining()),
        "batch_groups": BATCH,
        "batches_per_version": 1,
        "max_staleness": STALENESS,
        "pipeline_depth": Fraction(STALENESS),
        "total_steps": 1000,
        "total_groups": None,
    }
    return SimpleNamespace(**found | values)


def snapshot(live: list[list[Any]] | None = None, groups: dict[int, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return the snapshot of a run that has issued ``live`` and trained nothing."""
    rows = live or []
    return {
        "ledger": {
            "max_staleness": STALENESS,
            "version": max([row[4] for row in rows], default=0),
            "batches_taken": 0,
            "issued": len(rows),
            "trained": 0,
            "filtered": {},
            "failed": {},
            "staleness": [],
            "issued_prompts": [[row[2], row[1], row[1] + 1] for row in rows],
            "trained_prompts": [],
            "live": rows,
        },
        "source": {"epoch": 0, "taken_in_epoch": len(rows), "put_back": [], "dataloader": None},
        "groups": groups or {},
        "interrupted_tokens": {"cut": 0, "lost": 0, "trained": 0},
        **more,
    }
