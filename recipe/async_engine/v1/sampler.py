# SPDX-License-Identifier: Apache-2.0
"""A custom sampler with a hard staleness bound for stock verl's v1 trainers `separate_async` and `colocate_async`.

    trainer.v1.sampler.custom_sampler.path=pkg://recipe.async_engine.v1.sampler
    trainer.v1.sampler.custom_sampler.name=BoundedReplayBuffer
    trainer.v1.sampler.max_off_policy_threshold=2

Contract: no prompt group is trained whose oldest token may be more than ``max_off_policy_threshold - 1`` versions old,
and no group is evicted for its age. verl's own strategies check the age only when a batch is sampled. That is too late
for a group that was issued (that is, began to generate) too early: it must be trained although it is too old (`wait`)
or be evicted (`drop`). Here, `StalenessGate` decides when prompts are issued, including those of
``num_warmup_batches``, and when a batch may be taken. If the trainer requests prompts too early, the sampler issues
them later. The age of a group is counted from the version that generated when the group was issued.

verl's step G starts from version G - 1, and a prompt is tagged with the step at which it was issued. The sampler
replaces the two methods of the trainer that issue prompts; it finds the trainer through ``refill_fn``, which is a
method of the trainer. Failed groups, and groups that ``algorithm.filter_groups`` removes, are replaced as in verl.
Shown by tests/integration/test_v1_sampler.py and, in stock trainers, tests/e2e/test_v1_trainers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from recipe.async_engine.core.errors import RecipeError, StalenessViolation
from recipe.async_engine.core.gate import GateSettings, StalenessGate

TRAIN = "train"
POLL_S = 0.1
SETTING = "trainer.v1.sampler.max_off_policy_threshold"


class SamplerError(RecipeError):
    """The sampler cannot keep the staleness bound in this configuration."""


class BoundedReplayBuffer(ReplayBufferAsync):
    """A replay buffer that issues prompts and takes batches only when the `StalenessGate` allows it.

    Args:
        max_off_policy_threshold: number of versions that a trajectory may span, which is the staleness bound plus 1.
        sampler_kwargs: ``poll_interval`` is the number of seconds between two checks for complete groups (default 0.1).
        refill_fn: the trainer's method that issues prompts.

    Raises:
        SamplerError: the threshold is null, or the trainer is not an asynchronous one.
    """

    def __init__(
        self,
        *,
        trainer_mode: str,
        trainer_config: Any,
        max_off_policy_threshold: int | None,
        max_off_policy_strategy: str,
        sampler_kwargs: Mapping[str, Any],
        refill_fn: Callable[[int], Any],
    ) -> None:
        if max_off_policy_threshold is None:
            raise SamplerError(f"{SETTING} is null: set the number of versions that a trajectory may span, 1 or more")
        trainer = getattr(refill_fn, "__self__", None)
        if trainer is None or trainer_mode == "sync":
            raise SamplerError(
                f"trainer.v1.trainer_mode={trainer_mode}: this sampler is for verl's trainers separate_async and "
                "colocate_async"
            )
        super().__init__(
            trainer_mode=trainer_mode,
            trainer_config=trainer_config,
            max_off_policy_threshold=max_off_policy_threshold,
            # With verl's strategy `wait`, verl never evicts a group for its age.
            max_off_policy_strategy="wait",
            sampler_kwargs=sampler_kwargs,
            poll_interval=float(sampler_kwargs.get("poll_interval", POLL_S)),
            refill_fn=self.ask,
            filter_groups_metric=trainer._resolve_filter_groups_metric(),
        )
        data = trainer.config.data
        batches = int(trainer_config.get("parameter_sync_step", 1))
        bound = max_off_policy_threshold - 1
        self._gate_settings = GateSettings(data.train_batch_size // batches, batches, bound, bound)
        self._chunk = int(data.get("gen_batch_size") or data.train_batch_size)
        self._trainer = trainer
        self._issue = refill_fn
        self._owed = 0
        self._taken: tuple[int, int] = (0, 0)
        trainer._add_prompts_to_generate = self.ask
        trainer._add_batch_to_generate = lambda: self.ask(data.train_batch_size)

    def ask(self, prompts: int) -> int:
        """Issue as many of ``prompts`` prompts as the staleness bound allows now; return how many were issued.

        The others are issued later.
        """
        self._owed += prompts
        self._sync_metadata_from_transfer_queue()
        return self._issue_owed(self._trainer.global_steps)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Sample a batch as verl does, and count the batches of this step."""
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        if partition_id == TRAIN:
            self._taken = (global_steps, self._batches_taken(global_steps) + 1)
            metrics["training/off_policy/held_back_prompts"] = max(0, self._owed)
        return batch, metrics

    def _has_enough_samples(
        self, global_steps: int, partition_id: str, batch_size: int, sampleable_keys: set[str]
    ) -> bool:
        """Return whether a batch of the oldest complete groups may be taken now, within the staleness bound."""
        if partition_id != TRAIN:
            return super()._has_enough_samples(global_steps, partition_id, batch_size, sampleable_keys)
        self._issue_owed(global_steps)
        if len(sampleable_keys) >= batch_size:
            steps = self.prompt_global_steps[TRAIN]
            starts = sorted(self._start(steps[key]) for key in sampleable_keys)
            return self._gate(global_steps).can_take(starts[: self._gate_settings.batch_groups])
        if not self.pending_keys[TRAIN] and not self.running_keys[TRAIN]:
            raise SamplerError(
                f"{len(sampleable_keys)} groups are complete, none is in progress, and the bound does not admit "
                f"data.gen_batch_size={self._chunk} more prompts, although a batch of {batch_size} only needs "
                f"{batch_size - len(sampleable_keys)}: set data.gen_batch_size=1"
            )
        return False

    def _gate(self, global_steps: int) -> StalenessGate:
        """Return a staleness gate that counts all groups that have been issued and are in no training batch yet."""
        starts = [self._start(step) for step in self.prompt_global_steps[TRAIN].values()]
        try:
            return StalenessGate(
                self._gate_settings,
                version=self._start(global_steps),
                batches_taken=self._batches_taken(global_steps),
                starts=starts,
            )
        except StalenessViolation as error:
            raise SamplerError(
                f"{SETTING}={self.max_off_policy_threshold} cannot be kept for prompts already issued ({error}). "
                "Resume with the threshold with which the checkpoint was made, or a larger one"
            ) from error

    @staticmethod
    def _start(step: int) -> int:
        """Return the version with which the rollout generates when ``step`` begins; steps are counted from 1."""
        return max(0, step - 1)

    def _batches_taken(self, global_steps: int) -> int:
        step, taken = self._taken
        return taken if step == global_steps else 0

    def _issue_owed(self, global_steps: int) -> int:
        """Issue as many of the requested prompts as the staleness bound allows now; return how many were issued."""
        issued = 0
        while self._owed > 0:
            gate = self._gate(global_steps)
            if gate.live + self._chunk > gate.admission_limit:
                break
            self._issue(self._chunk)
            issued += self._chunk
            self._owed -= self._chunk
            self._sync_metadata_from_transfer_queue()
        return issued
