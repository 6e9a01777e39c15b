# SPDX-License-Identifier: Apache-2.0
"""Rules for the division of ranks and batches, which verl checks only after the workers have started.

verl's own checks are in verl/workers/config/actor.py:199-209 and critic.py (micro-batches have a size or are sized by
tokens), verl/workers/engine_workers.py:616-643 (micro-batches of updates and of log-probs are sized in the same way),
verl/workers/engine/utils.py:124 (divisibility) and verl/utils/seqlen_balancing.py:384 (the longest sequence fits into
a micro-batch). Shown by tests/config/test_model_rules.py and test_parallel_sizes.py.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.verl_types import ACTOR, ROLLOUT

# For each training engine, the settings whose product is the number of ranks among which a copy of the model or a
# sequence is divided.
OF_FSDP = ("ulysses_sequence_parallel_size",)
TITANS = tuple(f"torchtitan.{kind}_parallel_size" for kind in ("tensor", "pipeline", "context"))
SHARING = {
    "megatron": (
        "megatron.tensor_model_parallel_size",
        "megatron.pipeline_model_parallel_size",
        "megatron.context_parallel_size",
    ),
    "torchtitan": TITANS,
    "veomni": ("veomni.ulysses_parallel_size",),
}
SERVERS, PARALLEL, REFERENCE = "model_engine_server", "model_parallel_size", "actor_rollout_ref.ref"


def ranks(context: RuleContext) -> Iterator[Problem]:
    """Check each engine's `fsdp_size`, and the parallel sizes of critic and servers; `division` checks the actor's."""
    nodes, per_node = context.count("trainer.nnodes"), context.count("trainer.n_gpus_per_node")
    if nodes is not None and per_node is not None:
        trainer = nodes * per_node
        yield from _copies(context, ACTOR, f"{ACTOR}.fsdp_config", trainer)
        if context.uses_reference:
            yield from _copies(context, REFERENCE, f"{REFERENCE}.fsdp_config", trainer)
        if context.has_critic:
            yield from _copies(context, "critic", "critic.fsdp", trainer)
            yield from _parallel(context, "critic", trainer) or _critics_batches(context, trainer)
    if context.settings.servers.backend == "fsdp2":
        servers = f"{SERVERS}.engine"
        yield from _copies(context, servers, servers, context.settings.servers.ranks)
        yield from _parallel(context, servers, context.settings.servers.ranks)


def _copies(context: RuleContext, section: str, engine: str, count: int) -> Iterator[Problem]:
    """Check ``fsdp_size``, the number of ranks that share a copy of a model (verl/workers/engine/fsdp/utils.py:35)."""
    setting = f"{engine}.fsdp_size"
    size = context.get(setting)
    if context.get(f"{section}.strategy") in SHARING or not isinstance(size, int):
        return
    if size == 0 or (0 < size < count and count % size):
        advice = "Each copy of the model is sharded over so many ranks; -1 shards one copy over all ranks."
        yield context.problem(setting, f"-1, or a divisor of the engine's {count} ranks", advice)


def _parallel(context: RuleContext, section: str, count: int) -> list[Problem]:
    """Check that the product of the parallel sizes divides the number of ranks."""
    sizes = shared_by(context, section)
    if count % math.prod(sizes.values()) == 0:
        return []
    first, *_ = sizes
    advice = f"Change {', '.join(sizes)}, or the number of accelerators."
    allowed = f"such that {' x '.join(map(str, sizes.values()))} divides the engine's {count} ranks"
    return [context.problem(first, allowed, advice)]


def shared_by(context: RuleContext, section: str) -> dict[str, int]:
    """Return the parallel sizes of an engine, by the names of their settings. A size that is not set is 1.

    Their product is the number of ranks among which a copy of the model or a sequence is divided.
    """
    of_engine = SHARING.get(str(context.get(f"{section}.strategy")), OF_FSDP)
    return {setting: context.count(setting) or 1 for setting in (f"{section}.{name}" for name in of_engine)}


def _critics_batches(context: RuleContext, count: int) -> Iterator[Problem]:
    """Check that the critic's data-parallel ranks divide its mini-batches (verl/workers/engine_workers.py:267)."""
    setting = "critic.ppo_mini_batch_size"
    mini, answers = context.count(setting), context.count(f"{ROLLOUT}.n")
    parts = count // math.prod(shared_by(context, "critic").values())
    if mini is not None and answers is not None and mini * answers % parts:
        advice = f"{mini} prompts with {answers} answers are {mini * answers} trajectories: change either."
        yield context.problem(setting, f"such that its trajectories divide by {parts} data-parallel ranks", advice)


