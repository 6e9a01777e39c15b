# SPDX-License-Identifier: Apache-2.0
"""A trainer that kills one process of its run (SIGKILL) in one phase of one step, once.

Environment variables: ``DRILL_PART`` names the process, ``DRILL_PHASE`` the phase ("before batch", "during sync",
"after checkpoint" and so on), ``DRILL_STEP`` the step, and ``DRILL_DONE`` a file that is written at the kill. The file
says what was killed and when, and where the run was by its ledger and its checkpoints; while it exists nothing is
killed again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from recording import pid_of

from recipe.async_engine.trainer import checkpoints
from recipe.async_engine.trainer.base import AsyncPPOTrainer
from recipe.async_engine.weights.replica_set import generates

DURING_S = 0.01


def engine_core(server: Any) -> int:
    """Return the process id of a rollout server's engine or, if workers are forks, of the fork's launcher."""

    def pid(server: Any) -> int:
        if hasattr(server, "engine"):
            return server.engine.engine_core.resources.engine_manager.processes[0].pid
        # SGLang starts its scheduler first, then its detokenizer.
        return min(multiprocessing.active_children(), key=lambda process: process.name).pid

    return ray.get(server.__ray_call__.remote(pid), timeout=30)


class DrillTrainer(AsyncPPOTrainer):
    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._kill_if(f"before {name}")
        ended = threading.Event()
        # Look it up before the phase, in which its process may not answer.
        if self._kill_due(f"during {name}"):
            pid = self._pid()
            threading.Timer(DURING_S, lambda: ended.is_set() or self._kill(pid, f"during {name}")).start()
        try:
            yield
        finally:
            ended.set()
        self._kill_if(f"after {name}")

    def _kill_due(self, phase: str) -> bool:
        due = os.environ["DRILL_PHASE"] == phase and self.global_steps == int(os.environ["DRILL_STEP"])
        return due and not Path(os.environ["DRILL_DONE"]).exists()

    def _kill_if(self, phase: str) -> None:
        if self._kill_due(phase):
            self._kill(self._pid(), phase)

    def _kill(self, pid: int, phase: str) -> None:
        counts = self.scheduler.counts()
        place = {"version": self.ledger.version, "taken": counts.taken, "trained": counts.trained}
        folder = checkpoints.folder_of(self.config.trainer.default_local_dir, self.global_steps)
        place["saved"] = checkpoints.problem(folder) is None
        said = {"part": os.environ["DRILL_PART"], "phase": phase, "step": self.global_steps, "place": place}
        Path(os.environ["DRILL_DONE"]).write_text(json.dumps(said))
        os.kill(pid, signal.SIGKILL)

    def _pid(self) -> int:
        replicas = [replica for replica in self.publisher.replicas if generates(replica)]
        find: dict[str, Callable[[], int]] = {
            "trainer": os.getpid,
            "training worker": lambda: pid_of(self.actor_rollout_wg.workers[0]),
            "rollout server": lambda: pid_of(replicas[0].servers[0]),
            "weight receiver": lambda: pid_of(replicas[0].workers[0]),
            "engine core": lambda: engine_core(replicas[0].servers[0]),
            "agent-loop worker": lambda: pid_of(self.async_rollout_manager.agent_loop_workers[0]),
            "reward worker": lambda: pid_of(self.reward_loop_manager.reward_loop_workers[0]),
            "log-prob server": lambda: pid_of(self.publisher.servers[0].servers[0]),
            "log-prob worker": lambda: pid_of(self.publisher.servers[0].workers[0]),
        }
        return find[os.environ["DRILL_PART"]]()

    def _train(self, groups: list[Any]) -> Any:
        with self._phase("batch"):
            return super()._train(groups)

    def _publish(self) -> None:
        with self._phase("sync"):
            super()._publish()

    def _save_checkpoint(self) -> None:
        with self._phase("checkpoint"):
            super()._save_checkpoint()
            self.saving.finish()
