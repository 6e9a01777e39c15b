# SPDX-License-Identifier: Apache-2.0
"""The stage of a step that gives a batch its proximal log-probs, wherever they come from.

Contract: the metrics ``timing_s/old_log_prob`` (the trainer's own forward pass, 0 without one) and ``rollout_corr/*``
are there in every step, under verl's names, whatever the source. Shown by tests/e2e/test_model_engine.py and, for later
batches of a version, tests/e2e/test_fully_async.py.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.utils.debug import marked_timer
from verl.utils.debug.metrics import calculate_debug_metrics

from recipe.async_engine.config.plan import RunPlan
from recipe.async_engine.core.columns import REFERENCE
from recipe.async_engine.trainer.log_probs.columns import reference_column
from recipe.async_engine.trainer.log_probs.mismatch import entropy_metric
from recipe.async_engine.trainer.log_probs.sources import source

logger = logging.getLogger(__name__)

IN_LOSS = "actor/rollout_corr/"

Metrics = dict[str, Any]
Timing = dict[str, float]


class LogProbStage:
    """See the module's contract. ``metrics`` and ``timing`` are those of the step, which its methods add to.

    Args:
        config: the whole configuration.
        plan: of the run.
        by_published_weights: the trainer's forward pass by the weights that were published last: a batch with
            ``old_log_probs`` and ``entropys``, and the model FLOPs utilization.
    """

    def __init__(
        self, config: Any, plan: RunPlan, by_published_weights: Callable[[DataProto], tuple[DataProto, float]]
    ) -> None:
        self._plan, self._compute = plan, by_published_weights
        self._actor = config.actor_rollout_ref.actor

    def fill(self, batch: DataProto, version: int, metrics: Metrics, timing: Timing) -> DataProto:
        """Give a batch, trained at ``version``, proximal log-probs from where the settings say."""
        # Present in every run: seconds of log-prob work that training waited for.
        timing.setdefault("old_log_prob", 0.0)
        began = time.monotonic()
        recompute = partial(self.recompute, metrics=metrics, timing=timing)
        metrics.update(source(self._plan.proximal, recompute, self._plan.settings.servers)(batch, version))
        metrics["log_probs/critical_path_seconds"] = time.monotonic() - began
        return batch

    def recompute(self, batch: DataProto, metrics: Metrics, timing: Timing) -> tuple[torch.Tensor, torch.Tensor]:
        """By the trainer: log-probs of the newest published version, for every batch of that version, and entropies."""
        with marked_timer("old_log_prob", timing, color="blue"):
            computed, mfu = self._compute(batch)
        metrics["perf/mfu/actor_infer"] = mfu
        log_probs, entropy = computed.batch.pop("old_log_probs"), computed.batch.pop("entropys")
        replay = OmegaConf.select(self._actor, "megatron.router_replay.mode")
        for name, column in computed.batch.items():
            # What experts the trainer chose is wanted only where verl replays the trainer's choice.
            if name != "routed_experts" or name not in batch.batch or replay == "R2":
                batch.batch[name] = column
        return log_probs, entropy

    def report_entropy(self, batch: DataProto, metrics: Metrics) -> None:
        """Take the column of entropies out of the batch and report it, as verl does where it has computed one."""
        if "entropys" not in batch.batch:
            return
        metrics.update(entropy_metric(batch.batch.pop("entropys"), batch.batch["response_mask"], self._actor))
        metrics.update(calculate_debug_metrics(batch))


def fill_reference(batch: DataProto, metrics: Metrics, compute: Callable[[DataProto], DataProto]) -> DataProto:
    """Give a batch the log-probs of the reference policy that its servers computed; ``compute`` has all the others."""
    rows = batch.non_tensor_batch.pop(REFERENCE, [None] * len(batch))
    column, missing = reference_column(rows, batch.batch["responses"].shape[1])
    if missing.any():
        logger.warning("the trainer computes the reference log-probs of %d rows", int(missing.sum()))
        batch = compute(batch)
        column = torch.where(missing[:, None], batch.batch["ref_log_prob"], column)
    batch.batch["ref_log_prob"] = column
    metrics["model_engine_server/reference_fallback_rows"] = int(missing.sum())
    return batch


def rename_loss_metrics(metrics: Metrics) -> None:
    """Take away the "actor/" that verl puts before the mismatch that a loss reports."""
    for name in [name for name in metrics if name.startswith(IN_LOSS)]:
        metrics[name.removeprefix("actor/")] = metrics.pop(name)
