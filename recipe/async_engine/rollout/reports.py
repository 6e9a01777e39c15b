# SPDX-License-Identifier: Apache-2.0
"""What rewards report beside their score, as columns of a batch.

Contract: a batch has a column for whatever the reward of any of its answers reported. verl takes the names of the first
row, and fails where another one lacks them or is of a worker that has others. A name that is taken, by a column of
verl's, of the data or of an agent loop, is carried with `OTHER_NAME` before it. Shown by
tests/integration/test_trajectory_worker.py and test_validation.py.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

from recipe.async_engine.core.columns import OTHER_NAME, REPORTED, TAKEN

SCORE = "reward"
"""The name that verl's validation has the score itself by."""


def joined(worker: Any, outputs: list[Any]) -> DataProto:
    """Join trajectories as verl's ``AgentLoopWorker._postprocess`` does, with their reports in the column `REPORTED`.

    ``worker``: stands for one of verl's; no state of it is used.
    """
    reports = [output.extra_fields.pop(REPORTED, {}) for output in outputs]
    batch = AgentLoopWorker._postprocess(worker, outputs)
    batch.non_tensor_batch[REPORTED] = np.fromiter(reports, dtype=object)
    return batch


def reported_names(batch: DataProto) -> dict[str, None]:
    """What any reward of the batch reported, in the order of the rows."""
    return dict.fromkeys(name for report in batch.non_tensor_batch[REPORTED] for name in report or ())


def spread_reports(batch: DataProto, names: Iterable[Any], validation: bool = False) -> None:
    """Give each of these names its column, as verl's trainers expect it.

    A row whose reward did not report it has None, which verl's validation leaves out of its means.
    """
    taken = {*batch.batch.keys(), *batch.non_tensor_batch, *TAKEN, *([SCORE] if validation else [])}
    columns = []
    for name in names:
        column = str(name)
        while column in taken:
            column = f"{OTHER_NAME}{column}"
        taken.add(column)
        columns.append(column)
        values = [None if report is None else report.get(name) for report in batch.non_tensor_batch[REPORTED]]
        are_numbers = all(isinstance(value, bool | int | float | np.number) for value in values)
        batch.non_tensor_batch[column] = np.array(values) if are_numbers else np.fromiter(values, dtype=object)
    if "rm_scores" in batch.batch:
        batch.meta_info["reward_extra_keys"] = columns
