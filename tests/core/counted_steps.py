# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of a call, independently of the machine, by the lines of Python that it executes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


def steps_of(call: Callable[[], Any]) -> int:
    """Return the lines that ``call`` executes, without garbage collection, whose finalizers would count too."""
    lines = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return lines
