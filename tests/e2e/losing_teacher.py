# SPDX-License-Identifier: Apache-2.0
"""A trainer that sends a signal to its teacher's server at step 3; LOSING_TEACHER is the signal's number."""

from __future__ import annotations

import os
from typing import Any

import ray
from losing import LOST_AT, pid

from recipe.async_engine.trainer.base import AsyncPPOTrainer


class Losing(AsyncPPOTrainer):
    def _next_groups(self) -> Any:
        if self.global_steps == LOST_AT:
            assert self.teachers is not None
            (server,) = self.teachers.server_handles["default"]
            os.kill(ray.get(server.__ray_call__.remote(pid)), int(os.environ["LOSING_TEACHER"]))
        return super()._next_groups()
