# SPDX-License-Identifier: Apache-2.0
"""The durations and answer lengths that a simulation needs, from a recorded run or from a device profile.

Contract: `fitted` derives both from a run's events and metrics. `estimated` computes durations from a model's shape and
a device profile, without any measurement; its caller provides the lengths. An engine's ``places`` are its sequence
slots (`max_num_seqs`). Shown by tests/plan/test_times.py.
"""

from __future__ import annotations

import heapq
import random
import statistics
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc

from recipe.async_engine.record.events import ROLLOUT, SWITCH, TRAINER, WEIGHTS, Class
from recipe.async_engine.record.schema import LIMIT, BadFile, unsaid
from recipe.plan.device import DeviceTimes
from recipe.plan.engine_steps import fit_steps
from recipe.report.account import Piece
from recipe.report.run import Run, about, load

Seconds = Callable[[Sequence[int], float], float]

FILLED_S = 1.0
"""Seconds after which engines that were empty are assumed to be full again, if answers wait for slots."""
ENOUGH, EXPLAINED = 5, 0.9
"""A line is fitted only if there are at least `ENOUGH` steps, whose tokens and seconds have a correlation of at least
`EXPLAINED`."""
_UNDER_WAY = (
    Class.PREFILL,
    Class.RE_PREFILL,
    Class.DECODING,
    Class.RETRY,
    Class.IDLE_PLACES,
    Class.WAIT_TAIL,
    Class.WAIT_AGENTS,
)
"""Classes of an engine's time while answers are in progress, whether its sequence slots are used or idle."""


@dataclass(frozen=True)
class Switch:
    """Seconds that hybrid replicas take to wake (`wake_s`), and to sleep, which frees their memory (`sleep_s`)."""

    wake_s: float
    sleep_s: float


ASSUMED_SWITCH = Switch(wake_s=2.0, sleep_s=1.0)
"""The times to wake and to sleep that `estimated` uses: an assumption, not measured on a device."""


@dataclass(frozen=True)
class Times:
    """Durations in seconds of the operations of a run, and the lengths of its answers.

    Attributes:
        groups: number of tokens of each answer of each group, in the order in which groups began.
        step_s: returns the seconds of a decode step, given the number of requests and their total tokens of context.
        read_s: returns the seconds of prefilling a number of tokens.
        update_s: returns the seconds of an update, given the tokens of each answer and the number of trainer ranks.
        log_probs_s: returns the seconds of a batch's log-probs, with the same arguments.
        rewards: a sample of the seconds that computing a reward takes, without waiting for a free process.
        prompt: number of tokens of a prompt.
        begin_s: latency before the first token of an answer.
        agents_s: time that an answer takes in the agent loops, which are modelled as handling one answer at a time.
        end_s: latency after the last token of an answer.
        driver_s: time of a training step without its log-probs and its update.
        snapshot_s: time for which a weight sync keeps the trainer from training.
        stage_s: time to send a version's weights to the engines.
        swap_s: time to replace the weights in the engines.
        switch: time to wake hybrid replicas and to put them to sleep; None if the run has lent nothing.
    """

    groups: tuple[tuple[int, ...], ...]
    step_s: Callable[[int, int], float]
    read_s: Callable[[int], float]
    update_s: Seconds
    log_probs_s: Seconds
    rewards: tuple[float, ...] = (0.0,)
    prompt: int = 0
    begin_s: float = 0.0
    agents_s: float = 0.0
    end_s: float = 0.0
    driver_s: float = 0.0
    snapshot_s: float = 0.0
    stage_s: float = 0.0
    swap_s: float = 0.0
    switch: Switch | None = None

    def lengths(self, draw: random.Random) -> tuple[int, ...]:
        return draw.choice(self.groups)

    def reward_s(self, draw: random.Random) -> float:
        return draw.choice(self.rewards)


class CannotPlan(BadFile):
    """No plan can be made, because an option is wrong or the event record lacks data. The message says which."""


OLDER = ("reward_workers", "concurrent_samples_per_replica", "max_num_seqs", "staging")
"""Settings that are missing from the event records of older versions of this package; planning does not need them."""


