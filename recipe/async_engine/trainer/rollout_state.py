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
"""The rollout side of a checkpoint: ledger, prompt position and live groups.

Contract: one file holds all three as of one moment, is written beside the model before the checkpoint is committed
(``checkpoints``), and appears whole or not at all. After loading it, ready groups are trained as they are, running ones
are generated again (or go on, where the snapshot has what they keep), and no other prompt is affected; `take_up` adds
what the ledger's journal says of the time after the checkpoint. It is read back with ``torch.load`` in its pickling
form: checkpoints are trusted like the code (verl's own ``data.pt`` is the same).
Shown by tests/integration/test_rollout_state.py and tests/e2e/test_faults.py.
"""

import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ray import cloudpickle

from recipe.async_engine.core.journal import MARK, TransitionKind, replay
from recipe.async_engine.rollout.prompts import PromptSource
from recipe.async_engine.trainer.checkpoints import ROLLOUT_STATE, require_ours
from recipe.async_engine.trainer.ledger_journal import SqliteJournal

logger = logging.getLogger(__name__)


def save(folder: str, snapshot: dict[str, Any], timeout_s: float) -> None:
    """Write a scheduler's snapshot into the checkpoint ``folder``, payloads included."""
    groups = {group_id: _fetched(group, timeout_s) for group_id, group in snapshot["groups"].items()}
    path = Path(folder) / ROLLOUT_STATE
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save({**snapshot, "groups": groups}, partial)
    os.replace(partial, path)


def _fetched(group: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """A live group as it is kept: with its payloads, or, if it is generated again after loading, without."""
    if "kept" not in group and any(payload is None for payload in group["payloads"]):
        return {"row": group["row"], "scored": [], "payloads": []}
    there = [payload for payload in group["payloads"] if payload is not None]
    fetched = iter(ray.get(there, timeout=timeout_s))
    payloads = [None if payload is None else next(fetched) for payload in group["payloads"]]
    return {**group, "payloads": payloads}


def load(folder: str) -> dict[str, Any]:
    """Read a snapshot back; payloads are object references again.

    Raises:
        CheckpointError: the checkpoint has none, because another trainer wrote it.
    """
    require_ours(folder)
    snapshot = torch.load(Path(folder) / ROLLOUT_STATE, weights_only=False)
    for group in snapshot["groups"].values():
        group["payloads"] = [None if payload is None else ray.put(payload) for payload in group["payloads"]]
    return snapshot


def take_up(snapshot: dict[str, Any], journal: SqliteJournal, prompts: PromptSource) -> tuple[dict[str, Any], int]:
    """The snapshot of a checkpoint with what was done after it; the journal goes on from there.

    Args:
        prompts: stands where the snapshot's ``source`` says; the prompts issued since are taken from it again. Where it
            does not give the same ones, what was done after the checkpoint is done again.

    Returns:
        The snapshot, and how many groups were completed after it.
    """
    mark = snapshot["ledger"].get(MARK)
    found = journal.since(mark)
    if found is None:
        journal.reset(mark)
        return snapshot, 0
    answers = {transition.group_id: answers for transition, answers in found if answers is not None}
    known = [step for step, answers in found if step.kind is not TransitionKind.READY or answers is not None]
    replayed = replay(snapshot["ledger"], known)
    groups = dict(snapshot["groups"])
    for group in replayed.issued:
        prompt = prompts.take()
        if prompt is None or prompt.reference != group.prompt:
            logger.warning(
                "the data gives %s where %s was issued: the journal is of no use",
                prompt and prompt.reference,
                group.prompt,
            )
            prompts.restore(snapshot["source"])
            journal.reset(mark)
            return snapshot, 0
        groups[group.id] = {"row": prompt.row, "scored": [], "payloads": []}
    for group_id in replayed.ready:
        scored, payloads = pickle.loads(answers[group_id])
        groups[group_id] |= {"scored": scored, "payloads": [ray.put(payload) for payload in payloads]}
    journal.rewind(mark)
    logger.warning(
        "after the checkpoint %d groups were issued, and the answers of %d groups completed: they are kept",
        len(replayed.issued),
        len(replayed.ready),
    )
    live = {row[0] for row in replayed.snapshot["live"]}
    kept = {group_id: group for group_id, group in groups.items() if group_id in live}
    return {**snapshot, "ledger": replayed.snapshot, "groups": kept}, len(replayed.ready)


def answers_of(scored: list[Any], payloads: list[Any], timeout_s: float) -> Callable[[], bytes | None]:
    """What fetches a complete group's answers for the journal; None where an object is lost, with its worker."""

    def fetch() -> bytes | None:
        try:
            return cloudpickle.dumps((scored, ray.get(payloads, timeout=timeout_s)))
        except ray.exceptions.RayError as error:
            logger.warning("the answers of a group are not journaled, a resumed run generates them again: %s", error)
            return None

    return fetch
