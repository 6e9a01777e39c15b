# SPDX-License-Identifier: Apache-2.0
"""Assembles a training batch from the trajectories of its groups, and measures the batch's staleness.

Contract: the batch has the columns of verl's synchronous trainer (prompts, responses, masks, ``rollout_log_probs``,
``rm_scores``, the data set's own fields, ``uid`` of the group) and the column ``token_versions``. The rows are in the
order of the groups, and the answers of a group are adjacent, unless verl balances the batch. A trajectory has a row for
each output of its agent loop. If any trajectory has several, the column `OUTPUT_KEYS` has the trajectory of each row.
Every sampled token is checked against the staleness bound before it is trained. An answer is copied only once, into its
row. Until ``token_versions`` is made, the versions of an answer's tokens are run-length encoded, as runs (version,
count). Shown by tests/integration/test_batch.py, test_several_outputs.py and tests/e2e/test_fully_async.py.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from verl import DataProto

from recipe.async_engine.core.columns import OF_THE_BATCH, OUTPUT_KEYS, TOKEN_VERSIONS, UNMATCHED_SHARE, VERSION_RUNS
from recipe.async_engine.core.errors import StalenessViolation, VersionRecordError
from recipe.async_engine.core.versions import NOT_SAMPLED, Runs
from recipe.async_engine.rollout.group_run import GroupRun
from recipe.async_engine.rollout.prompts import sample_of

FILLED = 127
"""A row that `in_whole_mini_batches` adds to a batch has at most this many prompt tokens, as in verl's v1 trainers."""


def assemble(
    groups: Sequence[GroupRun],
    outputs: Sequence[Sequence[Sequence[Any]]],
    postprocess: Callable[[list[Any]], DataProto],
    order: Sequence[int] | None = None,
) -> DataProto:
    """Put the trajectories of ``groups`` into one batch.

    Args:
        outputs: for each group, the outputs of each of its trajectories.
        postprocess: verl's function that joins padded trajectories (``AgentLoopWorker._postprocess``).
        order: for each row of the batch, the index of its output among all ``outputs``. None keeps their order.
    """
    in_groups = [output for of_group in outputs for trajectory in of_group for output in trajectory]
    order = range(len(in_groups)) if order is None else order
    rows = [in_groups[number] for number in order]
    batch = postprocess(rows)
    length = batch.batch["responses"].shape[1]
    batch.batch[TOKEN_VERSIONS] = _expanded([row.extra_fields[VERSION_RUNS] for row in rows], length)
    counts = [sum(map(len, of_group)) for of_group in outputs]
    if len(rows) > sum(map(len, outputs)):
        batch.non_tensor_batch[OUTPUT_KEYS] = _output_keys(groups, outputs)[order]
    for key, values in _sample_fields(groups, counts).items():
        if key not in batch.non_tensor_batch and key not in OF_THE_BATCH:
            batch.non_tensor_batch[key] = values[order]
    return batch


def balanced(
    groups: Sequence[GroupRun],
    outputs: Sequence[Sequence[Sequence[Any]]],
    balance: Callable[[DataProto], None],
    ranks: int,
) -> list[int]:
    """Return the indices of all outputs in an order in which each rank gets about the same number of tokens.

    verl chooses the order. verl's function would copy a whole batch to reorder it, so it gets a stand-in that has only
    the lengths and indices of the rows.

    Args:
        outputs: for each group, the outputs of each of its trajectories.
        balance: verl's function that reorders a batch in place (``RayPPOTrainer._balance_batch``).
        ranks: number of training ranks. It need not divide the number of rows.
    """
    rows = [
        (int(output.attention_mask.sum()), group.group.prompt.uid)
        for group, of_group in zip(groups, outputs, strict=True)
        for trajectory in of_group
        for output in trajectory
    ]
    return order_of([length for length, _ in rows], [uid for _, uid in rows], balance, ranks)


def order_of(
    lengths: Sequence[int], uids: Sequence[str], balance: Callable[[DataProto], None], multiple: int, keep: bool = False
) -> list[int]:
    """Return the indices of rows in the order that verl's function ``balance`` chooses.

    ``balance`` goes by the rows' ``lengths`` in tokens and ``uids``, and needs a number of rows that is a multiple of
    ``multiple``. So empty rows are added after the others. Their indices, from len(lengths) on, are in the result only
    if ``keep`` is true.
    """
    count = len(lengths)
    added = -count % multiple
    stand_in = DataProto.from_dict(
        tensors={
            "attention_mask": torch.tensor([*lengths, *[0] * added])[:, None],
            "row": torch.arange(count + added),
        },
        non_tensors={"uid": np.array([*uids, *[""] * added], dtype=object)},
    )
    balance(stand_in)
    order: list[int] = stand_in.batch["row"].tolist()
    return order if keep else [row for row in order if row < count]


