# SPDX-License-Identifier: Apache-2.0
"""The partial-rollout trainer: training and generation take turns on the same accelerators.

Contract: a step is one generation turn and one training turn. The generation turn ends as soon as its batch may be
taken: when the target number of groups is complete, and no unfinished group would exceed ``max_staleness`` if the turn
ended. Unfinished answers are then interrupted. They keep their tokens and continue in the next turn with the new
version. Validation and checkpoints take place between turns, when every unfinished trajectory waits anyway. A
checkpoint contains these trajectories, and is written before the engines allocate their memory again.

Shown by tests/e2e/test_partial_rollout.py; the states and rules are in docs/partial-rollout.md.
"""

from verl import DataProto

from recipe.async_engine.rollout.group_run import GroupRun
from recipe.async_engine.trainer.base import AsyncPPOTrainer
from recipe.async_engine.trainer.startup import RolloutSide, side_by_side, start_agents
from recipe.async_engine.weights.hybrid_publisher import HybridPublisher
from recipe.partial_rollout.rehearsal import TurnRehearsal


class PartialRolloutTrainer(AsyncPPOTrainer):
    """The trainer of partial rollout, which trains and generates in turns."""

    in_turns = True
    publisher_class = HybridPublisher
    publisher: HybridPublisher
    rehearsal_class = TurnRehearsal

    def init_workers(self) -> None:
        """Start every process of the run, the engines after the training models, whose accelerators they share."""
        self.reserve()
        started = side_by_side(
            {
                "the training workers": self.start_training,
                "the agent loops": lambda: start_agents(self.config, self.reservations),
            },
            self.timeouts.startup,
        )
        rollout = started["the agent loops"]
        timeout_s = self.timeouts.startup
        engines = {"the rollout engines": lambda: rollout.replicas.launch(self.actor_rollout_wg)}
        side_by_side({**engines, **rollout.workers(timeout_s)}, timeout_s)
        self.use_rollout(rollout)
        self.publisher.ranks_agree = self.config.actor_rollout_ref.actor.strategy != "megatron"
        self.publisher.pause()
        self.publisher.release()

    def _replace_lost(self, rollout: RolloutSide) -> None:
        budget = self.plan.settings.async_training.max_replica_restarts
        self.publisher.restart_lost(lambda lost: rollout.replicas.start_again(lost, self.timeouts.startup), budget)

    def _next_groups(self) -> list[GroupRun] | None:
        """Run one generation turn and return its batch of complete groups."""
        self.publisher.begin_generation()
        self.running.open_turn()
        groups = self.running.take_batch(self.timeouts.batch_wait)
        held = self.running.end_turn(self.timeouts.trajectory)
        seconds = self.publisher.pause()
        workers = held.result(self.timeouts.trajectory)
        account = self.running.tokens + workers
        self.metrics.update(
            {
                "partial_rollout/interrupt_seconds": seconds,
                "partial_rollout/cut_tokens": account.cut,
                "partial_rollout/lost_tokens": account.lost,
                "partial_rollout/interrupted_in_tools": workers.in_tools,
            }
        )
        return groups

    def _train(self, groups: list[GroupRun]) -> DataProto:
        self.publisher.release()
        return super()._train(groups)

    def sealed(self) -> None:
        """Write a checkpoint of the new version, if one is due, before the engines get its weights."""
        if self.stopped_by is None:
            self.save_if_due()
        elif self.config.trainer.save_freq > 0:
            self.save_once()

    def _save_checkpoint(self) -> None:
        """Free the engines' memory if they have it, as at the end of a run, then save like the base class."""
        if self.publisher.is_awake:
            self.publisher.release()
        super()._save_checkpoint()

    def _validate_now(self) -> dict[str, float]:
        """Validate between turns, when engines have only validation requests and unfinished trajectories wait."""
        if not self.publisher.is_awake:
            self.metrics.update(self.publisher.publish(self.ledger.version))
        self.publisher.begin_generation()
        try:
            return super()._validate_now()
        finally:
            self.publisher.pause()
