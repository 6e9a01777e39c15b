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
"""A finished trajectory on its way from worker to trainer.

Contract: :func:`unpack` gives back what :func:`pack` took. In between, tensors are NumPy arrays over the same memory:
Ray ships those without copying, while each pickled tensor costs a serialisation of its own on both sides. Shown by
tests/integration/test_agent_worker.py.
"""

from typing import Any

import numpy as np
import torch


def pack(output: Any) -> Any:
    """A copy of verl's padded trajectory (a pydantic model) whose tensor fields are arrays."""
    arrays = {name: value.numpy() for name, value in vars(output).items() if isinstance(value, torch.Tensor)}
    return output.model_copy(update=arrays)


def unpack(packed: Any) -> Any:
    """The trajectory with tensor fields again; they own their memory, since Ray's is read-only."""
    tensors = {
        name: torch.from_numpy(np.array(value)) for name, value in vars(packed).items() if isinstance(value, np.ndarray)
    }
    return packed.model_copy(update=tensors)
