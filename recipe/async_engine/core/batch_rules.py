# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The rules of validation on batches and staleness; `recipe.async_engine.core.validation` applies them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from recipe.async_engine.core.case import ACTOR, ROLLOUT, Case
from recipe.async_engine.core.config import SHARED, soft_depth, staleness_bound, step_limits, synchronous_batch
from recipe.async_engine.core.problems import Problem


def staleness(case: Case) -> Iterator[Problem]:
    training = case.settings.async_training
    bound, depth = staleness_bound(training), soft_depth(training)
    if depth > bound:
        name = "staleness_threshold" if training.pipeline_depth is None else "pipeline_depth"
        advice = f"Lower it, or set async_training.max_staleness={math.ceil(depth)} to allow such old samples."
        yield case.problem(f"async_training.{name}", f"at most the bound of {bound} versions", advice)
    if training.use_dynamic_resource_scheduling:
        advice = (
            "Remove it; to share accelerators between training and generation, use a mode that places both on them."
        )
        yield case.problem("async_training.use_dynamic_resource_scheduling", "false", advice)


def batch(case: Case) -> Iterator[Problem]:
    training = case.settings.async_training
    whole, train = synchronous_batch(training), case.get("data.train_batch_size", 0)
    if not whole and train not in (0, None):
        advice = f"Set the prompts of a step with {ACTOR}.ppo_mini_batch_size (times async_training.require_batches)."
        yield case.problem("data.train_batch_size", "0", advice)
    if whole and train not in (0, None):
        yield from _train_batch(case)
    if case.get("data.gen_batch_size", 1) not in ((1, None, train) if whole else (1, None)):
        yield case.problem("data.gen_batch_size", "1", "Prompts are issued one by one; remove the setting.")
    top, answers = case.settings.rollout.n, case.count(f"{ROLLOUT}.n")
    if top is not None and answers is not None and top != answers:
        yield case.problem("rollout.n", f"the value of {ROLLOUT}.n ({answers})", f"Set {ROLLOUT}.n only.")
    batch = case.batch_groups
    if batch is None:
        return
    setting = f"{ACTOR}.ppo_mini_batch_size"
    if case.dataset_rows is not None and batch > case.dataset_rows:
        allowed = f"a batch of at most {case.dataset_rows} prompts, the rows of data.train_files"
        advice = f"A step needs {batch} (times async_training.require_batches). Lower it, or use more data."
        yield case.problem(setting, allowed, advice)
    for name, steps in step_limits(_countable(case), batch, case.dataset_rows, training).items():
        if steps < 1 and name != "trainer.total_training_steps":
            yield case.problem(name, f"enough for one batch of {batch} prompts", f"Raise it, or lower {setting}.")


def _train_batch(case: Case) -> Iterator[Problem]:
    """`data.train_batch_size` as the batch of a step, split into mini-batches by verl's update."""
    size, mini = case.count("data.train_batch_size"), case.count(f"{ACTOR}.ppo_mini_batch_size")
    if size is None or (mini is not None and size % mini):
        advice = f"A step trains it in mini-batches of {ACTOR}.ppo_mini_batch_size prompts."
        yield case.problem("data.train_batch_size", f"a multiple of {mini}, or 0 for one mini-batch", advice)
    if case.settings.async_training.require_batches != 1:
        advice = "data.train_batch_size is the batch of a step already."
        yield case.problem("async_training.require_batches", "1 where data.train_batch_size is set", advice)


def whole_batches(case: Case) -> Iterator[Problem]:
    training = case.settings.async_training
    if not training.whole_batches:
        return
    bound = staleness_bound(training)
    if bound > 1:
        advice = "One-step-off trains each batch one version late; for more, use the fully-asynchronous mode."
        yield case.problem("async_training.max_staleness", "0 or 1 with whole batches", advice)
    elif soft_depth(training) != bound:
        name = "staleness_threshold" if training.pipeline_depth is None else "pipeline_depth"
        yield case.problem(f"async_training.{name}", f"{bound}, the bound, with whole batches", "Remove it.")
    if training.trigger_parameter_sync_step != 1:
        advice = "Weights are published after every batch; remove the setting."
        yield case.problem("async_training.trigger_parameter_sync_step", "1 with whole batches", advice)
    if training.partial_rollout:
        advice = "A batch is generated by one version of the weights; remove the setting."
        yield case.problem("async_training.partial_rollout", "false with whole batches", advice)
    if training.on_overdue != "wait":
        yield case.problem("async_training.on_overdue", "wait with whole batches", "Remove the setting.")


def shared_placement(case: Case) -> Iterator[Problem]:
    training = case.settings.async_training
    if training.placement != SHARED:
        return
    if training.trigger_parameter_sync_step != 1:
        advice = "The two sides take turns: every batch is followed by a weight sync. Remove the setting."
        yield case.problem("async_training.trigger_parameter_sync_step", "1 with placement=shared", advice)
    if not training.partial_rollout:
        advice = (
            "Answers are interrupted when the batch is complete and go on in the next turn; for synchronous training,"
            " in which none is, set async_training.staleness_threshold=0."
        )
        yield case.problem("async_training.partial_rollout", "true with placement=shared", advice)
    if training.whole_batches:
        advice = "A step trains the oldest prompts whose answers are ready. Remove the setting."
        yield case.problem("async_training.whole_batches", "false with placement=shared", advice)


def _countable(case: Case) -> Mapping[str, Any]:
    """The settings that limit the steps, without the ones that other rules report as malformed."""
    names = ("trainer.total_training_steps", "trainer.total_epochs")
    trainer = {name.rpartition(".")[2]: case.count(name) for name in names}
    return {"trainer": trainer, "rollout": {"total_rollout_steps": case.settings.rollout.total_rollout_steps}}


def division(case: Case) -> Iterator[Problem]:
    mini, answers = case.count(f"{ACTOR}.ppo_mini_batch_size"), case.count(f"{ROLLOUT}.n")
    nodes, per_node = case.count("trainer.nnodes"), case.count("trainer.n_gpus_per_node")
    if mini is None or answers is None or nodes is None or per_node is None:
        return
    ranks, copies = nodes * per_node, _model_parallel_size(case)
    if ranks % copies:
        advice = f"Change trainer.nnodes, trainer.n_gpus_per_node or the parallel sizes of {ACTOR}."
        yield case.problem("trainer.n_gpus_per_node", f"a multiple of the model's {copies} parallel ranks", advice)
        return
    parts, trajectories = ranks // copies, mini * answers
    setting = f"{ACTOR}.ppo_mini_batch_size"
    if trajectories % parts:
        advice = f"{mini} prompts with {answers} answers are {trajectories} trajectories: change either."
        yield case.problem(setting, f"such that its trajectories divide by {parts} data-parallel ranks", advice)
        return
    micro = case.count(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    if not case.get(f"{ACTOR}.use_dynamic_bsz") and micro is not None and (trajectories // parts) % micro:
        allowed = f"a divisor of {trajectories // parts}, the trajectories of a rank's mini-batch"
        advice = f"Lower it, or set {ACTOR}.use_dynamic_bsz=True."
        yield case.problem(f"{ACTOR}.ppo_micro_batch_size_per_gpu", allowed, advice)


def _model_parallel_size(case: Case) -> int:
    """Trainer ranks that hold one copy of the batch."""
    if case.get(f"{ACTOR}.strategy") == "megatron":
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        names = [f"{ACTOR}.megatron.{size}" for size in sizes]
    else:
        names = [f"{ACTOR}.ulysses_sequence_parallel_size"]
    product = 1
    for name in names:
        product *= case.count(name) or 1
    return product
