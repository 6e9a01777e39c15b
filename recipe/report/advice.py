# SPDX-License-Identifier: Apache-2.0
"""Gives advice on the greatest losses of accelerator time in a run, and on the settings to change.

Contract: advice is a pure function of the run's time account (accelerator-seconds by class, such as decoding or waiting
for a batch). If the trainer waits for the engines or the engines for the trainer, the time is charged to what the other
side did meanwhile, so that advice names the cause and not its consequence. Each piece of advice has the lost seconds,
the reason as far as the time account shows it, and a setting to change. The expected gain is an upper bound, since
removing one wait may create another. Shown by tests/report/test_advice.py and, for runs with deliberate losses,
tests/e2e/test_planted_causes.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from recipe.async_engine.record.events import LOG_PROBS, ROLLOUT, TRAINER, Class
from recipe.report.account import KINDS, Account, Kind

WORTH_SAYING = 0.03
"""Smallest loss that is reported, as a share of all accelerator time without start-up."""
LITTLE = 0.1
MOST = 0.5
SLOW = 0.75
"""An engine is slow if its decoding speed is below this fraction of the median speed of the other engines."""

CHARGED_TO_TRAINER = frozenset(
    {
        Class.LOG_PROBS,
        Class.WAIT_DRIVER,
        Class.WAIT_WEIGHTS,
        Class.WAIT_LOG_PROBS,
        Class.WAIT_VALIDATION,
        Class.WAIT_CHECKPOINT,
        Class.DOWN,
    }
)
"""If the trainer is in one of these classes while engines wait at the staleness gate or for a batch's last answers, the
engines' wait is charged to that class."""

WITHOUT_WORK = (
    Class.WAIT_GATE,
    Class.WAIT_TAIL,
    Class.WAIT_AGENTS,
    Class.WAIT_PROMPTS,
    Class.WAIT_TOOLS,
    Class.IDLE_PLACES,
)
"""Classes of engine time that slow the run down only if the trainer waits for batches."""


@dataclass(frozen=True)
class Advice:
    """One piece of advice.

    Attributes:
        what: the class of time that was lost.
        seconds: lost accelerator-seconds.
        share: `seconds` as a share of all accelerator-seconds without start-up.
        device: the device that causes the loss, if a single one does.
    """

    what: Class
    seconds: float
    share: float
    reason: str
    change: str
    device: str | None = None


@dataclass(frozen=True)
class Facts:
    """The facts on which advice is based.

    Attributes:
        settings: settings of the run, from the event record.
        meanwhile: time that trainer and engines waited for each other, split by what the other side did meanwhile
            (`recipe.report.account.meanwhile`).
        speeds: tokens sampled per second of decoding, by rollout engine.
    """

    account: Account
    settings: Mapping[str, Any]
    meanwhile: Mapping[Class, Mapping[Class, float]] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)

    def share(self, side: str, what: Class) -> float:
        """Return the fraction of time after start-up that ``side`` (trainer, engines, servers) spent on ``what``."""
        return _shares(sides(self.account).get(side, {})).get(what, 0.0)

    @property
    def training_is_slower(self) -> bool:
        """Whether faster generation would hardly speed up the run. This is never the case with shared accelerators."""
        waits = self.share(TRAINER, Class.WAIT_BATCH) + self.share(TRAINER, Class.WAIT_REWARD)
        return waits < LITTLE and useful_share(sides(self.account).get(TRAINER, {})) >= MOST


def advise(facts: Facts) -> list[Advice]:
    """Return all advice for a run, beginning with the greatest loss of accelerator time."""
    total = sum(_running(facts.account.total).values())
    if total <= 0:
        return []
    found = []
    causes = charged(facts)
    if (slow := _slow_engine(facts, causes)) is not None:
        device, seconds, why = slow
        causes.pop(Class.WAIT_TAIL, None)
        found.append(Advice(Class.DECODING, seconds, seconds / total, *why, device=device))
    if facts.training_is_slower:
        without_work = {what: causes.pop(what, 0.0) for what in WITHOUT_WORK}
        seconds, what = sum(without_work.values()), max(without_work, key=without_work.__getitem__)
        if seconds >= WORTH_SAYING * total:
            found.append(Advice(what, seconds, seconds / total, *_training_is_slower(facts)))
    for what, seconds in causes.items():
        if seconds < WORTH_SAYING * total or (rule := RULES.get(what)) is None:
            continue
        if (said := rule(facts) if callable(rule) else rule) is not None:
            found.append(Advice(what, seconds, seconds / total, *said))
    return sorted((advice for advice in found if advice.seconds > 0), key=lambda advice: -advice.seconds)


