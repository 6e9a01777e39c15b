# SPDX-License-Identifier: Apache-2.0
"""The settings this package adds to verl's, as types, and the facts derived from them.

Contract: a setting has one meaning, stands here once with its default, unit, limits and meaning, and is documented from
here (docs/configuration.md is generated). What can be derived is derived by `derive` and nowhere else. Everything works
on plain mappings (`OmegaConf.to_container(config, resolve=True)`), so it needs no process and no heavy import.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from recipe.async_engine.core.knobs import knob, read_section, seconds, subsection
from recipe.async_engine.core.problems import ConfigError, Problem
from recipe.async_engine.core.server_settings import LogProbServers, Proximal

SHARED = "shared"
VERSIONS: dict[str, Any] = {"unit": "versions", "minimum": 0}


@dataclasses.dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines. A wait that passes its deadline ends with an error that names the deadline's setting."""

    startup: float = seconds(1800.0, "Until all workers, servers and models are up.")
    first_weights: float = seconds(
        1800.0, "How long a request to a rollout server waits for the first committed version before it fails."
    )
    weight_sync: float = seconds(600.0, "One weight sync, from the pause of generation to the last replica's commit.")
    generation: float = seconds(
        1800.0, "One generation request to a rollout replica; a group that fails by it is retried."
    )
    prompt: float = seconds(600.0, "How long the training data's loader may take for one prompt before the run ends.")
    trajectory: float = seconds(
        2400.0,
        "One trajectory to its last token, all requests and tools of its agent loop included; one that fails by it is"
        " retried. Time between generation turns does not count. With its retries it should end within `batch_wait`.",
    )
    agent_worker: float = seconds(
        180.0,
        "How long an agent-loop worker may not answer, because its process stopped or a tool blocks its event loop,"
        " before it is ended and started again (`max_replica_restarts`).",
    )
    reward: float = seconds(300.0, "The reward of one trajectory; a group that fails by it is retried.")
    batch_wait: float = seconds(
        3600.0, "How long the trainer waits for the next batch before the run ends with an error."
    )
    drain: float = seconds(1800.0, "How long a weight sync waits for running answers when `partial_rollout` is false.")
    validation: float = seconds(3600.0, "One validation pass over all prompts.")
    checkpoint: float = seconds(1800.0, "Writing or reading one checkpoint.")
    stall: float = seconds(
        5400.0,
        "Longest time in which nothing at all begins or ends: no answer, no reward, no stage of the trainer. Then the"
        " run ends and says who waits for whom. Longer than the longest stage, and than the deadlines that name a"
        " cause themselves.",
    )
    heartbeat: float = seconds(
        300.0,
        "How long the main waits for a sign of life of the trainer's process, which a thread there gives every second,"
        " before it ends the run. It is missed by a process that is stopped, or in which one call keeps Python's lock;"
        " longer than the longest such call (unpickling a large batch, say).",
    )
    stop: float = seconds(
        900.0, "From SIGTERM or Ctrl-C to the end of the run: the step under way and a checkpoint. Then it is cut off."
    )


