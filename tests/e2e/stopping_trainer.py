# SPDX-License-Identifier: Apache-2.0
"""A trainer that stops a process with SIGSTOP at the beginning of step ``STOP_AT_STEP``: that of ``STOP_PART``.

``STOP_PID_FILE``: file to which the process's id is written.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import ray

from recipe.async_engine.trainer.base import AsyncPPOTrainer


class StoppingTrainer(AsyncPPOTrainer):
    def _train(self, groups: list[Any]) -> Any:
        if self.global_steps == int(os.environ["STOP_AT_STEP"]):
            replica = self.publisher.replicas[0]
            actor = {"server": replica.servers[0], "receiver": replica.workers[0]}[os.environ["STOP_PART"]]
            pid = ray.get(actor.__ray_call__.remote(lambda actor: os.getpid()), timeout=30)
            Path(os.environ["STOP_PID_FILE"]).write_text(str(pid))
            os.kill(pid, signal.SIGSTOP)
        return super()._train(groups)