def charged(facts: Facts) -> dict[Class, float]:
    """Return accelerator-seconds by class. A wait is charged to the class that caused it, not to its own class."""
    seconds = defaultdict(float, {Class(what): value for what, value in _running(facts.account.total).items()})
    for waited, by in facts.meanwhile.items():
        for what, value in by.items():
            if what in CHARGED_TO_TRAINER if waited != Class.WAIT_BATCH else KINDS[what] is not Kind.USEFUL:
                seconds[waited] -= value
                seconds[what] += value
    # If engines waited at the staleness gate while the trainer trained, the gate also made the trainer wait for batches
    # later. So charge the trainer's waits to the gate, but no more seconds than engines waited there.
    training = facts.meanwhile.get(Class.WAIT_GATE, {}).get(Class.TRAINING, 0.0)
    if training:
        held = min(seconds[Class.WAIT_GATE], seconds[Class.WAIT_BATCH])
        seconds[Class.WAIT_BATCH] -= held
        seconds[Class.WAIT_GATE] += held
    return dict(seconds)


def sides(account: Account) -> dict[str, dict[str, float]]:
    """Return accelerator-seconds by class, separately for trainer, rollout engines and log-prob servers."""
    sums: dict[str, defaultdict[str, float]] = {}
    for name, device in account.devices.items():
        side = sums.setdefault(name.partition(" ")[0], defaultdict(float))
        for what, seconds in device.seconds.items():
            side[what] += seconds * device.accelerators
    return {side: dict(of_side) for side, of_side in sums.items()}


def useful_share(seconds: Mapping[str, float]) -> float:
    """Return which share of ``seconds`` (by class) is in useful classes. Start-up is not counted at all."""
    return sum(share for name, share in _shares(seconds).items() if KINDS[Class(name)] is Kind.USEFUL)


def _running(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in seconds.items() if name != Class.START_UP}


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    running = _running(seconds)
    total = sum(running.values())
    return {name: value / total for name, value in running.items()} if total > 0 else {}


Said = tuple[str, str]
Rule = Callable[[Facts], Said | None]


def _slow_engine(facts: Facts, causes: Mapping[Class, float]) -> tuple[str, float, Said] | None:
    """Return an engine that is slow (`SLOW`), the accelerator-seconds lost because of it, and the advice to give.

    Return None if no engine is slow. The loss is the engine's excess decoding time, and the time in which other engines
    wait for the last answers of a batch.
    """
    if len(facts.speeds) < 2:
        return None
    device = min(facts.speeds, key=lambda name: facts.speeds[name])
    usual = median(speed for name, speed in facts.speeds.items() if name != device)
    if facts.speeds[device] >= SLOW * usual:
        return None
    of_device = facts.account.devices[device]
    part = 1 - facts.speeds[device] / usual
    seconds = part * of_device.seconds.get(Class.DECODING, 0.0) * of_device.accelerators
    seconds += causes.get(Class.WAIT_TAIL, 0.0)
    reason = (
        f"it decodes with {facts.speeds[device] / usual:.0%} of the other engines' speed, and they wait for its answers"
    )
    return device, seconds, (reason, f"look at the machine of {device}; until it is repaired, leave its node out")


def _wider_gate(settings: Mapping[str, Any]) -> str:
    bound, depth = settings.get("max_staleness", 0), settings.get("pipeline_depth", 0)
    if depth < bound:
        return f"async_training.staleness_threshold {depth:g} -> {min(bound, depth + 0.5):g}"
    return f"async_training.max_staleness {bound} -> {bound + 1}, and staleness_threshold equal to it"


def _more_for(side: str, other: str, other_has: int) -> str:
    """Return the advice to give ``side`` more accelerators.

    The advice is to take them from ``other`` if this side has more than one rank or replica (``other_has`` of them).
    """
    if other_has > 1:
        return f"give the {side} accelerators of the {other} ({side}.n_gpus_per_node up, {other}.n_gpus_per_node down)"
    return f"more accelerators for the {side}: {side}.n_gpus_per_node up"


def _training_is_slower(facts: Facts) -> Said:
    works = useful_share(sides(facts.account)[TRAINER])
    return (
        f"training is the slower side: it computes {works:.0%} of its time and hardly ever waits for a batch, while "
        "engines are without work; more answers at once, or a wider gate, would only make its batches older",
        _more_for("trainer", ROLLOUT, facts.settings.get("rollout_replicas", 1)),
    )


def _batch(facts: Facts) -> Said:
    groups, places, room = _slots(facts)
    if groups is not None and places < room:
        return (
            f"the engines are busy with the {places} answers that they are given at once, and have room for {room}",
            f"async_training.concurrent_samples_per_replica {groups} -> null",
        )
    more = _more_for(ROLLOUT, "trainer", facts.settings.get("trainer_ranks", 1))
    if TRAINER in facts.account.devices and not facts.settings.get("whole_batches"):
        more = f"async_training.placement=elastic, which lends the trainer's accelerators while it waits; or {more}"
    return "the engines are busy: generation is the slower side", more


def _slots(facts: Facts) -> tuple[int | None, int, int]:
    """Return three numbers: prompt groups per replica (None if not set), sequence slots in use, all sequence slots."""
    settings = facts.settings
    places = int(settings.get("engine_places", 0))
    room = int(settings.get("max_num_seqs") or 0) * int(settings.get("rollout_replicas", 1))
    return settings.get("concurrent_samples_per_replica"), places, max(room, places)


