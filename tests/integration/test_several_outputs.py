# SPDX-License-Identifier: Apache-2.0
"""Agent loops that return several outputs: their rows in a batch, advantages, and what verl's workers get."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from recipe.async_engine.core.columns import OUTPUT_KEYS, TOKEN_VERSIONS, VERSION_RUNS
from recipe.async_engine.core.groups import Group, PromptRef
from recipe.async_engine.core.versions import NOT_SAMPLED, align_in, context_of
from recipe.async_engine.rollout.group_run import GroupRun
from recipe.async_engine.trainer.batch import (
    assemble,
    balanced,
    compare_last_outputs,
    in_whole_mini_batches,
    last_outputs,
    staleness_metrics,
)

PROMPT, RESPONSE, FILLER = 3, 5, 9

numbers_of_outputs = st.lists(st.integers(1, 9), min_size=1, max_size=9)
"""Of a group: the number of outputs of each of its trajectories."""
some_groups = st.lists(numbers_of_outputs, min_size=1, max_size=6)


def output(number: int) -> Any:
    """An output whose tokens and lengths its number decides, with a score on its last token."""
    length = 1 + number % RESPONSE
    there = torch.tensor([[0] + [1] * (PROMPT - 1) + [1] * length + [0] * (RESPONSE - length)])
    return SimpleNamespace(
        number=number,
        attention_mask=there,
        extra_fields={VERSION_RUNS: [(number % 4, length)], "exact_versions": True},
    )


def join(rows: list[Any]) -> DataProto:
    """In place of verl's own joining, with the columns that its workers get."""
    attention = torch.cat([row.attention_mask for row in rows])
    mask = attention[:, PROMPT:].clone()
    numbers = torch.tensor([row.number for row in rows])
    scores = torch.zeros(mask.shape)
    scores[torch.arange(len(rows)), mask.sum(1) - 1] = (numbers % 3).float()
    tokens = numbers[:, None].repeat(1, PROMPT + RESPONSE)
    columns = {
        "input_ids": tokens,
        "prompts": tokens[:, :PROMPT],
        "responses": tokens[:, PROMPT:],
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": mask,
        "rm_scores": scores,
        "token_level_rewards": scores,
        "old_log_probs": -numbers[:, None].float() * mask,
    }
    fields = {
        VERSION_RUNS: np.fromiter((row.extra_fields[VERSION_RUNS] for row in rows), dtype=object),
        "exact_versions": np.array([True] * len(rows), dtype=object),
        "multi_modal_inputs": np.fromiter(({"of": row.number} for row in rows), dtype=object),
    }
    return DataProto.from_dict(tensors=columns, non_tensors=fields)


def made(sizes: list[list[int]]) -> tuple[list[GroupRun], list[list[list[Any]]]]:
    """Groups with so many trajectories of so many outputs, which are numbered through."""
    numbers = itertools.count()
    groups = [GroupRun(Group(n, PromptRef(n, 0, f"0-{n}"), 0), {}, len(size)) for n, size in enumerate(sizes)]
    return groups, [[[output(next(numbers)) for _ in range(count)] for count in size] for size in sizes]


def stock_balance(ranks: int) -> Any:
    """verl's function that balances a batch over so many ranks."""
    trainer = SimpleNamespace(actor_rollout_wg=None, _get_dp_size=lambda group, role: ranks)
    return partial(RayPPOTrainer._balance_batch, trainer, metrics={})


@settings(deadline=None)
@given(sizes=some_groups, ranks=st.sampled_from([1, 2, 4]), balances=st.booleans())
def test_each_output_is_one_row_with_its_group_and_versions(sizes: list[list[int]], ranks: int, balances: bool) -> None:
    groups, outputs = made(sizes)
    order = balanced(groups, outputs, stock_balance(ranks), ranks) if balances else None
    batch = assemble(groups, outputs, join, order)
    numbers = batch.batch["responses"][:, 0].tolist()
    assert sorted(numbers) == list(range(sum(map(sum, sizes))))
    assert order is None or numbers == order
    keys = [
        (f"0-{group}", trajectory, number)
        for group, size in enumerate(sizes)
        for trajectory, count in enumerate(size)
        for number in range(count)
    ]
    assert batch.non_tensor_batch["uid"].tolist() == [keys[number][0] for number in numbers]
    found = batch.non_tensor_batch.get(OUTPUT_KEYS)
    if all(count == 1 for size in sizes for count in size):
        assert found is None
    else:
        assert found.tolist() == ["_".join(map(str, keys[number])) for number in numbers]
    for row, number in enumerate(numbers):
        length = 1 + number % RESPONSE
        assert batch.batch[TOKEN_VERSIONS][row].tolist() == [number % 4] * length + [NOT_SAMPLED] * (RESPONSE - length)
    # The oldest token of all rows is what the bound is about.
    assert staleness_metrics(batch, 3, 3)["fully_async/staleness/oldest_token_max"] == 3


