# SPDX-License-Identifier: Apache-2.0
"""A trainer that kills one process of its run (SIGKILL) around a switch of its accelerators, once.

Environment variables: ``DRILL_PART`` names the process ("trainer", "hybrid" or "standalone", for the server of such a
replica), ``DRILL_SWITCH`` the number of the switch, ``DRILL_PHASE`` the moment ("wake", "lent" or "sleep"), and
``DRILL_DONE`` a file that is written at the kill.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import ray

from recipe.async_engine.trainer.base import AsyncPPOTrainer
from recipe.async_engine.weights.replica_set import generates

DURING_S, LENT_S = 0.02, 0.5


def pid(actor: Any) -> int:
    return os.getpid()


class LendingDrill(AsyncPPOTrainer):
    switches = 0

    def _next_groups(self) -> Any:
        if self.hybrid is not None and not hasattr(self.hybrid.wake, "__wrapped__"):
            self.hybrid.wake = self._drilled(self.hybrid.wake, "wake")
            self.hybrid.spread = self._drilled(self.hybrid.spread, "lent")
            self.hybrid.sleep = self._drilled(self.hybrid.sleep, "sleep")
        return super()._next_groups()

    def _drilled(self, act: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @wraps(act)
        def drilled(*arguments: Any, **named: Any) -> Any:
            self.switches += phase == "wake"
            done = Path(os.environ["DRILL_DONE"])
            if (
                self.switches == int(os.environ["DRILL_SWITCH"])
                and os.environ["DRILL_PHASE"] == phase
                and not done.exists()
            ):
                victim = self._victim()
                done.write_text(f"{os.environ['DRILL_PART']} {phase} at step {self.global_steps}")
                wait_s = LENT_S if phase == "lent" else DURING_S
                threading.Timer(wait_s, os.kill, (victim, signal.SIGKILL)).start()
            return act(*arguments, **named)

        return drilled

    def _victim(self) -> int:
        if os.environ["DRILL_PART"] == "trainer":
            return os.getpid()
        assert self.hybrid is not None
        publisher = self.hybrid if os.environ["DRILL_PART"] == "hybrid" else self.publisher
        replica = next(replica for replica in publisher.replicas if generates(replica))
        return int(ray.get(replica.server_handle.__ray_call__.remote(pid), timeout=30))
