# SPDX-License-Identifier: Apache-2.0
"""The columns of a training batch, and what it says of its staleness before it is trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from remote_fakes import Rows, make_source
from verl import DataProto

from recipe.async_engine.core.columns import TOKEN_VERSIONS, VERSION_RUNS
from recipe.async_engine.core.errors import StalenessViolation, VersionRecordError
from recipe.async_engine.core.groups import Group
from recipe.async_engine.rollout.group_run import GroupRun
from recipe.async_engine.trainer.batch import assemble, mask_off_policy, staleness_metrics

LENGTH = 6


def output(*runs: tuple[int, int], exact: bool = True) -> Any:
    """A trajectory as far as its versions go."""
    return SimpleNamespace(extra_fields={VERSION_RUNS: runs, "exact_versions": exact})


def join(rows: list[Any]) -> DataProto:
    """In place of verl's own joining: fixed responses, and the extra fields of the rows as columns."""
    fields = {}
    for key in (VERSION_RUNS, "exact_versions"):
        fields[key] = np.empty(len(rows), dtype=object)
        fields[key][:] = [row.extra_fields[key] for row in rows]
    responses = torch.arange(len(rows)).repeat_interleave(LENGTH).reshape(len(rows), LENGTH)
    return DataProto.from_dict(tensors={"responses": responses}, non_tensors=fields)


