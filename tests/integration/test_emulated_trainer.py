# SPDX-License-Identifier: Apache-2.0
"""What an emulated trainer makes of verl's batches; that it takes its device's time, tests/e2e/test_fully_async.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils

from benchmarks.emulation.trainer import least, lengths

LENGTHS = [3, 5, 2, 4]


def batch(**settings: Any) -> TensorDict:
    ids = torch.nested.as_nested_tensor([torch.arange(length) for length in LENGTHS], layout=torch.jagged)
    data = TensorDict({"input_ids": ids, "dense": torch.arange(4)}, batch_size=[4])
    tensordict_utils.assign_non_tensor(data, **settings)
    return data


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"use_dynamic_bsz": True, "max_token_len_per_gpu": 9}, 1),
        ({"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}, 2),
    ],
)
def test_update_without_arithmetic_is_of_as_few_sequences_as_verl_takes_at_once(
    settings: dict[str, Any], count: int
) -> None:
    whole = batch(**settings)
    few = least(whole)
    assert (lengths(whole), lengths(few)) == (LENGTHS, LENGTHS[:count])
    assert few["dense"].tolist() == list(range(count))
    for name, value in settings.items():
        assert tensordict_utils.get_non_tensor_data(data=few, key=name, default=None) == value
