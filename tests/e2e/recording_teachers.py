# SPDX-License-Identifier: Apache-2.0
"""The recording trainer that also writes what teachers said of the answers it trains, to ``RECORD_FOLDER/teachers``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from recording_trainer import Recording

from recipe.async_engine.trainer.base import AsyncPPOTrainer


class RecordingTeachers(Recording, AsyncPPOTrainer):
    def _assemble(self, groups: list[Any]) -> Any:
        batch = super()._assemble(groups)
        columns, lines = batch.batch, []
        for row, source in enumerate(batch.non_tensor_batch["data_source"]):
            there = columns["attention_mask"][row].bool()
            names = ("input_ids", "teacher_ids", "teacher_logprobs")
            lines.append({"source": source} | {name: columns[name][row][there].tolist() for name in names})
        folder = Path(os.environ["RECORD_FOLDER"]) / "teachers"
        folder.mkdir(exist_ok=True)
        (folder / f"{self.global_steps}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return batch