def fitted(folder: Path) -> tuple[Times, Run]:
    """Return the durations and answer lengths of the recorded run in ``folder``, and the run itself.

    Raises:
        CannotPlan: the event record lacks answers, trained groups, updates, weight syncs or settings of the run.
        BadFile: the event record cannot be read.
    """
    run = load(folder)
    if absent := unsaid(run.settings, but=OLDER):
        also = "".join(f"; {note}" for note in run.notes)
        raise CannotPlan(f"the event record in {folder} lacks these settings of the run: {', '.join(absent)}{also}")
    answers = _answers(run)
    lengths = [tokens for group in answers.values() for tokens, *_ in group]
    updates, synced = _phases(run, "update"), [event for event in run.events if event.lane == WEIGHTS]
    if not lengths or not updates or not synced:
        missing = "answer" if not lengths else "update" if not updates else "weight sync"
        raise CannotPlan(f"the event record in {folder} has no {missing}: let the run train some steps first")
    replicas = max(1, run.settings["rollout_replicas"])
    places = run.settings["engine_places"] / replicas
    if min(run.settings["engine_places"], run.settings["max_concurrent_trajectories"]) < replicas:
        raise CannotPlan(
            f"the event record in {folder} cannot be used, because its settings give each of the {replicas} engines "
            "less than one sequence slot or less than one trajectory"
        )
    used = _place_seconds(run.pieces, places)
    ends = [(tokens, end) for group in answers.values() for tokens, _, end in group]
    prompt = _prompt(run)
    steps = fit_steps(run.events, ends, places, replicas, prompt)
    if steps is None:
        raise CannotPlan(f"the event record in {folder} has no sampled token: let the run train some steps first")
    step = used[Class.DECODING] / max(1, sum(lengths) - len(lengths))
    first = used[Class.PREFILL] / len(lengths)
    overhead = [end - start - first - step * (tokens - 1) for group in answers.values() for tokens, start, end in group]
    # An answer's overhead is the part of its time in which its tokens were not being computed. The smallest overhead of
    # an answer is taken for the latency of a request, because the other answers also waited in agent loops, in a queue
    # or for a weight sync.
    latency = max(0.0, min(overhead))
    agents = _agents_s(run, used, len(lengths), places, replicas)
    if not pc.sum(about(run.groups, "trained")["tokens"]).as_py():
        raise CannotPlan(f"the event record in {folder} has no trained group: let the run train some steps first")
    stage, swap, resume = (
        statistics.median([event.end - event.start for event in synced if event.what == what] or [0.0])
        for what in ("stage", "swap", "resume")
    )
    if not run.devices.hybrid:
        # If training and generation take turns, the engines wake once and sleep once for each weight sync. Add these
        # two switches to its time.
        swap += 2 * statistics.mean(_phases(run, SWITCH) or [0.0])
    rewards = about(run.trajectories, "reward")
    scored = zip(rewards["start"].to_pylist(), rewards["end"].to_pylist(), strict=True)
    times = Times(
        groups=tuple(tuple(tokens for tokens, *_ in answers[group]) for group in sorted(answers)),
        step_s=steps.step_s,
        read_s=steps.read_s,
        update_s=_of_batches(run, "update", prompt),
        log_probs_s=_of_batches(run, "log_probs", prompt),
        prompt=round(prompt),
        rewards=_rewards(scored, scorers(run)) or (0.0,),
        agents_s=agents,
        begin_s=latency / 2,
        end_s=latency / 2,
        driver_s=sum(_phases(run, "train")) / steps_trained(run),
        snapshot_s=statistics.median(_phases(run, "sync") or [0.0]),
        stage_s=stage,
        swap_s=swap + resume,
        switch=_switch(run),
    )
    return times, run


def _switch(run: Run) -> Switch | None:
    """Return the time of a switch of hybrid replicas, or None if the run has made none."""
    phases = _phases(run, SWITCH)
    if not run.devices.hybrid or len(phases) < 2:
        return None
    # The replicas wake and sleep in turns. The first wake of a run takes longer than the others.
    return Switch(statistics.median(phases[2::2] or phases[::2]), statistics.median(phases[1::2]))


