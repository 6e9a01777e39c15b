# SPDX-License-Identifier: Apache-2.0
"""How a batch is divided over ranks and into micro-batches: what verl asserts when the workers are up, or later.

verl/workers/config/actor.py:199-209 and critic.py (a size, or sizing by tokens), verl/workers/engine_workers.py:616-643
(the same way for updates and log-probs), verl/workers/engine/utils.py:124 (sizes that divide) and
verl/utils/seqlen_balancing.py:384 (the longest sequence fits into a micro-batch).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.rules.parallel import shared_by
from recipe.async_engine.config.verl_types import ACTOR, ROLLOUT

REF, CRITIC = "actor_rollout_ref.ref", "critic"


@dataclass(frozen=True, slots=True)
class Sizing:
    """The settings by which one kind of work is divided into micro-batches.

    Attributes:
        dynamic: whether by tokens, else by a number of sequences.
        rows: sequences of a micro-batch of a rank; ``old_rows``: verl's name for all ranks together, which its engines
            do not read.
        tokens: of a micro-batch of a rank.
    """

    dynamic: str
    rows: str
    old_rows: str
    tokens: str


def _scoring(section: str) -> Sizing:
    names = ("use_dynamic_bsz", "micro_batch_size_per_gpu", "micro_batch_size", "max_token_len_per_gpu")
    return Sizing(*(f"{section}.log_prob_{name}" for name in names))


def _updating(section: str) -> Sizing:
    names = ("ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size", "ppo_max_token_len_per_gpu")
    return Sizing(f"{section}.use_dynamic_bsz", *(f"{section}.{name}" for name in names))


def micro_batches(context: RuleContext) -> Iterator[Problem]:
    """Each kind of work has a size, of the kind that is asked for, and room for the longest sequence."""
    for section, sizing in _used(context).items():
        by_tokens = bool(context.get(sizing.dynamic))
        if not by_tokens and (context.get(sizing.rows) is None or context.get(sizing.old_rows) is not None):
            allowed = f"an integer >= 1 where {sizing.dynamic}=false, and {sizing.old_rows} null"
            switch = f"{ACTOR}.use_dynamic_bsz" if section in (ACTOR, ROLLOUT, REF) else sizing.dynamic
            name = sizing.old_rows.rpartition(".")[2]
            advice = f"Set it, or {switch}=True, and remove {name}."
            yield context.problem(sizing.rows, allowed, advice)
        # verl's critic goes by tokens either way (engine.use_dynamic_bsz).
        tokens = context.count(sizing.tokens)
        shares = _sequence_shares(context, CRITIC if section == CRITIC else ACTOR)
        if (by_tokens or section == CRITIC) and tokens is not None and tokens * shares < context.longest:
            allowed = f"at least {-(-context.longest // shares)}"
            split = f", a share of it on each of {shares} ranks" if shares > 1 else ""
            advice = f"The longest sequence has data.max_prompt_length + max_response_length tokens{split}: raise it."
            yield context.problem(sizing.tokens, allowed, advice)
    actor, scoring = context.get(f"{ACTOR}.use_dynamic_bsz"), context.get(f"{ROLLOUT}.log_prob_use_dynamic_bsz")
    if scoring is not None and bool(actor) != bool(scoring):
        setting = f"{ROLLOUT}.log_prob_use_dynamic_bsz"
        yield context.problem(setting, f"the value of {ACTOR}.use_dynamic_bsz", "Remove it: it follows that one.")


def _used(context: RuleContext) -> dict[str, Sizing]:
    sizings = {section: _updating(section) for section in context.trained}
    # verl asserts the sizes for log-probs whether or not the trainer computes any.
    sizings[ROLLOUT] = _scoring(ROLLOUT)
    if context.uses_reference:
        sizings[REF] = _scoring(REF)
    return sizings


def division(context: RuleContext) -> Iterator[Problem]:
    mini, answers = context.count(f"{ACTOR}.ppo_mini_batch_size"), context.count(f"{ROLLOUT}.n")
    nodes, per_node = context.count("trainer.nnodes"), context.count("trainer.n_gpus_per_node")
    if mini is None or answers is None or nodes is None or per_node is None:
        return
    ranks, copies = nodes * per_node, math.prod(shared_by(context, ACTOR).values())
    if ranks % copies:
        advice = f"Change trainer.nnodes, trainer.n_gpus_per_node or the parallel sizes of {ACTOR}."
        yield context.problem("trainer.n_gpus_per_node", f"a multiple of the model's {copies} parallel ranks", advice)
        return
    yield from _expert_division(context, ranks)
    parts, trajectories = ranks // copies, mini * answers
    setting = f"{ACTOR}.ppo_mini_batch_size"
    if trajectories % parts:
        advice = f"{mini} prompts with {answers} answers are {trajectories} trajectories: change either."
        yield context.problem(setting, f"such that its trajectories divide by {parts} data-parallel ranks", advice)
        return
    yield from _divisors(context, trajectories // parts, (context.batch_groups or mini) * answers // parts)


def _divisors(context: RuleContext, mini: int, batch: int) -> Iterator[Problem]:
    """Micro-batches by a number of sequences divide what a rank has: ``mini`` of an update, ``batch`` of a step."""
    works = {ACTOR: (_updating(ACTOR), mini, "mini-batch")}
    if context.trainer_scores:
        works[ROLLOUT] = (_scoring(ROLLOUT), batch, "batch")
    if context.uses_reference:
        works[REF] = (_scoring(REF), batch, "batch")
    for sizing, rows, what in works.values():
        micro = context.count(sizing.rows)
        if not context.get(sizing.dynamic) and micro is not None and rows % micro:
            allowed = f"a divisor of {rows}, the trajectories of a rank's {what}"
            advice = f"Lower it, or set {ACTOR}.use_dynamic_bsz=True."
            yield context.problem(sizing.rows, allowed, advice)


def _expert_division(context: RuleContext, ranks: int) -> Iterator[Problem]:
    if context.get(f"{ACTOR}.strategy") != "megatron":
        return
    names = ("expert_model_parallel_size", "expert_tensor_parallel_size", "pipeline_model_parallel_size")
    tensor = context.count(f"{ACTOR}.megatron.tensor_model_parallel_size") or 1
    defaults = {"expert_tensor_parallel_size": tensor}
    sizes = [context.count(f"{ACTOR}.megatron.{name}") or defaults.get(name, 1) for name in names]
    if sizes[0] > 1 and ranks % math.prod(sizes):
        setting = f"{ACTOR}.megatron.{names[0]}"
        product = " x ".join(map(str, sizes))
        advice = (
            f"Expert, expert-tensor and pipeline parallel sizes are {product}, and the trainer has {ranks} ranks."
            f" {ACTOR}.megatron.{names[1]}=null means {tensor}, the tensor parallel size."
        )
        yield context.problem(setting, f"such that their product divides {ranks}", advice)


def _sequence_shares(context: RuleContext, section: str) -> int:
    """Ranks that split each sequence."""
    # Of each engine's, the last one shares a sequence.
    return list(shared_by(context, section).values())[-1]
