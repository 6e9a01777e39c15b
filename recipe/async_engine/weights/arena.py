# SPDX-License-Identifier: Apache-2.0
"""Puts many tensors into one contiguous allocation of host memory, without more memory than they need.

torch's allocator of pinned memory rounds each allocation up to a power of two (ATen/core/CachingHostAllocator.h:305),
so the 339 tensors of a 7B model (14.2 GiB) would take 27.0 GiB. This module pins one ordinary allocation instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

ALIGNMENT = 64
"""Alignment of each tensor in the allocation, in bytes."""

Form = tuple[torch.Size, torch.dtype]


def in_one_piece(forms: Sequence[Form], pinned: bool) -> list[torch.Tensor]:
    """Return uninitialized tensors with these shapes and dtypes, all in one allocation.

    With ``pinned`` the memory is registered with the driver, so that an accelerator can copy it asynchronously.
    """
    begins, end = [], 0
    for shape, dtype in forms:
        begins.append(end)
        size = shape.numel() * dtype.itemsize
        end += size + -size % ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8)
    if pinned and end:
        pin_memory(memory.data_ptr(), end)
        # Unregister the memory before it is freed. It is freed when no tensor uses the shared storage any more.
        weakref.finalize(memory.untyped_storage(), unpin_memory, memory.data_ptr())
    return [
        memory[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for begin, (shape, dtype) in zip(begins, forms, strict=True)
    ]


def settle() -> None:
    """Wait for the work that this thread has queued on its accelerator, such as copies to host memory.

    This does not wait for the device's other streams, on which another version may be in transfer.
    """
    if torch.accelerator.is_available():
        torch.accelerator.current_stream().synchronize()
