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
"""A partial-rollout trainer that records the answers it trains, and is killed between two steps if it is told to.

``RECORD_FOLDER`` gets one file a step, one line an answer: uid of its group, tokens, and the version of each token.
After the checkpoint of step ``CRASH_AFTER_STEP`` the process is killed, as by a machine that goes away.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from recipe.async_engine.trainer.batch import TOKEN_VERSIONS
from recipe.partial_rollout.trainer import PartialRolloutTrainer


class RecordingTrainer(PartialRolloutTrainer):
    def _assemble(self, groups: list[Any]) -> Any:
        batch = super()._assemble(groups)
        length = batch.batch["responses"].shape[1]
        lines = []
        for row in range(len(batch)):
            there = batch.batch["attention_mask"][row, -length:].bool()
            answer = {
                "uid": batch.non_tensor_batch["uid"][row],
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
            os.kill(os.getpid(), signal.SIGKILL)
