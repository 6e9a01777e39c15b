# SPDX-License-Identifier: Apache-2.0
"""The sections of settings that this package adds to verl's configuration.

Contract: each setting is declared once, with its default, unit, limits and meaning; docs/configuration.md is generated
from these declarations. Sections are read from plain mappings (`OmegaConf.to_container(config, resolve=True)`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic.dataclasses import dataclass

from recipe.async_engine.config.fields import STRICT, read_section, seconds, setting
from recipe.async_engine.config.legacy import of_stock
from recipe.async_engine.config.log_prob_servers import LogProbServers
from recipe.async_engine.config.problems import Problem
from recipe.async_engine.core.deadlines import TRACKERS_S
from recipe.async_engine.core.scoring import Anchor

SEPARATE: Final = "separate"
SHARED: Final = "shared"
ELASTIC: Final = "elastic"


@dataclass(frozen=True, slots=True, config=STRICT)
class Timeouts:
    """Deadlines of a run; work that passes its deadline ends with an error that names the setting.

    `recipe.async_engine.core.deadlines` lists the process that enforces each deadline, and the fixed deadlines.
    """

    startup: float = seconds(1800.0, "The launch of a run, until all workers, servers and models are up.")
    first_weights: float = seconds(
        1800.0, "How long a request to a rollout server waits for the first committed version before it fails."
    )
    weight_sync: float = seconds(
        600.0, "One weight sync, from its start until the last replica has the new weights, and each part of it."
    )
    generation: float = seconds(
        1800.0, "One answer of a rollout replica, or its next fetched tokens; later, its trajectory is retried."
    )
    prompt: float = seconds(600.0, "How long the training data's loader may take for one prompt before the run ends.")
    trajectory: float = seconds(
        2400.0,
        "One trajectory to its last token, with all requests and tools of its agent loop; one that takes longer is"
        " retried. Time between generation turns does not count. A weight sync that drains waits as long for running"
        " answers, and for their retries. A trajectory with all of its retries should end within `batch_wait`.",
    )
    agent_worker: float = seconds(
        180.0,
        "How long an agent-loop worker may not answer, because its process is suspended or a tool blocks its event"
        " loop, before it is killed and started again.",
    )
    reward: float = seconds(
        300.0, "The reward of one trajectory, or its teacher's answer; one that takes longer is asked for again."
    )
    batch_wait: float = seconds(
        3600.0,
        "How long the trainer waits for the next batch, or for a validation pass over all prompts, before the run ends"
        " with an error.",
    )
    rehearsal: float = seconds(
        120.0,
        "Each step of the rehearsal (`rehearsal`), such as the transfer of the weights. A weight sync has its own,"
        " longer deadline, so a transfer that is too slow for the rehearsal may still work in a sync.",
    )
    checkpoint: float = seconds(1800.0, "Writing or reading one checkpoint.")
    stall: float = seconds(
        5400.0,
        "The longest time in which nothing at all begins or ends: no answer, no reward, no stage of the trainer. Then"
        " the run ends and reports who waits for whom. It should exceed the longest stage, and all deadlines that name"
        " their own cause.",
    )
    heartbeat: float = seconds(
        300.0,
        "How long the main waits for a sign of life of the trainer's process, which a thread there gives every second,"
        " before it ends the run. No sign comes while the process is suspended, or while one call keeps Python's lock,"
        " so it should exceed the longest such call (unpickling a large batch, for example).",
    )
    stop: float = seconds(
        900.0,
        "From SIGTERM or Ctrl-C to the end of the run, for the current step and a checkpoint; then the run is killed."
        " At any end, the trackers (`trainer.logger`) have a third of it, and two minutes at most, to store their last"
        " rows, the summary and the status; the run does not wait longer for them.",
    )

    @property
    def trackers(self) -> float:
        """Seconds that all trackers together get at the end of a run to store their last data."""
        return min(TRACKERS_S, self.stop / 3)


@dataclass(frozen=True, slots=True, config=STRICT)
class Weights:
    """The settings for the transfer of new weights to the rollout replicas."""

    staging: Literal["device", "host", "none"] = setting(
        "device",
        "Where a version waits until every replica has it: `device`, beside the live weights in the engine's memory,"
        " which takes room for the weights a second time (leave it with `rollout.gpu_memory_utilization`); generation"
        " pauses for the swap alone. `host`: in host memory, as much for each replica as its weights take on its"
        " devices, and generation pauses for a copy to the device as well. `none`: nowhere; generation pauses while"
        " they are loaded in place. If trainer and replicas share accelerators, nothing generates during a sync, and"
        " weights are always loaded in place.",
    )
    publish: Literal["beside", "inline"] | None = setting(
        None,
        "Whether the trainer waits for a version to reach the replicas: `beside`, it copies its weights to host memory"
        " of its first rank and trains on while they travel; `inline`, it waits. null: `beside`, or `inline` if trainer"
        " and replicas share accelerators, or with `model_engine_server.anchor=latest`, whose servers need the newest"
        " version to score what is trained next.",
    )
    at_swap: Literal["drain", "interrupt", "keep"] | None = setting(
        None,
        "What becomes of running answers when the weights are swapped: `drain`, the swap waits for them;"
        " `interrupt`, they are interrupted and go on under the new version from the tokens that they have;"
        " `keep`, they stay in the engine and go on after it has recomputed their keys and values with the new weights."
        " Each token has the version that sampled it, and no interrupted answer is trained as a complete one. null:"
        " `drain` with `whole_batches`, else `interrupt`. Stock's `async_training.partial_rollout` is read as"
        " `interrupt` where it is true, and as `drain` where it is false.",
    )


@dataclass(frozen=True, slots=True, config=STRICT)
class Alarms:
    """The limits of the alarms in `core.alarms`. If a limit is null, its alarm never ends the run.

    `failed_groups` is a share: the run ends when a larger share of the latest prompt groups has failed. Every other
    limit is a number: the run ends when the alarm's condition has held that many times in a row. `exit_status` says
    whether a run that succeeded, but in which an alarm rang, exits with status 3.
    """

    failed_groups: float | None = setting(0.5, "", gt=0)
    skipped_updates: int | None = setting(3, "", ge=1)
    unchanged_weights: int | None = setting(3, "", ge=1)
    zero_gradients: int | None = setting(None, "", ge=1)
    uniform_rewards: int | None = setting(None, "", ge=1)
    empty_answers: int | None = setting(None, "", ge=1)
    failed_validation: int | None = setting(None, "", ge=1)
    exit_status: bool = setting(True, "")


@dataclass(frozen=True, slots=True, config=STRICT)
class AsyncTraining:
    """The settings of asynchronous training: staleness, batches, weight sync, fault tolerance, recording."""

    staleness_threshold: float = setting(
        0.1,
        "How far generation runs ahead of training, fractions allowed: with 0 it starts only what the current version"
        " needs, with 1 it may hold one more version's worth of groups. At most `max_staleness`.",
        unit="versions",
        ge=0,
    )
    max_staleness: int | None = setting(
        None,
        "The hard bound: no group is trained more versions after its oldest token than this, and nothing is dropped"
        " for it. null: 0 if `staleness_threshold` is 0; with whole batches the threshold; else 4, or the threshold"
        " rounded up if that is more.",
        unit="versions",
        ge=0,
    )
    on_non_finite: Literal["fail", "drop"] = setting(
        "fail",
        "How a group counts whose rewards, filter metric or rollout log-probs are NaN or infinite: `fail`, as failed"
        " (after `max_group_retries` if another attempt may help, which it may not for a reward), or `drop`, as"
        " filtered. It is not trained either way, and the run ends when a whole batch of groups in a row came to"
        " nothing.",
    )
    trigger_parameter_sync_step: int = setting(4, "Batches trained from one weight sync to the next.", ge=1)
    placement: Literal["separate", "shared", "elastic"] = setting(
        "separate",
        "Where trainer and replicas run: `separate` gives the replicas accelerators of their own (`rollout.nnodes`,"
        " `rollout.n_gpus_per_node`); `elastic` has further replicas on the trainer's, which generate while the trainer"
        " waits (docs/elastic.md); `shared` has both take turns on the trainer's (`rollout.nnodes=0` means this)."
        " Each mode's own configuration sets it.",
    )
    off_policy_mask: int | None = setting(
        None,
        "Tokens that were sampled more versions ago than this give no policy gradient (0: off-policy tokens give none);"
        " the rest of their answers does. null: every token does.",
        unit="versions",
        ge=0,
    )
    require_batches: int = setting(
        1,
        "A step trains one batch of `actor_rollout_ref.actor.ppo_mini_batch_size` times this many prompt groups.",
        ge=1,
    )
    admission_policy: str | None = setting(
        None,
        "What may start, which answer is generated next and which batch is trained, within the bound: `oldest_ready`,"
        " a step trains the oldest prompts whose answers are ready; `whole_batches`, a prompt's batch is fixed when the"
        " prompt is issued, as in synchronous training (one-step-off); `turns`, as `oldest_ready`, but each free place"
        " at an engine is filled by one answer; or a class of your own by its dotted name (docs/extending.md). null:"
        " `turns`, or `oldest_ready` with `placement=separate` or `at_swap=drain`.",
    )
    concurrent_samples_per_replica: int | None = setting(
        16,
        "Prompt groups a rollout replica works on at the same time. null: a quarter more answers than its engine has"
        " places for (`actor_rollout_ref.rollout.max_num_seqs`), so that another answer waits at the engine when one"
        " ends; while agent loops use tools, up to four times as many.",
        unit="groups",
        ge=1,
    )
    proximal_log_probs: Literal["bypass", "recompute", "server", "loglinear"] | None = setting(
        None,
        "Whose log-probs an update starts from: `bypass`, those of the policy that sampled; `recompute`, those of the"
        " newest published version, by the trainer; `server`, by the log-prob servers; `loglinear`, interpolated"
        " between sampling and current policy in the loss. null: `server` if there are any, else by"
        " `algorithm.rollout_correction.bypass_mode`, which otherwise follows from this.",
    )
    max_group_retries: int = setting(
        2,
        "How often a failed group is generated again, on another replica if there is one, before it counts as failed.",
        ge=0,
    )
    max_replica_restarts: int = setting(
        3,
        "How many rollout replicas, log-prob and teachers' servers, in all, are replaced when they die. The run"
        " continues without them meanwhile. A new replica joins at the next weight sync, which waits for it if they"
        " share the trainer's accelerators. Each reward worker is restarted as often; agent-loop workers whenever they"
        " die.",
        ge=0,
    )
    partial_tokens_interval: float | None = setting(
        2.0,
        "How often the tokens of answers under way are fetched from the rollout servers: an answer whose server dies"
        " goes on elsewhere from them. null: never; it then goes on from its last interruption.",
        unit="seconds",
        gt=0,
    )
    reward_processes: int = setting(
        1,
        "Processes of each reward worker (`reward.num_workers`) that call a synchronous reward function, with"
        " `timeouts.reward` for each call. 0: threads of the reward worker, as in verl; a call that never returns is"
        " given up, but goes on.",
        ge=0,
    )
    reward_memory_gib: float | None = setting(
        None, "Address space of each process that scores; null: no limit.", unit="GiB", gt=0
    )
    prefork_workers: bool = setting(
        True,
        "Start the processes of a run as forks of one that has imported the stack: in a moment each, instead of some"
        " ten seconds. Only on the CPU platform and with a Ray that the run starts itself; without effect elsewhere.",
    )
    device_memory_gib: float | None = setting(
        None,
        "Memory of an accelerator, for the check before anything starts ([memory.md](memory.md)). null: as this"
        " machine's driver says, or Ray by the accelerators' type; if neither does, memory is not checked.",
        unit="GiB",
        gt=0,
    )
    rehearsal: Literal["auto"] | bool = setting(
        "auto",
        "Whether a run begins with a rehearsal: its processes send the weights once more, with every trainer rank at"
        " work, interrupt and resume requests, put engines to sleep and wake them where they share accelerators, and"
        " compare log-probs ([first-run.md](first-run.md)). `auto`: on accelerators.",
    )
    events: bool = setting(
        True,
        "Record events in `trainer.default_local_dir`: what every process did, and when. The time account in"
        " `summary.json` and the report page are made from these events (docs/run-record.md).",
    )
    start_from: str | None = setting(
        None,
        "The folder `global_step_N` of a checkpoint, of stock verl or of this package, whose weights a run begins with"
        " where it has no checkpoint of its own to resume from. Only weights are carried, of the actor and, if there is"
        " one, of the critic: optimizer, learning-rate schedule, position in the data and the number of the step begin"
        " anew (docs/operations.md).",
    )
    alarms: Alarms = setting(
        Alarms(),
        "How many times in a row an alarm ([reliability.md](reliability.md)) occurs before it ends a run that continues"
        " without learning, by the alarm's name; null: it is only counted and shown. `failed_groups` is a share of the"
        " last four batches' worth of groups instead (at least 32, or all in a run of fewer). By default"
        " `failed_groups: 0.5`, `skipped_updates: 3`, `unchanged_weights: 3`, and null for `zero_gradients`,"
        " `uniform_rewards`, `empty_answers` and `failed_validation`. `exit_status: false`: a run that was fine except"
        " for alarms exits with status 0 instead of 3.",
    )
    weights: Weights = setting(Weights(), "")
    timeouts: Timeouts = setting(Timeouts(), "")

    @property
    def policy(self) -> str:
        """The admission policy: `admission_policy` if set, else the default for the placement."""
        whole_groups = self.placement == SEPARATE or self.weights.at_swap == "drain"
        return self.admission_policy or ("oldest_ready" if whole_groups else "turns")

    @property
    def whole_batches(self) -> bool:
        """Whether a prompt's batch is fixed when the prompt is issued, as in synchronous training."""
        return self.policy == "whole_batches"


