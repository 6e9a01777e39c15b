# SPDX-License-Identifier: Apache-2.0
"""Derives the plan of a run from its configuration: batch sizes, staleness bound, number of steps, concurrency.

Contract: a value that follows from several settings is computed only in this module.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from recipe.async_engine.config.fields import is_count
from recipe.async_engine.config.log_prob_servers import Proximal
from recipe.async_engine.config.problems import ConfigError, Problem, lookup
from recipe.async_engine.config.sections import ELASTIC, SHARED, AsyncTraining, Settings, read_settings

USUAL_BOUND = 4
"""Default staleness bound, in versions. Most answers are complete before any of their tokens is older than this, and
training waits for the others. In measurements, training learned as well as with a tighter bound (docs/benchmarks.md).
"""
MODEL = "actor_rollout_ref.model"


@dataclasses.dataclass(frozen=True, slots=True)
class RunPlan:
    """The batch sizes, bounds and process counts of a run, derived from its configuration."""

    batch_groups: int  # b: prompt groups per step
    batches_per_version: int  # k: steps from one weight sync to the next
    answers_per_group: int  # n: answers per prompt
    max_staleness: int  # S: the hard staleness bound in versions
    pipeline_depth: float  # how far generation runs ahead, in versions; at most S
    trainer_ranks: int  # processes of the training engine
    rollout_replicas: int  # rollout replicas; with `placement=elastic`, without the hybrid ones
    hybrid_replicas: int  # hybrid replicas: those on the trainer's accelerators
    # Greatest number of steps; the run has fewer if groups are filtered or fail. 0 until the number of data rows is
    # known.
    total_steps: int
    total_groups: int | None  # greatest number of prompt groups issued; None if only `total_steps` limits it
    max_concurrent_trajectories: int  # most trajectories that all engines together have at once
    max_trajectories_with_tools: int  # most trajectories in progress, if some wait for tools
    engine_places: int  # sequence slots (max_num_seqs) of all engines; further trajectories queue
    proximal: Proximal  # source of the proximal log-probs
    settings: Settings


def has_critic(config: Mapping[str, Any]) -> bool:
    """Return whether verl trains a critic (verl/trainer/ppo/utils.py:96)."""
    enabled = lookup(config, "critic.enable")
    return bool(lookup(config, "algorithm.adv_estimator") == "gae" if enabled is None else enabled)


def adapter_rank(config: Mapping[str, Any]) -> int:
    """Return the rank of the LoRA adapters, or 0 without LoRA; the setting's name depends on the training engine."""
    ranks = (lookup(config, f"{MODEL}.{name}") for name in ("lora_rank", "lora.rank"))
    return max((rank for rank in ranks if is_count(rank)), default=0)


def has_adapter(config: Mapping[str, Any]) -> bool:
    """Return whether verl trains LoRA adapters. If so, the base model is the reference (ppo/ray_trainer.py:360)."""
    return adapter_rank(config) > 0 or lookup(config, f"{MODEL}.lora_adapter_path") is not None


def uses_kl(config: Mapping[str, Any]) -> bool:
    """Return whether the log-probs of a reference policy are needed (verl/trainer/ppo/utils.py:75)."""
    actor = "actor_rollout_ref.actor"
    return bool(lookup(config, "algorithm.use_kl_in_reward") or lookup(config, f"{actor}.use_kl_loss"))


def has_reference(config: Mapping[str, Any]) -> bool:
    """Return whether the trainer's workers keep the weights of a reference policy."""
    return uses_kl(config) and not has_adapter(config)


def staleness_bound(training: AsyncTraining) -> int:
    """Return S, the hard staleness bound in versions.

    The default leaves room for answers that take several versions to generate, while `staleness_threshold` decides the
    usual age of samples. If the bound were equal to that threshold, training would wait for the slowest answer of each
    batch. Stock verl does not wait, since its threshold limits the number of samples, not their age.
    """
    if training.max_staleness is not None:
        return training.max_staleness
    depth = math.ceil(training.staleness_threshold)
    return depth if depth == 0 or training.whole_batches else max(USUAL_BOUND, depth)


