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
"""Stages of a run that are lengthened by waits, which stand for the time of accelerators and use no CPU.

``GENERATION_PAD_S`` seconds are added to each answer, ``TRAINING_PAD_S`` to each update.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from recipe.one_step_off.trainer import OneStepOffTrainer


class PaddedTrainer(OneStepOffTrainer):
    def _fit_update_actor(self, batch: Any) -> Any:
        time.sleep(float(os.environ["TRAINING_PAD_S"]))
        return super()._fit_update_actor(batch)


class PaddedLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        answer = await super().run(sampling_params, **kwargs)
        await asyncio.sleep(float(os.environ["GENERATION_PAD_S"]))
        return answer
