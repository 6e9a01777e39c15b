# SPDX-License-Identifier: Apache-2.0
"""What a run does, derived from its configuration: sizes, bounds, numbers of steps.

Contract: what can be derived is derived here and nowhere else.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from recipe.async_engine.config.fields import is_count
from recipe.async_engine.config.log_prob_servers import Proximal
from recipe.async_engine.config.problems import ConfigError, Problem, lookup
from recipe.async_engine.config.sections import SHARED, AsyncTraining, Settings, read_settings

# Versions that a group may be old by default: more than a long answer needs, and no more than learning allows
# (docs/benchmarks.md, "Learning by mode and bound").
USUAL_BOUND = 4
MODEL = "actor_rollout_ref.model"


@dataclasses.dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run does, derived from its configuration."""

    batch_groups: int  # b, prompt groups trained by one step
    batches_per_version: int  # k, steps from one weight sync to the next
    answers_per_group: int  # n
    max_staleness: int  # S, the hard bound in versions
    pipeline_depth: float  # how far generation runs ahead, in versions; at most S
    trainer_ranks: int  # processes of the training engine
    rollout_replicas: int
    # At most; filtered and failed groups can only make it fewer. 0: the data set will say it, when the run has made it.
    total_steps: int
    total_groups: int | None  # prompt groups issued at most; None where only `total_steps` bounds them
    max_concurrent_trajectories: int  # at the engines at the same time, over all replicas
    max_trajectories_with_tools: int  # under way at the same time, while some are at tools
    engine_places: int  # how many of these the engines generate at once; the others wait at them
    proximal: Proximal  # where the proximal log-probs come from
    settings: Settings


def has_critic(config: Mapping[str, Any]) -> bool:
    """Whether verl trains a critic (verl/trainer/ppo/utils.py:96)."""
    enabled = lookup(config, "critic.enable")
    return bool(lookup(config, "algorithm.adv_estimator") == "gae" if enabled is None else enabled)


def adapter_rank(config: Mapping[str, Any]) -> int:
    """Rank of the LoRA adapters that are trained; 0 without. Each training engine has its own name for it."""
    ranks = (lookup(config, f"{MODEL}.{name}") for name in ("lora_rank", "lora.rank"))
    return max((rank for rank in ranks if is_count(rank)), default=0)


def has_adapter(config: Mapping[str, Any]) -> bool:
    """Whether verl trains adapters, whose base is the reference policy (verl/trainer/ppo/ray_trainer.py:360)."""
    return adapter_rank(config) > 0 or lookup(config, f"{MODEL}.lora_adapter_path") is not None


def uses_kl(config: Mapping[str, Any]) -> bool:
    """Whether a reference policy is asked for log-probs (verl/trainer/ppo/utils.py:75)."""
    actor = "actor_rollout_ref.actor"
    return bool(lookup(config, "algorithm.use_kl_in_reward") or lookup(config, f"{actor}.use_kl_loss"))


def has_reference(config: Mapping[str, Any]) -> bool:
    """Whether the trainer's workers keep a reference policy of their own."""
    return uses_kl(config) and not has_adapter(config)


def staleness_bound(training: AsyncTraining) -> int:
    """S, the hard bound in versions; by default wide enough for answers that are generated for several versions.

    The depth alone decides how old samples usually are. A bound as tight as the depth makes training wait for the
    slowest answer of each batch, which the depth of stock verl, a count of samples, does not.
    """
    if training.max_staleness is not None:
        return training.max_staleness
    depth = math.ceil(training.staleness_threshold)
    return depth if depth == 0 or training.whole_batches else max(USUAL_BOUND, depth)


def replica_size(config: Mapping[str, Any], rollout: str = "actor_rollout_ref.rollout") -> int:
    """Accelerators of one replica of a rollout section: tensor x data x pipeline parallel size."""
    sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    return math.prod(int(lookup(config, f"{rollout}.{name}") or 1) for name in sizes)


def synchronous_batch(training: AsyncTraining) -> bool:
    """Whether a step trains `data.train_batch_size` prompts in mini-batches, as synchronous training does."""
    return training.whole_batches or training.placement == SHARED


def rollout_accelerators(config: Mapping[str, Any], settings: Settings) -> int:
    """Accelerators that the rollout replicas run on: their own, or those that they share with the trainer."""
    if settings.async_training.placement == SHARED:
        return trainer_ranks(config)
    return settings.rollout.nnodes * settings.rollout.n_gpus_per_node