def _agents_s(run: Run, used: Mapping[Class, float], answers: int, places: float, replicas: int) -> float:
    """Return the seconds that the agent loops take for each answer, computed from the idle time of engine slots.

    If more trajectories may run than there are sequence slots, agent loops leave slots idle only while empty engines
    fill: at the beginning, and after each weight swap, unless requests stay in the engines (``at_swap=keep``). While
    engines fill, the agent loops send one request after the other, so an engine's n-th slot is idle n times as long as
    its first. The result is at most the mean time for which an engine had answers in progress, divided by ``answers``.
    """
    most = sum(used[what] for what in _UNDER_WAY) / (places * replicas * answers)
    if run.settings["max_concurrent_trajectories"] <= places * replicas:
        return used[Class.WAIT_AGENTS] / places / answers
    begun = [min((piece.start for piece in run.pieces if piece.what in _UNDER_WAY), default=0.0)]
    if run.settings["at_swap"] != "keep":
        begun += [event.end for event in run.events if event.lane == WEIGHTS and event.what in ("swap", "resume")]
    missed = _place_seconds(_within(run.pieces, begun, FILLED_S), places)
    filled = replicas * (1 + len(begun[1:]) / 2)
    return min(most, 2 * (missed[Class.WAIT_AGENTS] + missed[Class.IDLE_PLACES]) / (filled * places**2))


def scorers(run: Run) -> int:
    """Return the number of processes that compute rewards; 0 means unlimited."""
    return run.settings["reward_processes"] * (run.settings.get("reward_workers") or 1)


def _rewards(scored: Iterable[tuple[float, float]], processes: int) -> tuple[float, ...]:
    """Return the seconds that computing each reward took, without the time in the queue.

    Args:
        scored: (start, end) of each answer's reward, including the time in the queue.
        processes: number of processes that compute rewards, which are assumed to take answers in order; 0 means
            unlimited.
    """
    free, took = [0.0] * processes, []
    for start, end in sorted(scored):
        begun = max(start, heapq.heapreplace(free, end)) if free else start
        took.append(max(0.0, end - begun))
    return tuple(took)


def _within(pieces: Sequence[Piece], moments: Sequence[float], seconds: float) -> Iterator[Piece]:
    """Yield those parts of ``pieces`` (time spans) that are within ``seconds`` after one of the times ``moments``."""
    spans: list[tuple[float, float]] = []
    for moment in sorted(moments):
        begin = max(moment, spans[-1][1]) if spans else moment
        spans.append((begin, max(begin, moment + seconds)))
    ends = [end for _, end in spans]
    for piece in pieces:
        for number in range(bisect(ends, piece.start), len(spans)):
            start, end = spans[number]
            if start >= piece.end:
                break
            if (begin := max(piece.start, start)) < (stop := min(piece.end, end)):
                yield piece._replace(start=begin, end=stop)


def group_size(run: Run) -> int:
    """Return the number of answers of the largest recorded group."""
    rows = run.trajectories.group_by("group").aggregate([("trajectory", "count_distinct")])
    return int(pc.max(rows["trajectory_count_distinct"]).as_py())


def steps_trained(run: Run) -> int:
    """Return the number of trained steps in the event record, at least 1."""
    # A step has several rows, one for each token age, all with the same start time. So count the different start times.
    last = pc.max(about(run.groups, "trained")["end"]).as_py() or 0.0
    return max(1, sum(start <= last for start in run.tokens["start"].unique().to_pylist()))


def estimated(
    rollout: DeviceTimes, trainer: Callable[[int], DeviceTimes], groups: Sequence[Sequence[int]], prompt: int
) -> Times:
    """Return times computed from device profiles.

    ``groups`` has the lengths of each group's answers, and ``prompt`` is the number of tokens of a prompt. ``rollout``
    has the times of a rollout replica. ``trainer`` returns the trainer's times for a given number of ranks.
    """
    return Times(
        groups=tuple(tuple(group) for group in groups),
        step_s=rollout.decode_step_s,
        read_s=rollout.prefill_s,
        update_s=lambda lengths, ranks: trainer(round(ranks)).update_s([prompt + length for length in lengths]),
        log_probs_s=lambda lengths, ranks: 0.0,
        prompt=prompt,
        stage_s=rollout.transfer_s(),
        swap_s=rollout.load_s(),
        switch=ASSUMED_SWITCH,
    )


