# SPDX-License-Identifier: Apache-2.0
"""The ledger and the scheduler's settings that a run's plan asks for."""

from __future__ import annotations

from typing import Any

from recipe.async_engine.config.plan import RunPlan
from recipe.async_engine.core.gate import GateSettings
from recipe.async_engine.core.groups import OnNonFinite
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.rollout.group_run import SchedulerSettings
from recipe.async_engine.rollout.trajectory_worker import filter_metric


def new_ledger(plan: RunPlan, snapshot: dict[str, Any] | None = None) -> SampleLedger:
    """A run's ledger, as it begins or as of a checkpoint's ``snapshot``."""
    settings = GateSettings(
        batch_groups=plan.batch_groups,
        batches_per_version=plan.batches_per_version,
        max_staleness=plan.max_staleness,
        pipeline_depth=plan.pipeline_depth,
    )
    rules: dict[str, Any] = {
        "target_groups": plan.total_steps * plan.batch_groups,
        "issue_limit": plan.total_groups,
        "whole_batches": plan.settings.async_training.whole_batches,
    }
    if snapshot is None:
        return SampleLedger(settings, **rules)
    return SampleLedger.restore(snapshot, settings, **rules)


def scheduler_settings(plan: RunPlan, config: Any, in_turns: bool) -> SchedulerSettings:
    """Those of a run with this plan and configuration; ``in_turns``: generation happens in turns."""
    training = plan.settings.async_training
    filtering = filter_metric(config) is not None
    batches = config.algorithm.filter_groups.get("max_num_gen_batches", 0) if filtering else 0
    return SchedulerSettings(
        group_size=plan.answers_per_group,
        slots=plan.max_concurrent_trajectories,
        slots_with_tools=plan.max_trajectories_with_tools,
        max_retries=training.max_group_retries,
        max_consecutive_failures=plan.batch_groups,
        on_non_finite=OnNonFinite(training.on_non_finite),
        filter_groups=filtering,
        filter_limit=max(0, batches or 0) * plan.batch_groups,
        prompt_timeout_s=training.timeouts.prompt,
        turns=in_turns,
    )