def in_whole_mini_batches(
    batch: DataProto, size: int, filler: int, balance: Callable[[DataProto], None] | None = None
) -> DataProto:
    """Return the batch with rows added if necessary, so that the number of rows is a multiple of ``size``.

    verl's workers accept no other number, but with several outputs per trajectory a batch may have any number of rows.
    The added rows are short sequences of the token ``filler`` whose ``response_mask`` is 0, so they do not contribute
    to any loss. verl's v1 trainers add such rows too (trainer/ppo/padding_utils.py:144). The added rows come last,
    unless ``balance`` is given, which is verl's function that reorders a batch so that each rank gets about the same
    number of tokens.
    """
    count = len(batch)
    if not (added := -count % size):
        return batch
    order = list(range(count + added))
    if balance is not None:
        lengths = batch.batch["attention_mask"].sum(dim=1).tolist()
        order = order_of(lengths, batch.non_tensor_batch["uid"].tolist(), balance, size, keep=True)
    whole = batch.select_idxs(np.array([row if row < count else 0 for row in order]))
    is_added = torch.tensor([row >= count for row in order])
    for column in whole.batch.values():
        column[is_added] = 0
    width = whole.batch["prompts"].shape[1]
    mask = torch.zeros(whole.batch["attention_mask"].shape[1], dtype=torch.int64)
    mask[max(0, width - FILLED) : width + 1] = 1
    whole.batch["attention_mask"][is_added] = mask
    whole.batch["position_ids"][is_added] = (mask.cumsum(0) - 1).clamp(min=0)
    for name in ("input_ids", "prompts", "responses"):
        whole.batch[name][is_added] = filler
    for row in is_added.nonzero()[:, 0].tolist():
        if "multi_modal_inputs" in whole.non_tensor_batch:
            whole.non_tensor_batch["multi_modal_inputs"][row] = {}
    return whole


def without_added(computed: DataProto, batch: DataProto) -> DataProto:
    """Return the first rows of ``computed``, as many as ``batch`` has; the others were added to fill mini-batches."""
    return computed if len(computed) == len(batch) else computed[: len(batch)]