def _of_batches(run: Run, what: str, prompt: float) -> Seconds:
    """Return a function that gives the seconds of a trainer phase, from a batch's answer lengths and the ranks.

    The function is the sum of two terms: a time per token of prompts and answers, inversely proportional to the ranks,
    and a time per answer, which does not depend on the ranks. If the length of prompts is not known, the second term is
    0, and the first term includes the time that does not depend on the answers' lengths.

    Args:
        what: name of the phase.
        prompt: mean number of tokens of a prompt; 0 if not known.
    """
    steps = steps_trained(run)
    groups = about(run.groups, "trained")
    answers = len(groups) / steps * group_size(run)
    prompts = answers * prompt
    line = _line(run, what)
    if line is None:
        # Without a fit, assume that a prompt token takes as long as an answer token.
        per_token = sum(_phases(run, what)) / (pc.sum(groups["tokens"]).as_py() + steps * prompts)
        base = per_token * prompts
    else:
        base, per_token = line
    of_prompts = min(base, per_token * prompts) if prompts else base
    prompt_s, other_s, seen = of_prompts / answers, (base - of_prompts) / answers, run.settings["trainer_ranks"]
    return lambda lengths, ranks: (
        other_s * len(lengths) + (prompt_s * len(lengths) + per_token * sum(lengths)) * seen / ranks
    )


def _prompt(run: Run) -> float:
    """Return the mean number of tokens of the run's prompts; 0 if its metrics lack it."""
    means = [line.get("prompt_length/mean") for line in run.metrics]
    known = [mean for mean in means if mean is not None and 0 <= mean < LIMIT]
    return statistics.fmean(known) if known else 0.0


def _line(run: Run, what: str) -> tuple[float, float] | None:
    """Return the seconds of a trainer phase per batch and per answer token, from a line fitted to the steps of the run.

    Return None if the steps are too few or too similar, if the fit is poor, or if the time per batch would be negative.
    """
    tokens: defaultdict[float, int] = defaultdict(int)
    for row in run.tokens.to_pylist():
        tokens[row["start"]] += row["tokens"]
    begun = sorted(tokens)
    seconds: defaultdict[float, float] = defaultdict(float)
    for event in run.events:
        if event.lane == TRAINER and event.what == what and (number := bisect(begun, event.start)):
            seconds[begun[number - 1]] += event.end - event.start
    counts, took = [tokens[at] for at in seconds], list(seconds.values())
    differ = len(took) >= ENOUGH and len(set(counts)) > 1 and len(set(took)) > 1
    if not differ or statistics.correlation(counts, took) < EXPLAINED:
        return None
    fit = statistics.linear_regression(counts, took)
    return None if fit.intercept < 0 else (fit.intercept, fit.slope)


def _answers(run: Run) -> dict[int, list[tuple[int, float, float]]]:
    """Return (number of tokens, start, end) of each answer, by the id of its group."""
    found: defaultdict[int, list[tuple[int, float, float]]] = defaultdict(list)
    for row in about(run.trajectories, "generating").to_pylist():
        if row["tokens"]:
            found[row["group"]].append((row["tokens"], row["start"], row["end"]))
    return found


def _phases(run: Run, what: str) -> list[float]:
    """Return the seconds of each occurrence of the trainer phase ``what``."""
    return [event.end - event.start for event in run.events if event.lane == TRAINER and event.what == what]


def _place_seconds(pieces: Iterable[Piece], places: float) -> dict[Class, float]:
    """Return the slot-seconds that the engines spent in each class of the time account (`Class`).

    Slot-seconds are a number of sequence slots multiplied by seconds. Each engine has ``places`` slots.
    """
    used: defaultdict[Class, float] = defaultdict(float)
    for piece in pieces:
        if piece.device.startswith(ROLLOUT):
            used[piece.what] += (piece.end - piece.start) * piece.share * places
    return used
