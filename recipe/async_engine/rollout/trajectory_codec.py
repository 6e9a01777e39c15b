# SPDX-License-Identifier: Apache-2.0
"""The form of a finished trajectory on its way from its worker to the trainer.

Contract: :func:`unpack` returns what :func:`pack` was given, without the fields that nobody reads or that the trainer
has already. In transit, the trajectory is one NumPy array of bytes. Ray gives the trainer such an array as a view of
the object store, and the trajectory's tensors are views of the array, so the trainer's process copies an answer only
once, into its batch. The trainer fetches hundreds of trajectories a step, and Ray takes several times as long for an
object with several arrays (benchmarks/bookkeeping.py).

Shown by tests/integration/test_trajectory_worker.py.
"""

import pickle
import warnings
from typing import Any

import numpy as np
import torch
from ray import cloudpickle

ALIGNED = 64
"""Alignment in bytes of each array in the packed trajectory, the same as in Ray's object store."""
UNREAD = ("multi_modal_data", "mm_processor_output")
"""Fields that are dropped, because only the model's inputs are computed from them."""
RAW_PROMPT = "raw_prompt"
"""The extra field that is dropped, because the trainer has it in the prompt's row, once for all answers."""

# `unpack` makes tensors of read-only memory on purpose. Nothing writes to these tensors.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def pack(output: Any) -> np.ndarray:
    """Return verl's padded trajectory, a pydantic model, as a uint8 array of shape (bytes,).

    Extra fields may have any value that cloudpickle can pickle.
    """
    arrays = {name: _as_array(value) for name, value in vars(output).items() if isinstance(value, torch.Tensor)}
    inputs = output.multi_modal_inputs
    kept = output.model_copy(
        update={
            **arrays,
            **{name: None for name in UNREAD if name in vars(output)},
            "multi_modal_inputs": inputs and {name: _as_array(value) for name, value in inputs.items()},
            "extra_fields": {name: value for name, value in output.extra_fields.items() if name != RAW_PROMPT},
        }
    )
    buffers: list[pickle.PickleBuffer] = []
    stream = cloudpickle.dumps(kept, protocol=5, buffer_callback=buffers.append)
    parts = [np.frombuffer(part, np.uint8) for part in (stream, *(buffer.raw() for buffer in buffers))]
    sizes = np.array([len(parts), *(len(part) for part in parts)], np.int64).view(np.uint8)
    packed = np.zeros(_end(sizes) + sum(_end(part) for part in parts), np.uint8)
    begin = 0
    for part in (sizes, *parts):
        packed[begin : begin + len(part)] = part
        begin += _end(part)
    return packed


def unpack(packed: np.ndarray | bytes) -> Any:
    """Return the packed trajectory, with tensors that are views of ``packed``.

    ``packed`` is trusted like the code, because it is unpickled. Checkpoints of earlier versions of this package have
    bytes instead of an array.
    """
    output = pickle.loads(packed) if isinstance(packed, bytes) else _loaded(packed)
    tensors = {name: _as_tensor(value) for name, value in vars(output).items()}
    inputs = output.multi_modal_inputs
    tensors["multi_modal_inputs"] = inputs and {name: _as_tensor(value) for name, value in inputs.items()}
    return output.model_copy(update=tensors)


def _loaded(packed: np.ndarray) -> Any:
    count = int(packed[:8].view(np.int64)[0])
    sizes = packed[8 : 8 + 8 * count].view(np.int64).tolist()
    begin, parts = _up(8 + 8 * count), []
    for size in sizes:
        parts.append(packed[begin : begin + size])
        begin += _up(size)
    return pickle.loads(parts[0], buffers=parts[1:])


def _end(part: np.ndarray) -> int:
    return _up(len(part))


def _up(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _as_array(value: Any) -> Any:
    """Return a tensor as an array, and any other value, or a tensor of a dtype that NumPy lacks, unchanged."""
    if not isinstance(value, torch.Tensor) or value.dtype is torch.bfloat16:
        return value
    return np.ascontiguousarray(value.numpy(force=True))


def _as_tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
