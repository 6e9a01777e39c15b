# SPDX-License-Identifier: Apache-2.0
"""A finished trajectory as it travels from its worker to the trainer.

Contract: :func:`unpack` gives back what :func:`pack` took. In between it is one `bytes`, which Ray hands over as it is:
the trainer fetches hundreds of trajectories a step, and Ray's own way of an object with several arrays costs it several
times as much for each (benchmarks/bookkeeping.py). Tensors are pickled as NumPy arrays, since each pickled tensor costs
a serialisation of its own on both sides. Shown by tests/integration/test_trajectory_worker.py.
"""

import pickle
from typing import Any

import numpy as np
import torch
from ray import cloudpickle


def pack(output: Any) -> bytes:
    """verl's padded trajectory (a pydantic model), in bytes; extra fields may hold whatever cloudpickle takes."""
    arrays = {name: value.numpy() for name, value in vars(output).items() if isinstance(value, torch.Tensor)}
    return cloudpickle.dumps(output.model_copy(update=arrays), protocol=5)


def unpack(packed: bytes) -> Any:
    """The trajectory again. ``packed`` comes from a worker of the same Ray cluster; its tensors own their memory."""
    output = pickle.loads(packed)
    tensors = {name: torch.from_numpy(value) for name, value in vars(output).items() if isinstance(value, np.ndarray)}
    return output.model_copy(update=tensors)
