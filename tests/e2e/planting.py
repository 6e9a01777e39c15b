# SPDX-License-Identifier: Apache-2.0
"""Causes that make a run slow, each recorded by `planted`.

``CAUSE`` names the cause that is planted in the trainer, ``ANSWER`` is the length of short answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import two_turn_loop
from planted import note, noted, planted_s
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.utils.dataset.rl_dataset import RLHFDataset

from benchmarks.emulation.devices import emulation
from benchmarks.emulation.engine import EmulatedExtension
from recipe.async_engine.trainer.base import AsyncPPOTrainer

SHORT, LONG, LONG_EVERY = int(os.environ.get("ANSWER", "6")), 120, 4


class ShortAnswers(SingleTurnAgentLoop):
    """Answers that all have the same length."""

    def length(self, index: int) -> int:
        return SHORT

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        length = self.length(int(kwargs["extra_info"]["index"]))
        answer = await super().run({**sampling_params, "max_tokens": length, "ignore_eos": True}, **kwargs)
        note("answered", time.monotonic(), time.monotonic())
        return answer


class TailedAnswers(ShortAnswers):
    """Answers of which those to every fourth prompt are long."""

    def length(self, index: int) -> int:
        return SHORT if index % LONG_EVERY else LONG


class SlowTool(two_turn_loop.TwoTurnLoop):
    """Two short answers with a slow tool in between."""

    async def ask(self, uid: str, context: list[int], sampling_params: dict[str, Any]) -> Any:
        fixed = {**sampling_params, "max_tokens": SHORT, "ignore_eos": True}
        return await self.server_manager.generate(request_id=uid, prompt_ids=context, sampling_params=fixed)

    async def tool(self, answer: list[int]) -> list[int]:
        with noted("tool"):
            await asyncio.sleep(planted_s())
        return answer[:2]


class SlowPrompts(RLHFDataset):
    """A data set whose rows take time to read."""

    def __getitem__(self, item: int) -> Any:
        with noted("prompt"):
            time.sleep(planted_s())
        return super().__getitem__(item)


class SlowSwap(EmulatedExtension):
    """An engine whose weight swaps, except for the first one, are slow."""

    swaps = 0

    def swap_staged(self, version: int) -> Any:
        SlowSwap.swaps += 1
        if SlowSwap.swaps > 1:
            with noted("swap"):
                time.sleep(planted_s())
        return super().swap_staged(version)


class OneSlowEngine(EmulatedExtension):
    """Makes the first engine to start decode three times as slowly as the others."""

    def __new__(cls, **kwargs: Any) -> OneSlowEngine:
        mark = Path(os.environ["PLANTED"] + ".slow")
        try:
            mark.touch(exist_ok=False)
            here = emulation()
            assert here.decode_step_s is not None
            os.environ.update(dataclasses.replace(here, decode_step_s=3 * here.decode_step_s).environment())
            mark.write_text(str(os.getpid()))
        except FileExistsError:
            pass
        return super().__new__(cls, **kwargs)


class Planting(AsyncPPOTrainer):
    """A trainer with the causes inside its phases."""

    _taken_at: float | None = None

    def init_workers(self) -> None:
        super().init_workers()
        if os.environ.get("CAUSE") == "update":
            update = self.actor_rollout_wg.update_actor

            def slow(*args: Any, **kwargs: Any) -> Any:
                with noted("update"):
                    time.sleep(planted_s())
                    return update(*args, **kwargs)

            self.actor_rollout_wg.update_actor = slow
        resume = self.publisher.resume

        def resumed(staged: Any) -> Any:
            metrics = resume(staged)
            if self._taken_at is not None:
                note("held", self._taken_at, time.monotonic())
            return metrics

        self.publisher.resume = resumed  # type: ignore[method-assign]

    def _next_groups(self) -> Any:
        groups = super()._next_groups()
        self._taken_at = time.monotonic()
        return groups

    def _validate_now(self) -> Any:
        with noted("validate"):
            if os.environ.get("CAUSE") == "validate":
                time.sleep(planted_s())
            return super()._validate_now()

    def _save_training_side(self) -> None:
        if os.environ.get("CAUSE") == "save":
            time.sleep(planted_s())
        super()._save_training_side()

    def _save_checkpoint(self) -> None:
        with noted("save"):
            super()._save_checkpoint()

    def _assemble(self, groups: Any) -> Any:
        if os.environ.get("CAUSE") == "driver":
            with noted("driver"):
                time.sleep(planted_s())
        return super()._assemble(groups)