@dataclasses.dataclass(frozen=True, slots=True)
class AsyncTraining:
    """How far generation and training may run apart, and what happens at a weight sync."""

    staleness_threshold: float = knob(
        0.1,
        "How far generation runs ahead of training: with 0 it starts only what the current version needs, with 1 it"
        " may hold one more version's worth of groups. The soft depth of the pipeline (see `pipeline_depth`).",
        **VERSIONS,
    )
    max_staleness: int | None = knob(
        None,
        "The hard bound: no group is trained more versions after its oldest token than this, and nothing is dropped"
        " for it. null: 0 if `staleness_threshold` is 0, else the threshold rounded up.",
        **VERSIONS,
    )
    pipeline_depth: float | None = knob(
        None,
        "How far generation runs ahead, fractions allowed; at most `max_staleness`. null: `staleness_threshold`.",
        **VERSIONS,
    )
    on_overdue: str = knob(
        "wait",
        "What happens to a running group that keeps the next batch from being taken: `wait` for it, or `drop` it (it"
        " is cancelled and counted as filtered; this starves long answers).",
        choices=("wait", "drop"),
    )
    on_non_finite: str = knob(
        "fail",
        "What a group counts as in which a reward, what groups are filtered by, or a log-prob of the rollout is NaN or"
        " infinite: `fail`, failed (after `max_group_retries` where another attempt may help, which it may not for a"
        " reward), or `drop`, filtered. It is not trained either way, and either way the run ends when a batch of"
        " groups in a row came to nothing.",
        choices=("fail", "drop"),
    )
    max_skipped_updates: int = knob(
        3,
        "The run ends after so many updates in a row that the optimizer skipped because the norm of the gradient was"
        " not finite; those of actor and critic are counted apart.",
        unit="updates",
        minimum=1,
    )
    trigger_parameter_sync_step: int = knob(4, "Batches trained from one weight sync to the next.", minimum=1)
    placement: str = knob(
        "separate",
        "Where the two sides run: `separate` gives the rollout replicas accelerators of their own (`rollout.nnodes`,"
        " `rollout.n_gpus_per_node`); `shared` has both sides take turns on the trainer's, and the two settings have no"
        " effect. Each mode's own configuration sets it.",
        choices=("separate", "shared"),
    )
    off_policy_mask: int | None = knob(
        None,
        "Tokens that were sampled more versions ago than this give no policy gradient (0: off-policy tokens give none);"
        " the rest of their answers does. null: every token does.",
        **VERSIONS,
    )
    require_batches: int = knob(
        1,
        "A step trains one batch of `actor_rollout_ref.actor.ppo_mini_batch_size` times this many prompt groups.",
        minimum=1,
    )
    whole_batches: bool = knob(
        False,
        "One-step-off: a prompt's batch is fixed when the prompt is issued, as in synchronous training, and batches are"
        " trained in that order. false: a step trains the oldest prompts whose answers are ready.",
    )
    partial_rollout: bool = knob(
        True,
        "At a weight sync: true interrupts running answers and continues them under the new version; false waits for"
        " them (`timeouts.drain`). No interrupted answer is trained as a complete one either way.",
    )
    concurrent_samples_per_replica: int | None = knob(
        16,
        "Prompt groups a rollout replica works on at the same time. null: a quarter more answers than its engine has"
        " places for (`actor_rollout_ref.rollout.max_num_seqs`), so that one waits at the engine wherever one ends.",
        unit="groups",
        minimum=1,
    )
    proximal_log_probs: str | None = knob(
        None,
        "Whose log-probs an update starts from: `bypass`, those of the policy that sampled; `recompute`, those of the"
        " newest published version, by the trainer; `server`, by the log-prob servers; `loglinear`, interpolated"
        " between sampling and current policy in the loss. null: `server` if there are any, else by"
        " `algorithm.rollout_correction.bypass_mode`, which otherwise follows from this.",
        choices=tuple(Proximal),
    )
    max_group_retries: int = knob(
        2,
        "How often a failed group is generated again, on another replica if there is one, before it counts as failed.",
        minimum=0,
    )
    max_replica_restarts: int = knob(
        3,
        "How many rollout replicas and log-prob servers, in all, are started in the place of those that died. The run"
        " goes on meanwhile and without them; a new one takes part from the next weight sync on. Where they share the"
        " trainer's accelerators, the next weight sync waits for it. Each reward worker and each agent-loop worker is"
        " started again as often.",
        minimum=0,
    )
    partial_tokens_interval: float | None = knob(
        2.0,
        "How often the tokens of answers under way are fetched from the rollout servers: an answer whose server dies"
        " goes on elsewhere from them. null: never; it then goes on from its last interruption.",
        unit="seconds",
        above=0,
    )
    reward_processes: int = knob(
        1,
        "Processes of each reward worker (`reward.num_workers`) that call a synchronous reward function, with"
        " `timeouts.reward` for each call. 0: threads of the reward worker, as in verl; a call that never returns is"
        " given up, but goes on.",
        minimum=0,
    )
    reward_memory_gib: float | None = knob(
        None, "Address space of each process that scores; null: no limit.", unit="GiB", above=0
    )
    prefork_workers: bool = knob(
        True,
        "Start the processes of a run as forks of one that has imported the stack: in a moment each, instead of some"
        " ten seconds. Only on the CPU platform and with a Ray that the run starts itself; without effect elsewhere.",
    )
    timeouts: Timeouts = subsection(Timeouts, "Deadlines.")  # noqa: RUF009 - it returns a dataclass field
    use_trainer_do_validate: bool = knob(
        False,
        "Stock: validate on the trainer's accelerators too. Accepted without effect, with a notice: validation runs on"
        " the rollout replicas and gives the same scores.",
    )
    use_dynamic_resource_scheduling: bool = knob(
        False,
        "Stock: lend the trainer's accelerators to generation. Only false is accepted: placement is fixed here.",
    )
    dynamic_schedule_policy: str = knob(
        "default", "Stock: only read with `use_dynamic_resource_scheduling`. Accepted without effect."
    )
    dynamic_schedule_deactivate_ratio: float = knob(
        0.3, "Stock: only read with `use_dynamic_resource_scheduling`. Accepted without effect.", minimum=0
    )
    dynamic_schedule_enable_rebalance: bool = knob(
        True, "Stock: only read with `use_dynamic_resource_scheduling`. Accepted without effect."
    )