@dataclass(frozen=True, slots=True, config=STRICT)
class RolloutResources:
    """The accelerators of the rollout replicas, and a limit to the number of prompt groups in the whole run."""

    nnodes: int = setting(
        1,
        "Nodes for rollout replicas.",
        ge=1,
        instead="recipe.partial_rollout, or +recipe=partial_rollout, generates on the trainer's accelerators alone.",
    )
    n_gpus_per_node: int = setting(8, "Accelerators for rollout replicas on each node.", ge=1)
    total_rollout_steps: int | None = setting(
        100, "Prompt groups issued in all, at most; null: no limit of its own.", unit="groups", ge=1
    )


@dataclass(frozen=True, slots=True, config=STRICT)
class BuiltinTask:
    """The task that comes with the package: a tokenizer, a small warm-started model, data and a rule-based reward.

    The task sets `actor_rollout_ref.model.path`, `data.train_files` and `data.val_files` if they are null, and
    `reward.custom_reward_function.path` if it sets `data.train_files`.
    """

    dir: str | None = setting(
        None, "Where it is made, and found again by later runs. null: `task` in `trainer.default_local_dir`."
    )
    seed: int = setting(0, "Seed of data, model and warm start.", ge=0)
    lengths: Literal["uniform", "long_tail"] = setting("uniform", "Distribution of the answers' lengths.")
    train_size: int = setting(4096, "Prompts to train on.", unit="prompts", ge=1)
    val_size: int = setting(256, "Prompts to validate on, none of them trained on.", unit="prompts", ge=1)
    permute_rewards: bool = setting(
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
        """`async_training.weights`, with the null settings replaced by their defaults for this configuration."""
        training = self.async_training
        waits = training.placement == SHARED or (self.servers.enabled and self.servers.anchor == Anchor.LATEST)
        return dataclasses.replace(
            training.weights,
            publish=training.weights.publish or ("inline" if waits else "beside"),
            at_swap=training.weights.at_swap or ("drain" if training.whole_batches else "interrupt"),
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
    """Return this package's sections of a whole configuration, and the problems of the settings in them."""
    config = of_stock(config)
    training, problems = read_section(AsyncTraining, config.get("async_training"), "async_training")
    rollout, more = read_section(RolloutResources, config.get("rollout"), "rollout")
    problems += more
    task = None
    if config.get("builtin_task") is not None:
        task, more = read_section(BuiltinTask, config["builtin_task"], "builtin_task")
        problems += more
    servers = config.get("model_engine_server")
    if isinstance(servers, Mapping):
        # verl reads the section `engine`, with verl's own type.
        servers = {key: value for key, value in servers.items() if key != "engine"}
    log_probs, more = read_section(LogProbServers, servers, "model_engine_server")
    return Settings(training, rollout, task, log_probs), problems + more