def replica_size(config: Mapping[str, Any], rollout: str = "actor_rollout_ref.rollout") -> int:
    """Return the number of accelerators of one replica: tensor x data x pipeline parallel size."""
    sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    return math.prod(int(lookup(config, f"{rollout}.{name}") or 1) for name in sizes)


def teacher_tensor_size(config: Mapping[str, Any], teacher: str) -> int:
    """Return the tensor-parallel size of a teacher's servers. A teacher that the user adds has verl's default, 2."""
    return int(lookup(config, f"{teacher}.inference.tensor_model_parallel_size") or 2)


def teacher_size(config: Mapping[str, Any], teacher: str) -> int:
    """Return the number of accelerators of one server of a teacher."""
    given = int(lookup(config, f"{teacher}.inference.tensor_model_parallel_size") or 1)
    return replica_size(config, f"{teacher}.inference") // given * teacher_tensor_size(config, teacher)


def synchronous_batch(training: AsyncTraining) -> bool:
    """Return whether each step trains `data.train_batch_size` prompts in mini-batches, as in synchronous training."""
    return training.whole_batches or training.placement == SHARED


def rollout_accelerators(config: Mapping[str, Any], settings: Settings) -> int:
    """Return the number of accelerators of all rollout replicas: their own, or those shared with the trainer."""
    if settings.async_training.placement == SHARED:
        return trainer_ranks(config)
    return settings.rollout.nnodes * settings.rollout.n_gpus_per_node


def hybrid_replicas(config: Mapping[str, Any], settings: Settings) -> int:
    """Return the number of replicas that generate on the trainer's accelerators while the trainer waits."""
    if settings.async_training.placement not in (SHARED, ELASTIC):
        return 0
    return trainer_ranks(config) // replica_size(config)


def trainer_ranks(config: Mapping[str, Any]) -> int:
    """Return the number of processes of the training engine, one for each of its accelerators."""
    return int(lookup(config, "trainer.nnodes")) * int(lookup(config, "trainer.n_gpus_per_node"))


def batch_size(config: Mapping[str, Any], training: AsyncTraining) -> int:
    """Return b, the number of prompt groups of a step.

    With the admission policy `whole_batches` or with ``placement=shared``, b is `data.train_batch_size`, as in
    synchronous training. Otherwise, or if that setting is 0, b is `ppo_mini_batch_size * require_batches`.
    """
    whole = int(lookup(config, "data.train_batch_size") or 0) if synchronous_batch(training) else 0
    return whole or int(lookup(config, "actor_rollout_ref.actor.ppo_mini_batch_size")) * training.require_batches


WAITING_SHARE = 0.25
"""Number of trajectories that queue at an engine, as a share of its sequence slots (`max_num_seqs`). When a trajectory
ends, a queued one gets its slot in the same decode step. Without a queue, the slot would be empty for a step or two.
"""
TOOLS_FACTOR = 4
"""If `concurrent_samples_per_replica` is null, the factor by which the number of trajectories in progress may grow
while some of them wait for tools.
"""


def slots_per_replica(config: Mapping[str, Any], training: AsyncTraining) -> int:
    """Return the number of trajectories that one replica works on at the same time, at least one whole group."""
    answers = int(lookup(config, "actor_rollout_ref.rollout.n"))
    groups = training.concurrent_samples_per_replica
    if groups is not None:
        return groups * answers
    places = int(lookup(config, "actor_rollout_ref.rollout.max_num_seqs") or answers)
    return max(answers, places + int(WAITING_SHARE * places))


def places_per_replica(config: Mapping[str, Any], training: AsyncTraining) -> int:
    """Return how many trajectories the engine of one replica decodes at the same time, at most `max_num_seqs`."""
    slots = slots_per_replica(config, training)
    return min(slots, int(lookup(config, "actor_rollout_ref.rollout.max_num_seqs") or slots))


def rehearses(config: Mapping[str, Any], training: AsyncTraining) -> bool:
    """Return whether the run begins with a rehearsal, a trial of its main operations (docs/first-run.md)."""
    return training.rehearsal is True or (training.rehearsal == "auto" and lookup(config, "trainer.device") != "cpu")


