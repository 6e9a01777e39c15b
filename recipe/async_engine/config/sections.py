# SPDX-License-Identifier: Apache-2.0
"""The settings this package adds to verl's, as types.

Contract: a setting has one meaning, stands here once with its default, unit, limits and meaning, and is documented from
here (docs/configuration.md is generated). They are read from plain mappings
(`OmegaConf.to_container(config, resolve=True)`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from recipe.async_engine.config.alarms import Alarms
from recipe.async_engine.config.fields import field, read_section, seconds, subsection
from recipe.async_engine.config.log_prob_servers import LogProbServers, Proximal
from recipe.async_engine.config.problems import Problem
from recipe.async_engine.core.scoring import Anchor

SHARED = "shared"
VERSIONS: dict[str, Any] = {"unit": "versions", "minimum": 0}


@dataclasses.dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines. A wait that passes its deadline ends with an error that names the deadline's setting."""

    startup: float = seconds(1800.0, "Until all workers, servers and models are up.")
    first_weights: float = seconds(
        1800.0, "How long a request to a rollout server waits for the first committed version before it fails."
    )
    weight_sync: float = seconds(
        600.0, "One weight sync, from its beginning to the last replica's commit, and each part of it."
    )
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
        " before it is ended and started again.",
    )
    reward: float = seconds(300.0, "The reward of one trajectory; a group that fails by it is retried.")
    batch_wait: float = seconds(
        3600.0, "How long the trainer waits for the next batch before the run ends with an error."
    )
    drain: float = seconds(1800.0, "How long a weight sync waits for running answers where it drains them.")
    validation: float = seconds(3600.0, "One validation pass over all prompts.")
    rehearsal: float = seconds(
        120.0,
        "The transfer of the weights in the rehearsal (`rehearsal`), and each of its other steps. A sync has its own,"
        " longer deadline, so a transfer that is slow here falls back and can still be right there.",
    )
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
    trackers: float = seconds(
        120.0,
        "How long the trackers (`trainer.logger`) have at a run's end, all at the same time, to take their last rows,"
        " the summary and the status. One that takes longer is left behind.",
    )
    stop: float = seconds(
        900.0, "From SIGTERM or Ctrl-C to the end of the run: the step under way and a checkpoint. Then it is cut off."
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """How new weights get to the rollout replicas."""

    staging: str = field(
        "device",
        "Where a version waits until every replica has it: `device`, beside the live weights in the engine's memory,"
        " which takes room for the weights a second time (leave it with `rollout.gpu_memory_utilization`); generation"
        " pauses for the swap alone. `host`: in host memory, as much for each replica as its weights take on its"
        " devices, and generation pauses for a copy to the device as well. `none`: nowhere; generation pauses while"
        " they are loaded in place. Where both sides share accelerators nothing generates during a sync, and they are"
        " loaded in place either way.",
        choices=("device", "host", "none"),
    )
    publish: str | None = field(
        None,
        "Whether the trainer waits for a version to reach the replicas: `beside`, it copies its weights to host memory"
        " of its first rank and trains on while they travel; `inline`, it waits. null: `beside`, or `inline` where both"
        " sides share accelerators, or with `model_engine_server.anchor=latest`, whose servers need the newest version"
        " to score what is trained next.",
        choices=("beside", "inline"),
    )
    at_swap: str | None = field(
        None,
        "What becomes of running answers when the weights are swapped: `drain`, the swap waits for them"
        " (`timeouts.drain`); `interrupt`, they are cut and go on under the new version from the tokens that they have;"
        " `keep`, they are held in the engine and go on there, what is before them being computed again by the new"
        " weights. Each token has the version that sampled it in any case."
        " null: `interrupt`, or `drain` with `async_training.partial_rollout=false`.",
        choices=("drain", "interrupt", "keep"),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class AsyncTraining:
    """How far generation and training may run apart, and what happens at a weight sync."""

    staleness_threshold: float = field(
        0.1,
        "How far generation runs ahead of training: with 0 it starts only what the current version needs, with 1 it"
        " may hold one more version's worth of groups. The soft depth of the pipeline (see `pipeline_depth`).",
        **VERSIONS,
    )
    max_staleness: int | None = field(
        None,
        "The hard bound: no group is trained more versions after its oldest token than this, and nothing is dropped"
        " for it. null: 0 if `staleness_threshold` is 0; with whole batches the threshold; else 4, or the threshold"
        " rounded up if that is more.",
        **VERSIONS,
    )
    pipeline_depth: float | None = field(
        None,
        "How far generation runs ahead, fractions allowed; at most `max_staleness`. null: `staleness_threshold`.",
        **VERSIONS,
    )
    on_non_finite: str = field(
        "fail",
        "What a group counts as in which a reward, what groups are filtered by, or a log-prob of the rollout is NaN or"
        " infinite: `fail`, failed (after `max_group_retries` where another attempt may help, which it may not for a"
        " reward), or `drop`, filtered. It is not trained either way, and either way the run ends when a batch of"
        " groups in a row came to nothing.",
        choices=("fail", "drop"),
    )
    trigger_parameter_sync_step: int = field(4, "Batches trained from one weight sync to the next.", minimum=1)
    placement: str = field(
        "separate",
        "Where the two sides run: `separate` gives the rollout replicas accelerators of their own (`rollout.nnodes`,"
        " `rollout.n_gpus_per_node`); `shared` has both sides take turns on the trainer's, and the two settings have no"
        " effect. Each mode's own configuration sets it.",
        choices=("separate", "shared"),
    )
    off_policy_mask: int | None = field(
        None,
        "Tokens that were sampled more versions ago than this give no policy gradient (0: off-policy tokens give none);"
        " the rest of their answers does. null: every token does.",
        **VERSIONS,
    )
    require_batches: int = field(
        1,
        "A step trains one batch of `actor_rollout_ref.actor.ppo_mini_batch_size` times this many prompt groups.",
        minimum=1,
    )
    admission_policy: str | None = field(
        None,
        "What may start, which answer is generated next and which batch is trained, within the bound: `oldest_ready`,"
        " a step trains the oldest prompts whose answers are ready; `whole_batches`, a prompt's batch is fixed when the"
        " prompt is issued, as in synchronous training (one-step-off); `turns`, as `oldest_ready`, but each free place"
        " at an engine is filled by one answer; or a class of your own by its dotted name (docs/extending.md). null:"
        " `turns` with `placement=shared`, else `oldest_ready`.",
    )
    partial_rollout: bool = field(
        True,
        "At a weight sync: true interrupts running answers and continues them under the new version; false waits for"
        " them (`timeouts.drain`). No interrupted answer is trained as a complete one either way.",
    )
    concurrent_samples_per_replica: int | None = field(
        16,
        "Prompt groups a rollout replica works on at the same time. null: a quarter more answers than its engine has"
        " places for (`actor_rollout_ref.rollout.max_num_seqs`), so that one waits at the engine wherever one ends;"
        " where agent loops use tools, more by the time that they are there, four times as many at most.",
        unit="groups",
        minimum=1,
    )
    proximal_log_probs: str | None = field(
        None,
        "Whose log-probs an update starts from: `bypass`, those of the policy that sampled; `recompute`, those of the"
        " newest published version, by the trainer; `server`, by the log-prob servers; `loglinear`, interpolated"
        " between sampling and current policy in the loss. null: `server` if there are any, else by"
        " `algorithm.rollout_correction.bypass_mode`, which otherwise follows from this.",
        choices=tuple(Proximal),
    )
    max_group_retries: int = field(
        2,
        "How often a failed group is generated again, on another replica if there is one, before it counts as failed.",
        minimum=0,
    )
    max_replica_restarts: int = field(
        3,
        "How many rollout replicas and log-prob servers, in all, are started in the place of those that died. The run"
        " goes on meanwhile and without them; a new one takes part from the next weight sync on. Where they share the"
        " trainer's accelerators, the next weight sync waits for it. Each reward worker is started again as often; an"
        " agent-loop worker is as often as it dies.",
        minimum=0,
    )
    partial_tokens_interval: float | None = field(
        2.0,
        "How often the tokens of answers under way are fetched from the rollout servers: an answer whose server dies"
        " goes on elsewhere from them. null: never; it then goes on from its last interruption.",
        unit="seconds",
        above=0,
    )
    reward_processes: int = field(
        1,
        "Processes of each reward worker (`reward.num_workers`) that call a synchronous reward function, with"
        " `timeouts.reward` for each call. 0: threads of the reward worker, as in verl; a call that never returns is"
        " given up, but goes on.",
        minimum=0,
    )
    reward_memory_gib: float | None = field(
        None, "Address space of each process that scores; null: no limit.", unit="GiB", above=0
    )
    prefork_workers: bool = field(
        True,
        "Start the processes of a run as forks of one that has imported the stack: in a moment each, instead of some"
        " ten seconds. Only on the CPU platform and with a Ray that the run starts itself; without effect elsewhere.",
    )
    device_memory_gib: float | None = field(
        None,
        "Memory of an accelerator, for the check before anything starts ([memory.md](memory.md)). null: as this"
        " machine's driver says, or Ray by the accelerators' type; where neither does, nothing is refused for it.",
        unit="GiB",
        above=0,
    )
    rehearsal: str | bool = field(
        "auto",
        "Whether a run begins with a rehearsal: its processes send the weights once more, with every trainer rank at"
        " work, interrupt and resume requests, put engines to sleep and wake them where they share accelerators, and"
        " compare log-probs ([first-run.md](first-run.md)). `auto`: on accelerators.",
        choices=("auto", "true", "false"),
    )
    events: bool = field(
        True,
        "Keep a record of events in `trainer.default_local_dir`: what every part did, from when to when. From it come"
        " the account of every accelerator's seconds in `summary.json` and the report (docs/run-record.md).",
    )
    start_from: str | None = field(
        None,
        "The folder `global_step_N` of a checkpoint, of stock verl or of this package, whose weights a run begins with"
        " where it has no checkpoint of its own to resume from. Only weights are carried, of the actor and, if there is"
        " one, of the critic: optimizer, learning-rate schedule, position in the data and the number of the step begin"
        " anew (docs/operations.md).",
    )
    prometheus: bool = field(
        True,
        "Give the run's figures to Ray's exporter of Prometheus metrics, every second: `ray_recipe_*` on each node's"
        " metrics port (docs/operations.md).",
    )
    alarms: Alarms = subsection(Alarms, "What is watched as a run goes.")  # noqa: RUF009 - it returns a dataclass field
    weights: Weights = subsection(Weights, "Weight syncs.")  # noqa: RUF009 - it returns a dataclass field
    timeouts: Timeouts = subsection(Timeouts, "Deadlines.")  # noqa: RUF009 - it returns a dataclass field
    use_trainer_do_validate: bool = field(
        False,
        "Stock: validate on the trainer's accelerators too. Accepted without effect, with a notice: validation runs on"
        " the rollout replicas and gives the same scores.",
    )
    use_dynamic_resource_scheduling: bool = field(
        False,
        "Stock: lend the trainer's accelerators to generation. Only false is accepted: placement is fixed here.",
    )
    dynamic_schedule_policy: str = field(
        "default", "Stock: only read with `use_dynamic_resource_scheduling`. Accepted without effect."
    )
    dynamic_schedule_deactivate_ratio: float = field(
        0.3, "Stock: only read with `use_dynamic_resource_scheduling`. Accepted without effect.", minimum=0
    )
    dynamic_schedule_enable_rebalance: bool = field(
        True, "Stock: only read with `use_dynamic_resource_scheduling`. Accepted without effect."
    )

    @property
    def policy(self) -> str:
        """The admission policy: as it is set, or what follows from the placement."""
        return self.admission_policy or ("turns" if self.placement == SHARED else "oldest_ready")

    @property
    def whole_batches(self) -> bool:
        """Whether a prompt's batch is fixed when it is issued, as in synchronous training."""
        return self.policy == "whole_batches"


@dataclasses.dataclass(frozen=True, slots=True)
class RolloutResources:
    """Resources of the rollout replicas, and how much they generate in all."""

    nnodes: int = field(
        1,
        "Nodes for rollout replicas.",
        minimum=1,
        instead="recipe.partial_rollout, or +recipe=partial_rollout, generates on the trainer's accelerators alone.",
    )
    n_gpus_per_node: int = field(8, "Accelerators for rollout replicas on each node.", minimum=1)
    n: int | None = field(
        None,
        "Answers for each prompt; always equal to `actor_rollout_ref.rollout.n`, which is the one to set. (Stock has"
        " this setting and never reads it.)",
        unit="answers",
    )
    total_rollout_steps: int | None = field(
        100, "Prompt groups issued in all, at most; null: no limit of its own.", unit="groups", minimum=1
    )


@dataclasses.dataclass(frozen=True, slots=True)
class BuiltinTask:
    """The task that comes with the package: a tokenizer, a small warm-started model, data and a rule-based reward.

    It fills `actor_rollout_ref.model.path`, `data.train_files` and `data.val_files` where they are null, and, with
    `data.train_files`, `reward.custom_reward_function.path`.
    """

    dir: str | None = field(
        None, "Where it is made, and found again by later runs. null: `task` in `trainer.default_local_dir`."
    )
    seed: int = field(0, "Seed of data, model and warm start.", minimum=0)
    family: str = field("qwen3", "Architecture of the model.", choices=("qwen3", "qwen2"))
    lengths: str = field("uniform", "Distribution of the answers' lengths.", choices=("uniform", "long_tail"))
    train_size: int = field(4096, "Prompts to train on.", unit="prompts", minimum=1)
    val_size: int = field(256, "Prompts to validate on, none of them trained on.", unit="prompts", minimum=1)
    permute_rewards: bool = field(
        False, "A control: training rewards are those of other answers, in permuted order, so nothing can be learned."
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """All settings of this package, read from one configuration."""

    async_training: AsyncTraining
    rollout: RolloutResources
    builtin_task: BuiltinTask | None
    servers: LogProbServers

    @property
    def weights(self) -> Weights:
        """`async_training.weights`, with what is null there decided."""
        training = self.async_training
        waits = training.placement == SHARED or (self.servers.enabled and self.servers.anchor == Anchor.LATEST)
        return dataclasses.replace(
            training.weights,
            publish=training.weights.publish or ("inline" if waits else "beside"),
            at_swap=training.weights.at_swap or ("interrupt" if training.partial_rollout else "drain"),
        )


SECTIONS: Mapping[str, type[Any]] = {
    "async_training": AsyncTraining,
    "async_training.alarms": Alarms,
    "async_training.weights": Weights,
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