def trainer_ranks(config: Mapping[str, Any]) -> int:
    """Processes of the training engine, one for each of its accelerators."""
    return int(lookup(config, "trainer.nnodes")) * int(lookup(config, "trainer.n_gpus_per_node"))


def batch_size(config: Mapping[str, Any], training: AsyncTraining) -> int:
    """b, the prompt groups of a step.

    `data.train_batch_size` where a step is one of synchronous training (whole batches, shared placement); where that
    is 0, and in the other modes, `ppo_mini_batch_size * require_batches`.
    """
    whole = int(lookup(config, "data.train_batch_size") or 0) if synchronous_batch(training) else 0
    return whole or int(lookup(config, "actor_rollout_ref.actor.ppo_mini_batch_size")) * training.require_batches


# Of an engine's places: how many trajectories wait at it. One that ends is followed by the next in the same step; from
# farther away the next one would come a step or two later.
WAITING_SHARE = 0.25
# Where nobody says how many trajectories a replica has, tools may make them so many times more.
TOOLS_FACTOR = 4


def slots_per_replica(config: Mapping[str, Any], training: AsyncTraining) -> int:
    """Trajectories that one replica has at the same time; at least a group's."""
    answers = int(lookup(config, "actor_rollout_ref.rollout.n"))
    groups = training.concurrent_samples_per_replica
    if groups is not None:
        return groups * answers
    places = int(lookup(config, "actor_rollout_ref.rollout.max_num_seqs") or answers)
    return max(answers, places + int(WAITING_SHARE * places))


def places_per_replica(config: Mapping[str, Any], training: AsyncTraining) -> int:
    """How many of a replica's trajectories its engine generates at once."""
    slots = slots_per_replica(config, training)
    return min(slots, int(lookup(config, "actor_rollout_ref.rollout.max_num_seqs") or slots))


def rehearses(config: Mapping[str, Any], training: AsyncTraining) -> bool:
    """Whether the run begins with a rehearsal."""
    return training.rehearsal is True or (training.rehearsal == "auto" and lookup(config, "trainer.device") != "cpu")


def epoch_prompts(dataset_rows: int, batch_groups: int, training: AsyncTraining) -> int:
    """Prompts used of each pass over the data: whole batches leave out the last, incomplete one, as verl does."""
    return dataset_rows - dataset_rows % batch_groups if training.whole_batches else dataset_rows


def proximal_source(config: Mapping[str, Any], settings: Settings) -> Proximal:
    """Where a run's proximal log-probs come from: what is asked for, else what follows from the rest."""
    if settings.async_training.proximal_log_probs is not None:
        return Proximal(settings.async_training.proximal_log_probs)
    if settings.servers.enabled:
        return Proximal.SERVER
    return Proximal.BYPASS if lookup(config, "algorithm.rollout_correction.bypass_mode") else Proximal.RECOMPUTE


def group_limits(epochs: int | None, settings: Settings, batch_groups: int, dataset_rows: int | None) -> dict[str, int]:
    """Prompt groups that may be issued at most, by the setting that says so."""
    limits = {}
    if settings.rollout.total_rollout_steps is not None:
        limits["rollout.total_rollout_steps"] = settings.rollout.total_rollout_steps
    if epochs is not None and dataset_rows is not None:
        limits["trainer.total_epochs"] = epochs * epoch_prompts(dataset_rows, batch_groups, settings.async_training)
    return limits


def derive(config: Mapping[str, Any], *, dataset_rows: int | None = None) -> RunPlan:
    """Derive the plan of a run from a whole configuration.

    Args:
        config: The composed configuration as a plain, resolved mapping; validated before (`validate`).
        dataset_rows: Prompts in the training data after filtering; None where not known yet.

    Raises:
        ConfigError: A section of this package does not read, or nothing bounds the number of steps.
    """
    settings, problems = read_settings(config)
    if problems:
        raise ConfigError(problems)
    return plan_of(config, settings, dataset_rows)


def plan_of(config: Mapping[str, Any], settings: Settings, dataset_rows: int | None) -> RunPlan:
    """`derive`, of a configuration whose sections have been read."""
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
        total_steps=min(steps, default=0),
        total_groups=min(groups, default=None),
        max_concurrent_trajectories=slots,
        max_trajectories_with_tools=slots * (1 if training.concurrent_samples_per_replica else TOOLS_FACTOR),
        engine_places=replicas * places_per_replica(config, training),
        proximal=proximal_source(config, settings),
        settings=settings,
    )
