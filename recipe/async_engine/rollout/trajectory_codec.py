# SPDX-License-Identifier: Apache-2.0
"""Packs a finished trajectory into one array of bytes, which its agent-loop worker sends to the trainer.

A trajectory has the outputs of its agent loop: one, or several if the loop returned a list. Each output becomes a row
of the batch.

Contract: :func:`unpack` returns what :func:`pack` was given, without the fields that nobody reads or that the trainer
already has. The unpacked tensors are views of the array, and the array is a view of Ray's object store, so the trainer
copies a trajectory only once, into its batch. One array is used because the trainer fetches hundreds of trajectories
in a step, and Ray takes several times as long for an object with several arrays (benchmarks/bookkeeping.py). Shown by
tests/integration/test_trajectory_worker.py.
"""

import pickle
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from ray import cloudpickle

ALIGNED = 64
"""Alignment in bytes of each tensor's data in the packed array, the same as in Ray's object store."""
UNREAD = ("multi_modal_data", "mm_processor_output")
"""Fields that `pack` drops. The model's inputs are computed from them, and a finished trajectory has these inputs."""
RAW_PROMPT = "raw_prompt"
"""Extra field with the prompt. `pack` drops it, because the trainer has the prompt in the data row."""

# torch warns about tensors in read-only memory. `unpack` makes such tensors on purpose, and nothing writes to them.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def pack(outputs: Sequence[Any]) -> np.ndarray:
    """Return the padded outputs of a trajectory (verl's pydantic model) as one uint8 array of shape (bytes,).

    The values in the outputs' ``extra_fields`` can be anything that cloudpickle can pickle.
    """
    kept = [_with_arrays(output) for output in outputs]
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


def unpack(packed: np.ndarray | bytes) -> list[Any]:
    """Return the outputs that :func:`pack` packed, with tensors that are views of ``packed``.

    Unpickling can run code, so ``packed`` must come from a trusted source. Checkpoints of earlier versions of this
    package can be unpacked too: there ``packed`` may be a bytes object, and it may contain a single output instead of a
    list.
    """
    outputs = pickle.loads(packed) if isinstance(packed, bytes) else _loaded(packed)
    return [_with_tensors(output) for output in (outputs if isinstance(outputs, list) else [outputs])]


def _with_arrays(output: Any) -> Any:
    arrays = {name: _as_array(value) for name, value in vars(output).items() if isinstance(value, torch.Tensor)}
    inputs = output.multi_modal_inputs
    return output.model_copy(
        update={
            **arrays,
            **{name: None for name in UNREAD if name in vars(output)},
            "multi_modal_inputs": inputs and {name: _as_array(value) for name, value in inputs.items()},
            "extra_fields": {name: value for name, value in output.extra_fields.items() if name != RAW_PROMPT},
        }
    )


def _with_tensors(output: Any) -> Any:
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
    """Return a tensor as a NumPy array, and any other value unchanged.

    A bfloat16 tensor is also returned unchanged, because NumPy has no such dtype.
    """
    if not isinstance(value, torch.Tensor) or value.dtype is torch.bfloat16:
        return value
    return np.ascontiguousarray(value.numpy(force=True))


def _as_tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