@settings(deadline=None)
@given(sizes=some_groups, by_std=st.booleans(), shuffled=st.randoms(use_true_random=False))
def test_advantages_are_those_of_verls_v1_trainers(sizes: list[list[int]], by_std: bool, shuffled: Any) -> None:
    groups, outputs = made([*sizes, [2]])
    order = list(range(sum(map(sum, sizes)) + 2))
    shuffled.shuffle(order)
    batch = assemble(groups, outputs, join, order)
    keys = batch.non_tensor_batch[OUTPUT_KEYS]
    settings = {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": by_std}
    theirs = compute_advantage_for_multi_trajectories(batch.select(deepcopy=True), keys.tolist(), **settings)
    compare_last_outputs(batch, keys, partial(compute_advantage, **settings))
    for name in ("advantages", "returns"):
        assert torch.equal(batch.batch[name], theirs.batch[name])
    rows, trajectories = last_outputs(keys)
    assert len(rows) == len({key.rpartition("_")[0] for key in keys})
    assert [keys[row].rpartition("_")[0] for row in rows[trajectories]] == [key.rpartition("_")[0] for key in keys]


@settings(deadline=None)
@given(sizes=some_groups, size=st.sampled_from([1, 2, 4, 8, 12]), balances=st.booleans())
def test_workers_get_each_row_once_and_added_rows_that_no_loss_has(
    sizes: list[list[int]], size: int, balances: bool
) -> None:
    batch = assemble(*made(sizes), join)
    count = len(batch)
    before = batch.select(deepcopy=True)
    whole = in_whole_mini_batches(batch, size, FILLER, stock_balance(1 if size % 2 else 2) if balances else None)
    assert len(whole) % size == 0 and len(whole) - count < size
    assert (whole is batch) == (count % size == 0)
    is_real = whole.batch["response_mask"].any(dim=1)
    assert int(is_real.sum()) == count
    real = whole.select_idxs(np.array(is_real.nonzero()[:, 0][whole.batch["responses"][is_real, 0].argsort()]))
    assert all(torch.equal(real.batch[name], column) for name, column in before.batch.items())
    assert (
        real.non_tensor_batch["multi_modal_inputs"].tolist() == before.non_tensor_batch["multi_modal_inputs"].tolist()
    )
    assert all(torch.equal(batch.batch[name], column) for name, column in before.batch.items()), "the batch is changed"
    added = whole.select_idxs(np.array((~is_real).nonzero()[:, 0]))
    for row in range(len(added)):
        columns = {name: column[row] for name, column in added.batch.items()}
        there = columns["attention_mask"].bool()
        assert there.tolist() == [True] * (PROMPT + 1) + [False] * (RESPONSE - 1)
        assert columns["position_ids"][there].tolist() == list(range(PROMPT + 1))
        assert set(columns["input_ids"].tolist()) == {FILLER}
        assert not any(columns[name].any() for name in ("response_mask", "rm_scores", "old_log_probs"))
        assert added.non_tensor_batch["multi_modal_inputs"][row] == {}


def test_no_update_is_of_added_rows_alone() -> None:
    """Of whatever number of rows, verl's balance puts fewer added ones into a batch than a mini-batch has."""
    for count in range(1, 40):
        batch = assemble(*made([[1] * (count - 1) + [1]]), join)
        whole = in_whole_mini_batches(batch, 8, FILLER, stock_balance(2))
        real = whole.batch["response_mask"].any(dim=1).reshape(2, -1, 4)
        assert bool(real.any(dim=2).any(dim=0).all()), count


def test_an_outputs_versions_are_those_of_the_answers_in_its_own_context() -> None:
    """Whatever other answers of the trajectory have the same tokens."""
    pieces = [(1, (7, 8)), (2, (7, 8)), (3, (7,))]
    contexts = [context_of([1, 2]), context_of([5]), context_of([5, 7, 8, 6])]
    found = align_in(pieces, contexts, [5], [7, 8, 6, 7], [1, 1, 0, 1])
    assert (found.runs, found.exact) == ([(2, 2), (NOT_SAMPLED, 1), (3, 1)], True)
    found = align_in(pieces, contexts, [1, 2], [7, 8], [1, 1])
    assert (found.runs, found.exact) == ([(1, 2)], True)
    # One whose context was rewritten may be of any of the answers that have its tokens, and counts as of the oldest.
    found = align_in(pieces, contexts, [4, 4], [7, 8], [1, 1])
    assert (found.runs, found.exact) == ([(1, 2)], False)


@pytest.mark.parametrize("length", [0, 3, 40])
def test_what_is_kept_of_a_context_is_short_and_tells_it_from_others(length: int) -> None:
    tokens = list(range(length))
    assert context_of(tokens) != context_of([*tokens, 1])
    assert len(context_of(tokens)[1]) <= 16