def teachers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the teachers' configuration sections, or () without distillation.

    Like verl, leave out the default section `teacher_model` if there are other sections
    (verl/workers/config/distillation.py:310).
    """
    if not lookup(config, "distillation.enabled"):
        return ()
    names = tuple(lookup(config, "distillation.teacher_models") or ())
    return tuple(f"distillation.teacher_models.{n}" for n in names if n != "teacher_model" or len(names) == 1)


DEFAULT_TEACHER = "distillation.teacher_models.teacher_model"


def teacher_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys by which verl finds a row's teacher; () if there is only one, which verl asks for every row."""
    keys = tuple(lookup(config, f"{teacher}.key") for teacher in teachers(config))
    return keys if len(keys) > 1 else ()


def epoch_prompts(dataset_rows: int, batch_groups: int, training: AsyncTraining) -> int:
    """Return the number of prompts used per epoch.

    With the admission policy `whole_batches`, an incomplete last batch is left out, as in verl.
    """
    return dataset_rows - dataset_rows % batch_groups if training.whole_batches else dataset_rows


def proximal_source(config: Mapping[str, Any], settings: Settings) -> Proximal:
    """Return the source of the proximal log-probs, which is derived from other settings if not set."""
    if settings.async_training.proximal_log_probs is not None:
        return Proximal(settings.async_training.proximal_log_probs)
    if settings.servers.enabled:
        return Proximal.SERVER
    return Proximal.BYPASS if lookup(config, "algorithm.rollout_correction.bypass_mode") else Proximal.RECOMPUTE


def group_limits(epochs: int | None, settings: Settings, batch_groups: int, dataset_rows: int | None) -> dict[str, int]:
    """Return the number of prompt groups that may be issued, for each setting that limits this number."""
    limits = {}
    if settings.rollout.total_rollout_steps is not None:
        limits["rollout.total_rollout_steps"] = settings.rollout.total_rollout_steps
    if epochs is not None and dataset_rows is not None:
        limits["trainer.total_epochs"] = epochs * epoch_prompts(dataset_rows, batch_groups, settings.async_training)
    return limits


def derive(config: Mapping[str, Any], *, dataset_rows: int | None = None) -> RunPlan:
    """Derive the plan of a run from a whole configuration.

    ``config`` is the composed configuration as a plain, resolved mapping, which `judge` has accepted. ``dataset_rows``
    is the number of prompts in the training data after filtering; None if not known yet.

    Raises:
        ConfigError: a section of this package is invalid, or no setting limits the number of steps.
    """
    settings, problems = read_settings(config)
    if problems:
        raise ConfigError(problems)
    return plan_of(config, settings, dataset_rows)


def plan_of(config: Mapping[str, Any], settings: Settings, dataset_rows: int | None) -> RunPlan:
    """Derive the plan of a configuration whose sections have been read; the arguments are those of `derive`."""
    training = settings.async_training
    batch_groups = batch_size(config, training)
    epochs = lookup(config, "trainer.total_epochs")
    groups = group_limits(epochs, settings, batch_groups, dataset_rows).values()
    steps = [limit // batch_groups for limit in groups]
    if (asked := lookup(config, "trainer.total_training_steps")) is not None:
        steps.append(asked)
    if not steps and (epochs is None or dataset_rows is not None):
        advice = "Set it, or rollout.total_rollout_steps, or give the number of rows of the data."
        raise ConfigError([Problem("trainer.total_training_steps", "null", "an integer >= 1", advice)])
    replicas = rollout_accelerators(config, settings) // replica_size(config)
    slots = replicas * slots_per_replica(config, training)
    return RunPlan(
        batch_groups=batch_groups,
        batches_per_version=training.trigger_parameter_sync_step,
        answers_per_group=int(lookup(config, "actor_rollout_ref.rollout.n")),
        max_staleness=staleness_bound(training),
        pipeline_depth=training.staleness_threshold,
        trainer_ranks=trainer_ranks(config),
        rollout_replicas=replicas,
        hybrid_replicas=hybrid_replicas(config, settings),
        total_steps=min(steps, default=0),
        total_groups=min(groups, default=None),
        max_concurrent_trajectories=slots,
        max_trajectories_with_tools=slots * (1 if training.concurrent_samples_per_replica else TOOLS_FACTOR),
        engine_places=replicas * places_per_replica(config, training),
        proximal=proximal_source(config, settings),
        settings=settings,
    )
