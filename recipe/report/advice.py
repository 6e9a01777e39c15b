# SPDX-License-Identifier: Apache-2.0
"""What a run lost most time to, and the setting to change for it.

Contract: pure. Each piece of advice names the seconds that it is about, why they were lost as far as the account can
tell, and one setting; what is expected of a change is an upper bound, since a wait that ends may begin elsewhere.
Shown by tests/core/test_advice.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.core.account import KINDS, Account, Kind
from recipe.async_engine.core.events import LOG_PROBS, ROLLOUT, TRAINER, Class

WORTH_SAYING = 0.03
"""The share of a side's time, without its start-up, from which on a loss is named."""
LITTLE = 0.1


@dataclass(frozen=True)
class Advice:
    """seconds: accelerator-seconds that it is about; share: of its side's time without the start-up."""

    side: str
    what: Class
    seconds: float
    share: float
    reason: str
    change: str


Shares = Mapping[str, Mapping[str, float]]
"""By side, each class's share of its time without the start-up."""


def advise(account: Account, settings: Mapping[str, Any]) -> list[Advice]:
    """What to change, the greatest loss first; ``settings``: of the run, from the record's header."""
    seconds = sides(account)
    shares = {side: _shares(of_side) for side, of_side in seconds.items()}
    found = []
    for side, of_side in shares.items():
        for name, share in of_side.items():
            rule = RULES.get(Class(name))
            if rule is not None and share >= WORTH_SAYING and (said := rule(side, shares, settings)) is not None:
                found.append(Advice(side, Class(name), seconds[side][name], share, *said))
    return sorted(found, key=lambda advice: -advice.seconds)


def sides(account: Account) -> dict[str, dict[str, float]]:
    """Accelerator-seconds of each class by side: trainer, rollout engines, log-prob servers."""
    sums: dict[str, defaultdict[str, float]] = {}
    for name, device in account.devices.items():
        side = sums.setdefault(name.partition(" ")[0], defaultdict(float))
        for what, seconds in device.seconds.items():
            side[what] += seconds * device.accelerators
    return {side: dict(of_side) for side, of_side in sums.items()}


def useful_share(seconds: Mapping[str, float]) -> float:
    """Of a side's time without its start-up."""
    return sum(share for name, share in _shares(seconds).items() if KINDS[Class(name)] is Kind.USEFUL)


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    running = {name: value for name, value in seconds.items() if name != Class.START_UP}
    total = sum(running.values())
    return {name: value / total for name, value in running.items()} if total > 0 else {}


Said = tuple[str, str] | None
Rule = Callable[[str, Shares, Mapping[str, Any]], Said]


def _of(shares: Shares, side: str, what: Class) -> float:
    return shares.get(side, {}).get(what, 0.0)


def _wider_gate(settings: Mapping[str, Any]) -> str:
    bound, depth = settings.get("max_staleness", 0), settings.get("pipeline_depth", 0)
    if depth < bound:
        return f"async_training.pipeline_depth {depth:g} -> {min(bound, depth + 0.5):g}"
    return f"async_training.max_staleness {bound} -> {bound + 1}, with staleness_threshold as much"


def _gate(side: str, shares: Shares, settings: Mapping[str, Any]) -> tuple[str, str]:
    if TRAINER in shares and _of(shares, TRAINER, Class.WAIT_BATCH) < LITTLE * 0.5:
        return (
            "the staleness gate holds prompts back while the trainer hardly ever waits for a batch: training is the "
            "slower side, and a wider gate would only make its batches older",
            "give the trainer accelerators of the rollout (trainer.n_gpus_per_node up, rollout.n_gpus_per_node down)",
        )
    return "the staleness gate holds prompts back until the trainer has taken older ones", _wider_gate(settings)


def _batch(side: str, shares: Shares, settings: Mapping[str, Any]) -> Said:
    gate, idle = (_of(shares, ROLLOUT, what) for what in (Class.WAIT_GATE, Class.IDLE_PLACES))
    if gate > max(idle, LITTLE):
        return "engines stand still, since the staleness gate holds prompts back", _wider_gate(settings)
    if idle > LITTLE:
        return _idle(side, shares, settings)
    return (
        "the engines are busy: generation is the slower side",
        "give the rollout accelerators of the trainer (rollout.n_gpus_per_node up), or data.max_response_length down",
    )


