# SPDX-License-Identifier: Apache-2.0
"""Assembles a training batch from the trajectories of its groups, and measures the batch's staleness.

Contract: the batch has the columns of verl's synchronous trainer (prompts, responses, masks, ``rollout_log_probs``,
``rm_scores``, the data set's own fields, ``uid`` of the group) and the column ``token_versions``. The rows are in the
order of the groups, with a group's answers together, unless verl balances the batch. Every sampled token is checked
against the staleness bound before it is trained. An answer is copied only once, into its row. Until ``token_versions``
is made, the versions of an answer's tokens are run-length encoded, as runs (version, count). Shown by
tests/integration/test_batch.py and tests/e2e/test_fully_async.py.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from verl import DataProto

from recipe.async_engine.core.columns import OF_THE_BATCH, TOKEN_VERSIONS, UNMATCHED_SHARE, VERSION_RUNS
from recipe.async_engine.core.errors import StalenessViolation, VersionRecordError
from recipe.async_engine.core.versions import NOT_SAMPLED, Runs
from recipe.async_engine.rollout.group_run import GroupRun
from recipe.async_engine.rollout.prompts import sample_of


def assemble(
    groups: Sequence[GroupRun],
    outputs: Sequence[Sequence[Any]],
    postprocess: Callable[[list[Any]], DataProto],
    order: Sequence[int] | None = None,
) -> DataProto:
    """Put the trajectories of ``groups`` into one batch.

    Args:
        outputs: the fetched trajectories of each group.
        postprocess: verl's function that joins padded trajectories (``AgentLoopWorker._postprocess``).
        order: for each row of the batch, the index of its trajectory. None keeps the order of the groups.
    """
    in_groups = [output for group_outputs in outputs for output in group_outputs]
    order = range(len(in_groups)) if order is None else order
    rows = [in_groups[number] for number in order]
    batch = postprocess(rows)
    length = batch.batch["responses"].shape[1]
    batch.batch[TOKEN_VERSIONS] = _expanded([row.extra_fields[VERSION_RUNS] for row in rows], length)
    for key, values in _sample_fields(groups, outputs).items():
        if key not in batch.non_tensor_batch and key not in OF_THE_BATCH:
            batch.non_tensor_batch[key] = values[order]
    return batch


def balanced(
    groups: Sequence[GroupRun], outputs: Sequence[Sequence[Any]], balance: Callable[[DataProto], None]
) -> list[int]:
    """Return the indices of all trajectories in an order in which each rank gets about the same number of tokens.

    verl chooses the order. Because verl would copy the whole batch, it gets a stand-in to reorder, which has only the
    lengths and indices of the rows.

    Args:
        outputs: the trajectories of each group.
        balance: verl's function that reorders a batch in place (``RayPPOTrainer._balance_batch``).
    """
    lengths = [int(row.attention_mask.sum()) for rows in outputs for row in rows]
    uids = [group.group.prompt.uid for group, rows in zip(groups, outputs, strict=True) for _ in rows]
    stand_in = DataProto.from_dict(
        tensors={"attention_mask": torch.tensor(lengths)[:, None], "row": torch.arange(len(lengths))},
        non_tensors={"uid": np.array(uids, dtype=object)},
    )
    balance(stand_in)
    order: list[int] = stand_in.batch["row"].tolist()
    return order


def _expanded(rows: Sequence[Runs], length: int) -> torch.Tensor:
    """Return the version of each token, int64 (rows, length), from each row's runs, padded with `NOT_SAMPLED`."""
    # Allocate with torch: NumPy requests huge pages, which takes several times as long if memory is fragmented.
    column = torch.empty((len(rows), length), dtype=torch.int64)
    for row, runs in zip(column.numpy(), rows, strict=True):
        begin = 0
        for version, count in runs:
            row[begin : begin + count] = version
            begin += count
        if begin > length:
            raise VersionRecordError(f"a response of {length} tokens has versions of {begin} tokens")
        row[begin:] = NOT_SAMPLED
    return column


def _sample_fields(groups: Sequence[GroupRun], outputs: Sequence[Sequence[Any]]) -> dict[str, np.ndarray]:
    samples = [sample_of(group.row, group.group) for group in groups]
    rows = [sample for sample, answers in zip(samples, outputs, strict=True) for _ in answers]
    keys = dict.fromkeys(key for sample in samples for key in sample)
    return {key: np.fromiter((row.get(key) for row in rows), dtype=object, count=len(rows)) for key in keys}


def staleness_metrics(batch: DataProto, version: int, bound: int) -> dict[str, float]:
    """Return metrics of the ages of a batch's sampled tokens when it is trained at ``version``.

    A token's age is ``version`` minus the version that sampled it. The metrics include the age of the oldest token, the
    mean age of tokens, and verl's statistics over trajectories. Ratios are shares of the trajectories.

    Raises:
        StalenessViolation: a token is older than ``bound``. The batch must not be trained.
        VersionRecordError: a token was sampled by a later version than ``version``.
    """
    of_rows = enumerate(batch.non_tensor_batch[VERSION_RUNS])
    runs = [(row, *run) for row, runs in of_rows for run in runs if run[0] != NOT_SAMPLED]
    row, sampled_by, counts = np.array(runs, dtype=np.int64).reshape(-1, 3).T
    ages = version - sampled_by
    if (ages < 0).any():
        raise VersionRecordError(f"tokens of version {sampled_by.max()} cannot be trained at version {version}")
    # `oldest` and `newest` are the ages of each trajectory's oldest and newest token, or 0 if no token was sampled.
    oldest = np.zeros(len(batch), np.int64)
    np.maximum.at(oldest, row, ages)
    newest = oldest.copy()
    np.minimum.at(newest, row, ages)
    if oldest.max() > bound:
        late = (version - oldest[oldest > bound]).tolist()
        raise StalenessViolation(
            f"{len(late)} trajectories have tokens more than async_training.max_staleness={bound} versions old at "
            f"version {version}, sampled by the versions {sorted(set(late))}"
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
    """Return the share of answers that agents sent back in another form than the policy had given them."""
    shares = [share for share in batch.non_tensor_batch.get(UNMATCHED_SHARE, ()) if share is not None]
    return {"agents/unmatched_share": float(np.mean(shares))} if shares else {}


def _of_all(name: str, values: np.ndarray) -> dict[str, float]:
    """Return mean, maximum and minimum of ``values`` over the trajectories, under the names of verl's v1 trainers."""
    prefix = f"training/off_policy/{name}"
    return {
        f"{prefix}/mean": float(values.mean()),
        f"{prefix}/max": int(values.max()),
        f"{prefix}/min": int(values.min()),
    }


def mask_off_policy(batch: DataProto, version: int, limit: int) -> dict[str, float]:
    """Set the advantages of tokens that were sampled more than ``limit`` versions before ``version`` to 0, in place.

    These tokens thus have no policy gradient. They stay in ``response_mask``, because verl's mean over a mini-batch
    with an empty mask would be NaN (core_algos.py:1175). The result has
    the number of these tokens, and their share of the tokens in ``response_mask``, as metrics.
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
