# SPDX-License-Identifier: Apache-2.0
"""Rules for batches, staleness and admission policies."""

import importlib.util
import math
from collections.abc import Iterator

from recipe.async_engine.config.plan import group_limits, staleness_bound, synchronous_batch
from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.sections import ELASTIC, SHARED
from recipe.async_engine.config.verl_types import ACTOR, ROLLOUT
from recipe.async_engine.core.policy import POLICIES

DEPTH = "async_training.staleness_threshold"


def staleness(context: RuleContext) -> Iterator[Problem]:
    """Check that the pipeline depth is at most the staleness bound."""
    training = context.settings.async_training
    bound, depth = staleness_bound(training), training.staleness_threshold
    if depth > bound:
        advice = f"Lower it, or set async_training.max_staleness={math.ceil(depth)} to allow such old samples."
        yield context.problem(DEPTH, f"at most the bound of {bound} versions", advice)


def tight_bound(context: RuleContext) -> Iterator[str]:
    """Warn about a staleness bound so tight that training waits for long answers."""
    training = context.settings.async_training
    bound, depth = staleness_bound(training), training.staleness_threshold
    if depth == 0 or training.whole_batches or bound > math.ceil(depth):
        return
    versions = "1 version" if bound == 1 else f"{bound} versions"
    yield (
        f"async_training.max_staleness={bound} leaves no room above the pipeline depth ({depth:g} versions): training"
        f" waits for each answer that takes longer than {versions}. {bound + 2} lets long answers finish, and samples"
        f" are usually no older for it, since {DEPTH} decides their age"
    )


def batch(context: RuleContext) -> Iterator[Problem]:
    """Check that the size of a step's batch suits the mode, the number of data rows and the limits of the run."""
    training = context.settings.async_training
    whole, train = synchronous_batch(training), context.get("data.train_batch_size")
    if not whole and train not in (0, None):
        advice = f"Set the prompts of a step with {ACTOR}.ppo_mini_batch_size (times async_training.require_batches)."
        yield context.problem("data.train_batch_size", "0", advice)
    if whole and train not in (0, None):
        yield from _train_batch(context)
    if context.get("data.gen_batch_size") not in ((1, None, train) if whole else (1, None)):
        yield context.problem("data.gen_batch_size", "1", "Prompts are issued one by one; remove the setting.")
    top, answers = context.get("rollout.n"), context.count(f"{ROLLOUT}.n")
    if top is not None and answers is not None and top != answers:
        yield context.problem("rollout.n", f"the value of {ROLLOUT}.n ({answers})", f"Set {ROLLOUT}.n only.")
    batch = context.batch_groups
    if batch is None:
        return
    setting = f"{ACTOR}.ppo_mini_batch_size"
    if context.dataset_rows is not None and batch > context.dataset_rows:
        allowed = f"a batch of at most {context.dataset_rows} prompts, the rows of data.train_files"
        advice = f"A step needs {batch} (times async_training.require_batches). Lower it, or use more data."
        yield context.problem(setting, allowed, advice)
    epochs = context.count("trainer.total_epochs")
    for name, groups in group_limits(epochs, context.settings, batch, context.dataset_rows).items():
        if groups < batch:
            yield context.problem(name, f"enough for one batch of {batch} prompts", f"Raise it, or lower {setting}.")


def _train_batch(context: RuleContext) -> Iterator[Problem]:
    """Check `data.train_batch_size`, the batch of a step, which verl's update splits into mini-batches."""
    size, mini = context.count("data.train_batch_size"), context.count(f"{ACTOR}.ppo_mini_batch_size")
    if size is None or (mini is not None and size % mini):
        advice = f"A step trains it in mini-batches of {ACTOR}.ppo_mini_batch_size prompts."
        yield context.problem("data.train_batch_size", f"a multiple of {mini}, or 0 for one mini-batch", advice)
    if context.settings.async_training.require_batches != 1:
        advice = "data.train_batch_size is the batch of a step already."
        yield context.problem("async_training.require_batches", "1 where data.train_batch_size is set", advice)


def admission_policy(context: RuleContext) -> Iterator[Problem]:
    """Check that the module of a custom admission policy exists; the trainer's process checks the class in it."""
    name = context.settings.async_training.policy
    if name in POLICIES:
        return
    allowed = f"one of {', '.join(POLICIES)}, or the dotted name of a class, module.Class"
    module = name.rpartition(".")[0]
    try:
        found = bool(module) and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        missing = f"There is no module {module!r}: put it on PYTHONPATH."
        advice = missing if module else "Name the class with its module; null selects the default of the placement."
        yield context.problem("async_training.admission_policy", allowed, advice)


def whole_batches(context: RuleContext) -> Iterator[Problem]:
    """Check that, with the admission policy `whole_batches`, a batch is at most one version old when it is trained."""
    training = context.settings.async_training
    if not training.whole_batches:
        return
    bound = staleness_bound(training)
    if bound > 1:
        advice = "One-step-off trains each batch one version late; for more, use the fully-asynchronous mode."
        yield context.problem("async_training.max_staleness", "0 or 1 with whole batches", advice)
    elif training.staleness_threshold != bound:
        yield context.problem(DEPTH, f"{bound}, the bound, with whole batches", "Remove it.")


def shared_placement(context: RuleContext) -> Iterator[Problem]:
    """Refuse settings that do not suit ``placement=shared`` or the admission policy `whole_batches`.

    With either of them, weights are published after every batch. `whole_batches` also excludes ``placement=shared`` and
    ``placement=elastic``.
    """
    training = context.settings.async_training
    if synchronous_batch(training) and training.trigger_parameter_sync_step != 1:
        allowed = f"1 with {'placement=shared' if training.placement == SHARED else 'whole batches'}"
        advice = "Weights are published after every batch: set it to 1."
        yield context.problem("async_training.trigger_parameter_sync_step", allowed, advice)
    if training.placement in (SHARED, ELASTIC) and training.whole_batches:
        advice = "A step trains the oldest prompts whose answers are ready. Remove the setting."
        allowed = f"another one with placement={training.placement}"
        yield context.problem("async_training.admission_policy", allowed, advice)