def batch_of(*rows: Any, size: int = 1, order: list[int] | None = None, kind: type[Rows] = Rows) -> DataProto:
    source = make_source(10, kind=kind)
    groups = []
    for group_id in range(len(rows) // size):
        prompt = source.take()
        groups.append(GroupRun(Group(group_id, prompt.reference, 0), prompt.row, 0))
    outputs = [[[row] for row in rows[start : start + size]] for start in range(0, len(rows), size)]
    return assemble(groups, outputs, join, order)


def test_rows_keep_the_order_of_groups_and_carry_their_groups_fields() -> None:
    batch = batch_of(*[output((0, 2)) for _ in range(4)], size=2)
    assert batch.batch["responses"][:, 0].tolist() == [0, 1, 2, 3]
    assert batch.non_tensor_batch["uid"].tolist() == ["0-0", "0-0", "0-1", "0-1"]
    assert [prompt[0]["content"] for prompt in batch.non_tensor_batch["raw_prompt"]] == [
        "prompt 0",
        "prompt 0",
        "prompt 1",
        "prompt 1",
    ]
    assert batch.non_tensor_batch["level"].tolist() == [0, 0, 1, 1]


def test_rows_come_in_the_order_that_is_asked_for_with_all_that_belongs_to_them() -> None:
    batch = batch_of(*[output((number, 2)) for number in range(4)], size=2, order=[2, 0, 3, 1])
    assert batch.batch[TOKEN_VERSIONS][:, 0].tolist() == [2, 0, 3, 1]
    assert batch.non_tensor_batch["uid"].tolist() == ["0-1", "0-0", "0-1", "0-0"]
    assert batch.non_tensor_batch["level"].tolist() == [1, 0, 1, 0]


class Uneven(Rows):
    """Fields that some rows have alone, and some that are called as columns of the batch are."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        own = {"hint": f"hint {index}"} if index % 2 else {"source": "a book", "responses": "x", "values": 3}
        return {**super().__getitem__(index), **own, "output": "y"}


def test_rows_with_different_fields_are_one_batch_and_none_of_them_takes_the_place_of_a_tensor() -> None:
    batch = batch_of(*[output((0, 2)) for _ in range(3)], kind=Uneven)
    columns = batch.non_tensor_batch
    assert columns["hint"].tolist() == [None, "hint 1", None]
    assert columns["source"].tolist() == ["a book", None, "a book"]
    assert columns["output"].tolist() == ["y"] * 3
    batch.batch["values"] = torch.zeros(3, 1)
    del columns[VERSION_RUNS]
    assert set(batch.to_tensordict().keys()) >= {"responses", "values", "hint", "source", "output"}


def test_every_token_has_its_version_and_padding_none() -> None:
    batch = batch_of(output((1, 2), (-1, 1), (3, 2)), output((2, LENGTH)))
    versions = batch.batch[TOKEN_VERSIONS]
    assert versions.dtype == torch.int64
    assert versions.tolist() == [[1, 1, -1, 3, 3, -1], [2] * LENGTH]
    assert staleness_metrics(batch, version=3, bound=2)["fully_async/sampled_tokens"] == 4 + LENGTH


def test_versions_of_more_tokens_than_the_response_has_are_refused() -> None:
    with pytest.raises(VersionRecordError, match=f"a response of {LENGTH} tokens has versions for {LENGTH + 1} tokens"):
        batch_of(output((0, LENGTH), (1, 1)))


def test_versions_that_passed_through_json_or_pickle_as_lists_are_taken_too() -> None:
    batch = batch_of(SimpleNamespace(extra_fields={VERSION_RUNS: [[1, 2]], "exact_versions": True}))
    assert batch.batch[TOKEN_VERSIONS][0].tolist() == [1, 1, -1, -1, -1, -1]


def test_staleness_is_told_by_oldest_token_by_all_tokens_and_by_newest_token() -> None:
    batch = batch_of(output((1, 2), (3, 2)), output((3, 2)), output((2, 2), (-1, 2)), output((2, 1), exact=False))
    metrics = staleness_metrics(batch, version=3, bound=2)
    assert metrics == {
        "fully_async/staleness/oldest_token_max": 2,
        "fully_async/staleness/token_mean": (2 * 2 + 2 * 1 + 1 * 1) / 9,
        "fully_async/staleness/bound": 2,
        "fully_async/sampled_tokens": 9,
        "fully_async/count/stale_trajectory_processed": 2,
        "fully_async/partial/total_partial_num": 1,
        "fully_async/partial/partial_ratio": 0.25,
        "fully_async/partial/max_partial_span": 2,
        "fully_async/partial/inexact_version_ratio": 0.25,
        **of_all("trajectory_spans", (3 + 1 + 1 + 1) / 4, 3, 1),
        **of_all("trajectory_staleness", (0 + 0 + 1 + 1) / 4, 1, 0),
        **of_all("trajectory_staleness_worst", (2 + 0 + 1 + 1) / 4, 2, 0),
    }


def of_all(name: str, *values: float) -> dict[str, float]:
    return {f"training/off_policy/{name}/{of}": value for of, value in zip(("mean", "max", "min"), values, strict=True)}


def test_token_past_the_bound_is_refused_whatever_the_other_tokens_are() -> None:
    batch = batch_of(output((3, 5)), output((1, 1), (3, 4)))
    with pytest.raises(StalenessViolation, match=r"1 trajectories .* at version 3.*max_staleness=1 versions old"):
        staleness_metrics(batch, version=3, bound=1)
    assert staleness_metrics(batch, version=3, bound=2)["fully_async/staleness/oldest_token_max"] == 2


def test_token_of_a_version_that_is_not_published_yet_is_refused() -> None:
    with pytest.raises(VersionRecordError, match="version 4 cannot be trained at version 3"):
        staleness_metrics(batch_of(output((4, 1))), version=3, bound=1)


def test_batch_in_which_nothing_was_sampled_has_no_staleness() -> None:
    metrics = staleness_metrics(batch_of(output((-1, 3)), output()), version=3, bound=0)
    assert metrics["fully_async/staleness/token_mean"] == metrics["fully_async/staleness/oldest_token_max"] == 0


@pytest.mark.parametrize(("limit", "masked"), [(0, 2), (1, 2), (2, 0)])
def test_tokens_past_the_masks_limit_give_no_policy_gradient_and_the_others_do(limit: int, masked: int) -> None:
    batch = batch_of(output((1, 2), (-1, 1), (3, 2)))
    batch.batch["response_mask"] = torch.tensor([[1, 1, 0, 1, 1, 0]])
    batch.batch["advantages"] = torch.full((1, LENGTH), 0.5)
    metrics = mask_off_policy(batch, version=3, limit=limit)
    assert batch.batch["advantages"].tolist() == [[0.0 if masked else 0.5] * 2 + [0.5] * 4]
    assert batch.batch["response_mask"].tolist() == [[1, 1, 0, 1, 1, 0]]
    assert metrics == {
        "fully_async/off_policy/masked_tokens": masked,
        "fully_async/off_policy/masked_ratio": masked / 4,
    }
