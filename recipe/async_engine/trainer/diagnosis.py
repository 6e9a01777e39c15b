# SPDX-License-Identifier: Apache-2.0
"""Describes in words what each process of a run is doing or waiting for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from recipe.async_engine.actors.stacks import answers, thread_stack
from recipe.async_engine.weights.replica_set import generates

DEEPEST = 14


def describe(trainer: Any, thread: int) -> str:
    """Return a report on the processes of an `AsyncPPOTrainer`.

    ``thread`` is the id of the training loop's thread. Processes that do not answer come first, because they are the
    most likely cause of a problem. If the run is still starting, the report is only on the trainer's own process.
    """
    said = answers(_asked(trainer))
    notes = [f"{what}, {ago:.0f} s ago" for what, ago in trainer.timeline.notes()[:6]]
    lines = [
        f"at step {trainer.global_steps}, version {trainer.ledger.version}; generating: {trainer.ledger.announced}",
        *(f"{name} {answer}" for name, answer in said.items() if isinstance(answer, str)),
        f"newest events: {'; '.join(notes)}",
        f"groups: {trainer.ledger.counts()}",
        *_section("the trainer's thread, innermost last", thread_stack(thread)[-DEEPEST:]),
    ]
    if trainer.scheduler is not None:
        lines += _section("the rollout scheduler", trainer.scheduler.describe())
    for name, answer in said.items():
        if not isinstance(answer, str):
            lines += _section(name, answer)
    return "\n".join(lines)


def _asked(trainer: Any) -> dict[str, Any]:
    """Ask each process what it does; return the object references of the answers, by the name of the process."""
    if not trainer.is_up:
        return {}

    def alive(actor: Any) -> list[str]:
        return ["it answers"]

    asked = {}
    for number, worker in enumerate(trainer.async_rollout_manager.agent_loop_workers):
        asked[f"agent-loop worker {number}"] = worker.describe.remote()
    for replica in (replica for publisher in trainer.publishers() for replica in publisher.replicas):
        kind = "rollout server" if generates(replica) else "log-prob server"
        for server in replica.servers:
            asked[f"{kind} {replica.replica_rank}"] = server.describe.remote()
        for rank, worker in enumerate(replica.workers):
            asked[f"weight receiver {rank} of {kind} {replica.replica_rank}"] = worker.__ray_call__.remote(alive)
    for key, servers in trainer.teachers.server_handles.items() if trainer.teachers is not None else ():
        for number, server in enumerate(servers):
            asked[f"server {number} of teacher {key}"] = server.describe.remote()
    for number, worker in enumerate(trainer.reward_loop_manager.reward_loop_workers):
        asked[f"reward worker {number}"] = worker.describe.remote()
    for name, actor in trainer.irreplaceable_actors().items():
        asked[name] = actor.__ray_call__.remote(alive)
    return asked


def _section(title: str, lines: Iterable[str]) -> list[str]:
    return [f"{title}:", *(f"    {line}" for line in lines)]
