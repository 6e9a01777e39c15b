# SPDX-License-Identifier: Apache-2.0
"""Trainers that kill their first agent-loop worker in a batch of step ``LOST_AT``, while answers are in progress.

At step ``WAITS_AT`` they wait until it is up again. Validation is due in between.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from recording import pid_of
from replacing import wait_for_agents

from recipe.async_engine.trainer.base import AsyncPPOTrainer

LOST_AT, WAITS_AT = 4, 7
# Answers take about two seconds.
MIDWAY_S = 1.0
LOSE_S = 60.0


class LosingAgents(AsyncPPOTrainer):
    """A trainer that loses an agent-loop worker."""

    def _next_groups(self) -> Any:
        if self.global_steps == LOST_AT:
            threading.Thread(target=self._lose, daemon=True).start()
        if self.global_steps == WAITS_AT:
            wait_for_agents(self.scheduler._pool)
        return super()._next_groups()

    def _lose(self) -> None:
        pid = pid_of(self.async_rollout_manager.agent_loop_workers[0])
        time.sleep(MIDWAY_S)
        deadline = time.monotonic() + LOSE_S
        # A batch may be complete, and a worker that dies without an answer of the trainer's is not missed.
        while not self.scheduler._pool.load["worker-0"] and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