def last_outputs(keys: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays: for each trajectory, the row of its last output; for each row, the number of its trajectory.

    Trajectories are numbered by their positions in the first array. ``keys`` is the column `OUTPUT_KEYS`.
    """
    last: dict[str, tuple[int, int]] = {}
    of_rows = [key.rpartition("_") for key in keys]
    for row, (trajectory, _, number) in enumerate(of_rows):
        last[trajectory] = max(last.get(trajectory, (-1, -1)), (int(number), row))
    numbers = {trajectory: number for number, trajectory in enumerate(last)}
    rows = np.array([row for _, row in last.values()])
    return rows, np.array([numbers[trajectory] for trajectory, _, _ in of_rows])


def compare_last_outputs(batch: DataProto, keys: Sequence[str], compute: Callable[[DataProto], DataProto]) -> None:
    """Set the advantages of a batch as verl's v1 trainers do for GRPO (trainer/ppo/v1/utils.py:148).

    Only the last outputs of the trajectories are compared, among those of the same prompt. The other outputs of a
    trajectory get the advantage of its last output.

    Args:
        keys: the column `OUTPUT_KEYS`.
        compute: a function that adds ``advantages`` to a batch, comparing the rows that have the same ``uid``.
    """
    rows, trajectories = last_outputs(keys)
    last = compute(batch.select_idxs(rows)).batch
    # The advantage is the same at each trained token, and 0 at the others.
    first = last["response_mask"].argmax(dim=1)
    of_trajectories = last["advantages"][torch.arange(len(rows)), first]
    advantages = of_trajectories[trajectories][:, None] * batch.batch["response_mask"]
    batch.batch["advantages"] = batch.batch["returns"] = advantages


def _output_keys(groups: Sequence[GroupRun], outputs: Sequence[Sequence[Sequence[Any]]]) -> np.ndarray:
    keys = [
        f"{group.group.prompt.uid}_{trajectory}_{number}"
        for group, of_group in zip(groups, outputs, strict=True)
        for trajectory, rows in enumerate(of_group)
        for number in range(len(rows))
    ]
    return np.array(keys, dtype=object)


def _expanded(rows: Sequence[Runs], length: int) -> torch.Tensor:
    """Return the version of each token, int64 (rows, length), expanded from the run lengths in ``rows``.

    Positions after the end of a row have the version `NOT_SAMPLED`.
    """
    # Allocate with torch: NumPy requests huge pages, which takes several times as long if memory is fragmented.
    column = torch.empty((len(rows), length), dtype=torch.int64)
    for row, runs in zip(column.numpy(), rows, strict=True):
        begin = 0
        for version, count in runs:
            row[begin : begin + count] = version
            begin += count
        if begin > length:
            raise VersionRecordError(f"a response of {length} tokens has versions for {begin} tokens")
        row[begin:] = NOT_SAMPLED
    return column


def _sample_fields(groups: Sequence[GroupRun], counts: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the data set's fields as columns. ``counts`` has the number of rows of each group."""
    samples = [sample_of(group.row, group.group) for group in groups]
    rows = [sample for sample, count in zip(samples, counts, strict=True) for _ in range(count)]
    keys = dict.fromkeys(key for sample in samples for key in sample)
    return {key: np.fromiter((row.get(key) for row in rows), dtype=object, count=len(rows)) for key in keys}


def staleness_metrics(batch: DataProto, version: int, bound: int) -> dict[str, float]:
    """Return metrics of the ages of a batch's sampled tokens when it is trained at ``version``.

    A token's age is ``version`` minus the version that sampled it. The metrics include the age of the oldest token, the
    mean age of tokens, and verl's statistics over trajectories, for which each row counts as a trajectory.

    Raises:
        StalenessViolation: a token is older than ``bound``. The batch must not be trained.
        VersionRecordError: a token was sampled by a later version than ``version``.
    """
    of_rows = enumerate(batch.non_tensor_batch[VERSION_RUNS])
    runs = [(row, *run) for row, runs in of_rows for run in runs if run[0] != NOT_SAMPLED]
    row, sampled_by, counts = np.array(runs, dtype=np.int64).reshape(-1, 3).T
    ages = version - sampled_by
    if (ages < 0).any():
        raise VersionRecordError(f"tokens sampled by version {sampled_by.max()} cannot be trained at version {version}")
    # `oldest` and `newest` are the ages of each row's oldest and newest token, or 0 if no token was sampled.
    oldest = np.zeros(len(batch), np.int64)
    np.maximum.at(oldest, row, ages)
    newest = oldest.copy()
    np.minimum.at(newest, row, ages)
    if oldest.max() > bound:
        late = (version - oldest[oldest > bound]).tolist()
        raise StalenessViolation(
            f"{len(late)} trajectories cannot be trained at version {version}, because they have tokens from versions "
            f"{sorted(set(late))}: tokens may be at most async_training.max_staleness={bound} versions old"
        )
    spans = oldest - newest
    return {
        "fully_async/staleness/oldest_token_max": int(oldest.max()),
        "fully_async/staleness/token_mean": int(ages @ counts) / max(1, int(counts.sum())),
        "fully_async/staleness/bound": bound,
        "fully_async/sampled_tokens": int(counts.sum()),
        "fully_async/count/stale_trajectory_processed": int((newest > 0).sum()),
        "fully_async/partial/total_partial_num": int((spans > 0).sum()),
        "fully_async/partial/partial_ratio": float((spans > 0).mean()),
        "fully_async/partial/max_partial_span": int(spans.max()),
        "fully_async/partial/inexact_version_ratio": 1.0 - float(np.mean(batch.non_tensor_batch["exact_versions"])),
        **_of_agents(batch),
        **_of_all("trajectory_spans", spans + 1),
        **_of_all("trajectory_staleness", newest),
        **_of_all("trajectory_staleness_worst", oldest),
    }


def _of_agents(batch: DataProto) -> dict[str, float]:
    """Return a metric, the mean of `UNMATCHED_SHARE` over the rows that have it; {} if no row has it.

    An agent sends earlier answers of the policy back in later requests, and may have changed them. The share is the
    part of these answers whose sampled tokens cannot be used again, because the text no longer matches them.
    """
    shares = [share for share in batch.non_tensor_batch.get(UNMATCHED_SHARE, ()) if share is not None]
    return {"agents/unmatched_share": float(np.mean(shares))} if shares else {}


def _of_all(name: str, values: np.ndarray) -> dict[str, float]:
    """Return the mean, maximum and minimum over ``values`` (one per row), named as in verl's v1 trainers."""
    prefix = f"training/off_policy/{name}"
    return {
        f"{prefix}/mean": float(values.mean()),
        f"{prefix}/max": int(values.max()),
        f"{prefix}/min": int(values.min()),
    }


def mask_off_policy(batch: DataProto, version: int, limit: int) -> dict[str, float]:
    """Set the advantages of tokens that were sampled more than ``limit`` versions before ``version`` to 0, in place.

    These tokens thus have no policy gradient. They stay in ``response_mask``, because verl's mean over a mini-batch
    with an empty mask would be NaN (core_algos.py:1175). The returned metrics are the number of these tokens,
    and their share of the tokens in ``response_mask``.
    """
    versions = batch.batch[TOKEN_VERSIONS]
    old = (versions != NOT_SAMPLED) & (versions < version - limit) & batch.batch["response_mask"].bool()
    batch.batch["advantages"] = batch.batch["advantages"].masked_fill(old, 0.0)
    masked, total = int(old.sum()), int(batch.batch["response_mask"].sum())
    return {
        "fully_async/off_policy/masked_tokens": masked,
        "fully_async/off_policy/masked_ratio": masked / total if total else 0.0,
    }


def token_ages(batch: DataProto, version: int) -> dict[int, int]:
    """Return the number of sampled tokens of each age, in versions, when the batch is trained at ``version``."""
    ages: Counter[int] = Counter()
    for runs in batch.non_tensor_batch[VERSION_RUNS]:
        for sampled_by, count in runs:
            if sampled_by != NOT_SAMPLED:
                ages[version - sampled_by] += count
    return dict(ages)