@dataclasses.dataclass(frozen=True, slots=True)
class RolloutResources:
    """Resources of the rollout replicas, and how much they generate in all."""

    nnodes: int = knob(1, "Nodes for rollout replicas.", minimum=1)
    n_gpus_per_node: int = knob(8, "Accelerators for rollout replicas on each node.", minimum=1)
    n: int | None = knob(
        None,
        "Answers for each prompt; always equal to `actor_rollout_ref.rollout.n`, which is the one to set. (Stock has"
        " this setting and never reads it.)",
        unit="answers",
    )
    total_rollout_steps: int | None = knob(
        100, "Prompt groups issued in all, at most; null: no limit of its own.", unit="groups", minimum=1
    )


@dataclasses.dataclass(frozen=True, slots=True)
class BuiltinTask:
    """The task that comes with the package: a tokenizer, a small warm-started model, data and a rule-based reward.

    It fills `actor_rollout_ref.model.path`, `data.train_files` and `data.val_files` where they are null, and, with
    `data.train_files`, `reward.custom_reward_function.path`.
    """

    dir: str | None = knob(
        None, "Where it is made, and found again by later runs. null: `task` in `trainer.default_local_dir`."
    )
    seed: int = knob(0, "Seed of data, model and warm start.", minimum=0)
    family: str = knob("qwen3", "Architecture of the model.", choices=("qwen3", "qwen2"))
    lengths: str = knob("uniform", "Distribution of the answers' lengths.", choices=("uniform", "long_tail"))
    train_size: int = knob(4096, "Prompts to train on.", unit="prompts", minimum=1)
    val_size: int = knob(256, "Prompts to validate on, none of them trained on.", unit="prompts", minimum=1)
    permute_rewards: bool = knob(
        False, "A control: training rewards are those of other answers, in permuted order, so nothing can be learned."
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """All settings of this package, read from one configuration."""

    async_training: AsyncTraining
    rollout: RolloutResources
    builtin_task: BuiltinTask | None
    servers: LogProbServers


SECTIONS: Mapping[str, type[Any]] = {
    "async_training": AsyncTraining,
    "async_training.timeouts": Timeouts,
    "rollout": RolloutResources,
    "builtin_task": BuiltinTask,
    "model_engine_server": LogProbServers,
}


def read_settings(config: Mapping[str, Any]) -> tuple[Settings, list[Problem]]:
    """Read this package's sections of a whole configuration, with every fault found in them."""
    training, problems = read_section(AsyncTraining, config.get("async_training"), "async_training")
    rollout, more = read_section(RolloutResources, config.get("rollout"), "rollout")
    problems += more
    task = None
    if config.get("builtin_task") is not None:
        task, more = read_section(BuiltinTask, config["builtin_task"], "builtin_task")
        problems += more
    servers = config.get("model_engine_server")
    if isinstance(servers, Mapping):
        # verl's own type, which verl reads.
        servers = {key: value for key, value in servers.items() if key != "engine"}
    log_probs, more = read_section(LogProbServers, servers, "model_engine_server")
    problems += more
    return Settings(training, rollout, task, log_probs), problems


def lookup(config: Mapping[str, Any], setting: str, default: Any = None) -> Any:
    """The value at a dotted path, or `default` where a part of the path is absent or null on the way."""
    node: Any = config
    for part in setting.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


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
    total_steps: int  # at most; filtered and failed groups can only make it fewer
    total_groups: int | None  # prompt groups issued at most; None where only `total_steps` bounds them
    max_concurrent_trajectories: int  # at the engines at the same time, over all replicas
    engine_places: int  # how many of these the engines generate at once; the others wait at them
    proximal: Proximal  # where the proximal log-probs come from
    settings: Settings


def staleness_bound(training: AsyncTraining) -> int:
    """S, the hard bound in versions."""
    if training.max_staleness is not None:
        return training.max_staleness
    return 0 if training.staleness_threshold == 0 else max(1, math.ceil(training.staleness_threshold))


def soft_depth(training: AsyncTraining) -> float:
    """The depth of the pipeline in versions; `validate` refuses one above the bound."""
    return training.staleness_threshold if training.pipeline_depth is None else training.pipeline_depth


def replica_size(config: Mapping[str, Any]) -> int:
    """Accelerators of one rollout replica: tensor x data x pipeline parallel size."""
    rollout = "actor_rollout_ref.rollout."
    sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    return math.prod(int(lookup(config, rollout + name, 1) or 1) for name in sizes)


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
    return int(lookup(config, "trainer.nnodes", 1)) * int(lookup(config, "trainer.n_gpus_per_node", 1))


def batch_size(config: Mapping[str, Any], training: AsyncTraining) -> int:
    """b, the prompt groups of a step; 0 where the settings do not say.

    `data.train_batch_size` where a step is one of synchronous training (whole batches, shared placement); where that
    is 0, and in the other modes, `ppo_mini_batch_size * require_batches`.
    """
    whole = int(lookup(config, "data.train_batch_size") or 0) if synchronous_batch(training) else 0
    return whole or int(lookup(config, "actor_rollout_ref.actor.ppo_mini_batch_size", 0)) * training.require_batches


# Of an engine's places: how many trajectories wait at it. One that ends is followed by the next in the same step; from
# farther away the next one would come a step or two later.
WAITING_SHARE = 0.25


def slots_per_replica(config: Mapping[str, Any], training: AsyncTraining) -> int:
    """Trajectories that one replica has at the same time; at least a group's."""
    answers = int(lookup(config, "actor_rollout_ref.rollout.n", 1))
    groups = training.concurrent_samples_per_replica
    if groups is not None:
        return groups * answers
    places = int(lookup(config, "actor_rollout_ref.rollout.max_num_seqs", answers))
    return max(answers, places + int(WAITING_SHARE * places))


def places_per_replica(config: Mapping[str, Any], training: AsyncTraining) -> int:
    """How many of a replica's trajectories its engine generates at once."""
    slots = slots_per_replica(config, training)
    return min(slots, int(lookup(config, "actor_rollout_ref.rollout.max_num_seqs", slots)))


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
    training = settings.async_training
    batch_groups = batch_size(config, training)
    groups = group_limits(lookup(config, "trainer.total_epochs"), settings, batch_groups, dataset_rows).values()
    steps = [limit // batch_groups for limit in groups]
    if (asked := lookup(config, "trainer.total_training_steps")) is not None:
        steps.append(asked)
    if not steps:
        advice = "Set it, or rollout.total_rollout_steps, or give the number of rows of the data."
        raise ConfigError([Problem("trainer.total_training_steps", "null", "an integer >= 1", advice)])
    replicas = rollout_accelerators(config, settings) // replica_size(config)
    return RunPlan(
        batch_groups=batch_groups,
        batches_per_version=training.trigger_parameter_sync_step,
        answers_per_group=int(lookup(config, "actor_rollout_ref.rollout.n", 1)),
        max_staleness=staleness_bound(training),
        pipeline_depth=soft_depth(training),
        trainer_ranks=trainer_ranks(config),
        rollout_replicas=replicas,
        total_steps=min(steps),
        total_groups=min(groups, default=None),
        max_concurrent_trajectories=replicas * slots_per_replica(config, training),
        engine_places=replicas * places_per_replica(config, training),
        proximal=proximal_source(config, settings),
        settings=settings,
    )