def _idle(facts: Facts) -> Said:
    groups, _, _ = _slots(facts)
    if groups is None:
        return (
            "engines have free sequence slots although as many answers run as allowed: some are in tools or in transit",
            "actor_rollout_ref.rollout.agent.num_workers up; if tools are slow, async_training."
            "concurrent_samples_per_replica so high that more answers run than an engine has slots",
        )
    return (
        "engines have free sequence slots, because a setting allows no more answers at once",
        f"async_training.concurrent_samples_per_replica {groups} -> null: answers then wait at each engine",
    )


def _weights(facts: Facts) -> Said:
    settings = facts.settings
    every = settings.get("trigger_parameter_sync_step", 1)
    if settings.get("publish") == "inline" and facts.share(TRAINER, Class.WAIT_WEIGHTS) >= WORTH_SAYING:
        return "the trainer waits while weights are sent", "async_training.weights.publish inline -> beside"
    if settings.get("staging") == "none":
        return "engines wait while weights are loaded", "async_training.weights.staging none -> device"
    if settings.get("at_swap") == "drain" and not settings.get("whole_batches"):
        return "engines finish all answers before each weight swap", "async_training.weights.at_swap drain -> interrupt"
    return (
        "a weight sync takes long, and engines or trainer wait for it",
        f"async_training.trigger_parameter_sync_step {every} -> {2 * every}",
    )


def _trainers_log_probs(facts: Facts) -> Said | None:
    if facts.share(TRAINER, Class.LOG_PROBS) <= 2 * LITTLE or LOG_PROBS in sides(facts.account):
        return None
    return (
        "the trainer computes log-probs of the batch before it trains it",
        "async_training.proximal_log_probs=bypass or loglinear, or log-prob servers (model_engine_server=fsdp2)",
    )


RULES: Mapping[Class, Said | Rule] = {
    Class.WAIT_GATE: lambda facts: (
        "the staleness gate holds prompts back until the trainer has taken older ones",
        _wider_gate(facts.settings),
    ),
    Class.WAIT_TAIL: lambda facts: (
        "the last answers of a batch are few and long, and the staleness gate lets no other answer begin meanwhile",
        _wider_gate(facts.settings),
    ),
    Class.WAIT_BATCH: _batch,
    Class.IDLE_PLACES: _idle,
    Class.WAIT_WEIGHTS: _weights,
    Class.WAIT_REWARD: lambda facts: (
        "nothing generates and the trainer has no batch: the run waits only for rewards",
        "reward.num_workers up, or async_training.reward_processes "
        f"{facts.settings.get('reward_processes', 0)} -> {2 * max(1, facts.settings.get('reward_processes', 0))}; "
        "a wider staleness bound hides rewards behind generation",
    ),
    Class.LOG_PROBS: _trainers_log_probs,
    Class.WAIT_LOG_PROBS: (
        "the trainer has no batch, or no log-probs for it: the run waits only for log-prob servers",
        "model_engine_server.nnodes or n_gpus_per_node up, or async_training.proximal_log_probs=loglinear",
    ),
    Class.WAIT_DRIVER: (
        "between the trainer's calls its accelerators wait for the driver: batches are put together, advantages "
        "computed, metrics logged",
        "larger steps: async_training.require_batches up; rollout_data_dir and dumps off",
    ),
    Class.WAIT_TOOLS: (
        "engines are empty although trajectories run: these are in tools",
        "async_training.concurrent_samples_per_replica up, so that others generate meanwhile, or null, which allows "
        "more answers while tools run; or quicker tools",
    ),
    Class.WAIT_AGENTS: (
        "engines are empty although trajectories run: these are in tokenization or in transit",
        "actor_rollout_ref.rollout.agent.num_workers up, and async_training.concurrent_samples_per_replica, so that "
        "others generate meanwhile",
    ),
    Class.WAIT_PROMPTS: ("the data loader gives prompts too slowly", "data.dataloader_num_workers up"),
    Class.WAIT_VALIDATION: ("the trainer waits for validation", "trainer.test_freq up, or data.val_max_samples"),
    Class.WAIT_CHECKPOINT: ("the trainer waits for checkpoints", "trainer.save_freq up"),
    Class.WAIT_OTHER_SIDE: (
        "accelerators switch between training and generation",
        "larger turns: data.train_batch_size up",
    ),
    Class.WAIT_SWITCH: (
        "the trainer's accelerators wait while replicas on them wake up or go to sleep",
        "a deeper pipeline, so that each loan generates more batches: async_training.staleness_threshold up",
    ),
    Class.RE_PREFILL: (
        "answers that a weight swap interrupted are prefilled again",
        "async_training.weights.at_swap interrupt -> keep; or rarer syncs",
    ),
    Class.RETRY: ("failed attempts are repeated", "look at their errors in the log"),
    Class.LOST: ("a device died, and its unfinished answers were lost", "async_training.partial_tokens_interval down"),
    Class.DOWN: ("a lost device did no work until it was replaced", "async_training.max_replica_restarts"),
}