def _idle(side: str, shares: Shares, settings: Mapping[str, Any]) -> Said:
    groups = settings.get("concurrent_samples_per_replica")
    slots, places = settings.get("max_concurrent_trajectories", 0), settings.get("engine_places", 0)
    if _of(shares, ROLLOUT, Class.WAIT_GATE) > LITTLE:
        return "engines have free places because the staleness gate holds prompts back", _gate(side, shares, settings)[
            1
        ]
    if groups is not None and slots <= places:
        return (
            "engines decode with free places, since an answer that ends is followed by the next one from farther away",
            f"async_training.concurrent_samples_per_replica {groups} -> null: answers then wait at each engine",
        )
    return (
        "engines decode with free places: the last answers of a batch are few and long, or prompts come too slowly",
        "async_training.max_staleness up, so that the next prompts begin beside a tail",
    )


def _weights(side: str, shares: Shares, settings: Mapping[str, Any]) -> Said:
    every = settings.get("trigger_parameter_sync_step", 1)
    rarer = f"async_training.trigger_parameter_sync_step {every} -> {2 * every}"
    if side == TRAINER and settings.get("publish") == "inline":
        return "the trainer stands still while weights travel", "async_training.weights.publish inline -> beside"
    if side == TRAINER:
        return "the trainer waits for the version before to arrive at the replicas", rarer
    if settings.get("staging") == "none":
        return "engines stand still while weights are loaded", "async_training.weights.staging none -> device"
    if settings.get("at_swap") == "drain" and not settings.get("whole_batches"):
        return "engines run empty before each swap of weights", "async_training.partial_rollout false -> true"
    return "engines stand still for each swap of weights", rarer


def _reward(side: str, shares: Shares, settings: Mapping[str, Any]) -> Said:
    processes = settings.get("reward_processes", 0)
    return (
        "nothing generates and the trainer has no batch: only rewards keep the run from going on",
        f"reward.num_workers up, or async_training.reward_processes {processes} -> {2 * max(1, processes)}; a wider "
        "staleness bound hides rewards behind generation",
    )


def _fixed(reason: str, change: str) -> Rule:
    return lambda side, shares, settings: (reason, change)


RULES: Mapping[Class, Rule] = {
    Class.WAIT_GATE: _gate,
    Class.WAIT_BATCH: _batch,
    Class.IDLE_PLACES: _idle,
    Class.WAIT_WEIGHTS: _weights,
    Class.WAIT_REWARD: _reward,
    Class.WAIT_DRIVER: _fixed(
        "between the trainer's calls its accelerators wait for the driver: batches are put together, advantages "
        "computed, metrics logged",
        "larger steps: async_training.require_batches up; rollout_data_dir and dumps off",
    ),
    Class.WAIT_AGENTS: _fixed(
        "engines are empty although trajectories run: these are in tools, tokenization, or on their way",
        "actor_rollout_ref.rollout.agent.num_workers up, and async_training.concurrent_samples_per_replica, so that "
        "others generate meanwhile",
    ),
    Class.WAIT_PROMPTS: _fixed("the data loader gives prompts too slowly", "data.dataloader_num_workers up"),
    Class.WAIT_VALIDATION: _fixed("the trainer waits for validation", "trainer.test_freq up, or data.val_max_samples"),
    Class.WAIT_CHECKPOINT: _fixed("the trainer waits for checkpoints", "trainer.save_freq up"),
    Class.WAIT_OTHER_SIDE: _fixed(
        "accelerators change hands between the two sides", "larger turns: data.train_batch_size up"
    ),
    Class.RE_PREFILL: _fixed(
        "answers that a swap of weights cut are sent to the engine again",
        "async_training.weights.at_swap interrupt -> keep, with keep_cache=true; or rarer syncs",
    ),
    Class.RETRY: _fixed("attempts that failed are made again", "look at their errors in the log"),
    Class.LOST: _fixed("a device died with its work", "async_training.partial_tokens_interval down"),
    Class.DOWN: _fixed(
        "a lost device was missed until another one took its place", "async_training.max_replica_restarts"
    ),
    Class.LOG_PROBS: lambda side, shares, settings: (
        (
            "the trainer computes log-probs of the batch before it trains it",
            "async_training.proximal_log_probs=bypass or loglinear, or log-prob servers (model_engine_server=fsdp2)",
        )
        if side == TRAINER and _of(shares, side, Class.LOG_PROBS) > 2 * LITTLE and LOG_PROBS not in shares
        else None
    ),
}