@dataclass(frozen=True, slots=True)
class Sizing:
    """Names of the settings that determine how large micro-batches are, for updates or for log-probs.

    Attributes:
        dynamic: whether the limit of a micro-batch is a number of tokens (``tokens``) or of sequences (``rows``).
        rows: the number of sequences in a rank's micro-batch.
        old_rows: verl's older setting for the number of sequences on all ranks together. verl's engines ignore it.
        tokens: the number of tokens in a rank's micro-batch.
    """

    dynamic: str
    rows: str
    old_rows: str
    tokens: str


def scoring(section: str) -> Sizing:
    """Return the names of the settings in ``section`` for the size of micro-batches that compute log-probs."""
    names = ("use_dynamic_bsz", "micro_batch_size_per_gpu", "micro_batch_size", "max_token_len_per_gpu")
    return Sizing(*(f"{section}.log_prob_{name}" for name in names))


def updating(section: str) -> Sizing:
    """Return the names of the settings in ``section`` for the size of micro-batches in updates."""
    names = ("ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size", "ppo_max_token_len_per_gpu")
    return Sizing(f"{section}.use_dynamic_bsz", *(f"{section}.{name}" for name in names))


def micro_batches(context: RuleContext) -> Iterator[Problem]:
    """Check that micro-batches have a size, in sequences or in tokens, and that the longest sequence fits into them."""
    for section, sizing in _used(context).items():
        by_tokens = bool(context.get(sizing.dynamic))
        if not by_tokens and (context.get(sizing.rows) is None or context.get(sizing.old_rows) is not None):
            allowed = f"an integer >= 1 where {sizing.dynamic}=false, and {sizing.old_rows} null"
            switch = f"{ACTOR}.use_dynamic_bsz" if section in (ACTOR, ROLLOUT, REFERENCE) else sizing.dynamic
            name = sizing.old_rows.rpartition(".")[2]
            advice = f"Set it, or {switch}=True, and remove {name}."
            yield context.problem(sizing.rows, allowed, advice)
        # verl always sizes the critic's micro-batches by tokens (engine.use_dynamic_bsz).
        tokens = context.count(sizing.tokens)
        # The last of the parallel sizes is the one that splits sequences.
        shares = list(shared_by(context, "critic" if section == "critic" else ACTOR).values())[-1]
        if (by_tokens or section == "critic") and tokens is not None and tokens * shares < context.longest:
            allowed = f"at least {-(-context.longest // shares)}"
            split = f", a share of it on each of {shares} ranks" if shares > 1 else ""
            advice = f"The longest sequence has data.max_prompt_length + max_response_length tokens{split}: raise it."
            yield context.problem(sizing.tokens, allowed, advice)
    actor, scoring = context.get(f"{ACTOR}.use_dynamic_bsz"), context.get(f"{ROLLOUT}.log_prob_use_dynamic_bsz")
    if scoring is not None and bool(actor) != bool(scoring):
        setting = f"{ROLLOUT}.log_prob_use_dynamic_bsz"
        yield context.problem(setting, f"the value of {ACTOR}.use_dynamic_bsz", "Remove it: that is its default.")


def _used(context: RuleContext) -> dict[str, Sizing]:
    """Return the names of all settings for the size of a run's micro-batches, by configuration section."""
    sizings = {section: updating(section) for section in context.trained}
    # verl checks the micro-batch sizes for log-probs even if the trainer computes no log-probs.
    sizings[ROLLOUT] = scoring(ROLLOUT)
    if context.uses_reference:
        sizings[REFERENCE] = scoring(REFERENCE)
    return sizings


def division(context: RuleContext) -> Iterator[Problem]:
    """Check that the parallel sizes divide the actor's ranks, and that the data-parallel ranks divide the batches."""
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
    """Check that a rank's number of trajectories is a multiple of the micro-batch size, if that is in sequences.

    ``mini`` is the number of trajectories that a rank has in one mini-batch, and ``batch`` that in a whole step.
    """
    works = {ACTOR: (updating(ACTOR), mini, "mini-batch")}
    if context.trainer_scores:
        works[ROLLOUT] = (scoring(ROLLOUT), batch, "batch")
    if context.uses_reference:
        works[REFERENCE] = (scoring(REFERENCE), batch, "batch")
    for sizing, rows, what in works.values():
        micro = context.count(sizing.rows)
        if not context.get(sizing.dynamic) and micro is not None and rows % micro:
            allowed = f"a divisor of {rows}, the trajectories of a rank's {what}"
            advice = f"Lower it, or set {ACTOR}.use_dynamic_bsz=True."
            yield context.problem(sizing.rows, allowed, advice)


def _expert_division(context: RuleContext, ranks: int) -> Iterator[Problem]:
    """Check that the number of Megatron's ranks is a multiple of the product of the experts' parallel sizes."""
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
