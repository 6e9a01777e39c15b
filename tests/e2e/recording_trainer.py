# SPDX-License-Identifier: Apache-2.0
"""Trainers that record the answers they train, and that kill themselves between two steps if configured.

``RECORD_FOLDER`` gets one file per step with one line per answer: the uid of its group, tokens, and the version of each
token. After the checkpoint of step ``CRASH_AFTER_STEP`` the process is killed, like on a failing machine. If generation
goes on during a checkpoint, this checkpoint is taken during generation: when each unfinished answer has some tokens,
and one of them follows ``MIDWAY_ANSWERS`` complete ones of the same trajectory.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

from recipe.async_engine.core.columns import TOKEN_VERSIONS
from recipe.async_engine.record.event_file import files, read
from recipe.async_engine.trainer.base import AsyncPPOTrainer

SOME_TOKENS = 3
MIDWAY_S = RECORD_S = 60.0


class Recording:
    """Mixed into a trainer to record answers."""

    def _assemble(self, groups: list[Any]) -> Any:
        batch = super()._assemble(groups)
        length = batch.batch["responses"].shape[1]
        lines = []
        for row in range(len(batch)):
            there = batch.batch["attention_mask"][row, -length:].bool()
            before = batch.batch["attention_mask"][row, :-length].bool()
            answer = {
                "uid": batch.non_tensor_batch["uid"][row],
                "prompt": batch.batch["prompts"][row][before].tolist(),
                "tokens": batch.batch["responses"][row][there].tolist(),
                "versions": batch.batch[TOKEN_VERSIONS][row][there].tolist(),
            }
            lines.append(json.dumps(answer))
        folder = Path(os.environ["RECORD_FOLDER"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.global_steps}.jsonl").write_text("\n".join(lines))
        return batch

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        if self.global_steps == int(os.environ.get("CRASH_AFTER_STEP", "0")):
            self.saving.finish()
            self.before_the_kill()
            os.kill(os.getpid(), signal.SIGKILL)

    def before_the_kill(self) -> None:
        """Do nothing; subclasses may override this."""


def is_midway(snapshot: dict[str, Any]) -> bool:
    """Return whether each unfinished answer has some tokens, and one of them follows complete answers."""
    groups = snapshot["groups"].values()
    unfinished = [
        record
        for group in groups
        for record, payload in zip(group["kept"], group["payloads"], strict=True)
        if payload is None
    ]
    if not unfinished or any(record is None for record in unfinished):
        return False
    answers = [pickle.loads(record.answers) for record in unfinished if record.under_way_tokens >= SOME_TOKENS]
    complete = [sum(kept.cut_tokens == 0 for kept in of_one) for of_one in answers]
    return max(complete, default=-1) >= int(os.environ["MIDWAY_ANSWERS"])


class Midway(Recording):
    """Mixed into a trainer whose rollout goes on during a checkpoint."""

    def _save_checkpoint(self) -> None:
        if self.global_steps == int(os.environ.get("CRASH_AFTER_STEP", "0")):
            take = self.scheduler.snapshot
            self.scheduler.snapshot = lambda timeout_s: self._midway(take, timeout_s)
        super()._save_checkpoint()

    @staticmethod
    def _midway(take: Any, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + MIDWAY_S
        while not is_midway(snapshot := take(timeout_s)):
            if time.monotonic() > deadline:
                raise TimeoutError("no answer was in mid-generation")
            time.sleep(0.02)
        return snapshot


class RecordingTrainer(Recording, AsyncPPOTrainer):
    """The recording trainer with shared placement, which is killed after the first write of its event record."""

    def before_the_kill(self) -> None:
        deadline = time.monotonic() + RECORD_S
        while not read(files(self.config.trainer.default_local_dir)[-1])[1].num_rows:
            if time.monotonic() > deadline:
                raise TimeoutError("nothing of the record of events was written")
            time.sleep(0.1)


class MidwayApart(Midway, AsyncPPOTrainer):
    """The recording trainer with separate placement."""
