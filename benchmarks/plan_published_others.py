# SPDX-License-Identifier: Apache-2.0
"""Compares published speed-ups over synchronous training with the simulator's: AReaL's, and verl-recipe's partial
rollout.

    python benchmarks/plan_published_others.py

The sources are AReaL, blog/AReaL_v0_3.md (hours of 1,000 steps, nodes, 16 answers per prompt, at most 27k tokens) and
verl-recipe, partial_rollout/README.md (hours and steps at 16 H20, at most 18,384 tokens). Assumptions: the efficiencies
of `recipe/plan/device.py`, 8 accelerators per node, replicas of one device with 256 places, lognormal lengths, batches
of `Published.prompts` prompts, and for AReaL an H100 and a quarter of the devices to train. The median length is fitted
so that a synchronous step takes as long as published, separately for each spread.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from documents import table
from plan_published import H20

from benchmarks.emulation.models import MODELS
from recipe.plan.device import H100, DeviceProfile, DeviceTimes
from recipe.plan.memory.shape import shape_of
from recipe.plan.simulation import Scenario, Simulation
from recipe.plan.times import Times

QWEN2_1B = MODELS["qwen2.5-7b"] | {
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
}
QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
SPREADS, PLACES, PROMPT, GROUPS = (0.8, 1.2), 256, 500, 2_048
STEPS, SKIP = 12, 4
# A fit that stays further than this from the published seconds is reported with its own.
MOST_OFF = 0.05


@dataclass(frozen=True)
class Published:
    """A published comparison: seconds of a synchronous step and of an asynchronous one, on ``devices`` devices.

    shared: both stages take turns on all devices. bounds: staleness bounds for which it is predicted.
    """

    model: Mapping[str, Any]
    devices: int
    synchronous_s: float
    other_s: float
    most: int
    prompts: int
    shared: bool = False
    device: DeviceProfile = field(default=H100)
    answers: int = 16
    bounds: tuple[int, ...] = (1, 4, 16)

    @property
    def training(self) -> int:
        return self.devices if self.shared else self.devices // 4

    def times(self, median: float, spread: float, training: int) -> Times:
        shape = shape_of(dict(self.model))
        assert shape is not None
        one, trainer = DeviceTimes(self.device, shape), DeviceTimes(self.device, shape, training)
        draw = random.Random(0)
        groups = tuple(
            tuple(max(1, min(self.most, round(median * draw.lognormvariate(0, spread)))) for _ in range(self.answers))
            for _ in range(GROUPS)
        )
        return Times(
            groups=groups,
            step_s=one.decode_step_s,
            read_s=one.prefill_s,
            update_s=lambda lengths, ranks: trainer.update_s(PROMPT + length for length in lengths),
            log_probs_s=lambda lengths, ranks: trainer.log_probs_s(PROMPT + length for length in lengths),
            prompt=PROMPT,
            stage_s=one.transfer_s(),
            swap_s=one.load_s(),
        )

    def synchronous(self, median: float, spread: float) -> float:
        scenario = self._scenario(self.devices, 0, shared=True, steps=4)
        return Simulation(replace(scenario, pipeline_depth=0), self.times(median, spread, self.devices)).run().step_s(1)

    def other(self, median: float, spread: float, bound: int) -> float:
        rollout = self.devices if self.shared else self.devices - self.training
        scenario = self._scenario(rollout, bound, self.shared, STEPS)
        return Simulation(scenario, self.times(median, spread, self.training)).run().step_s(SKIP)

    def _scenario(self, replicas: int, bound: int, shared: bool, steps: int) -> Scenario:
        # Allow at least as many answers in progress as there are places.
        depth = max(1.0, replicas * PLACES / (self.prompts * self.answers) - 1) if bound else 0.0
        return Scenario(
            self.prompts,
            self.answers,
            replicas,
            PLACES,
            PLACES,
            max_staleness=bound,
            pipeline_depth=min(depth, bound),
            shared=shared,
            steps=steps,
        )

    def median_for(self, spread: float) -> float:
        low, high = 100.0, float(self.most)
        for _ in range(8):
            middle = (low + high) / 2
            low, high = (middle, high) if self.synchronous(middle, spread) < self.synchronous_s else (low, middle)
        return (low + high) / 2


def hours_of_thousand(hours: float) -> float:
    return 3600 * hours / 1000


CASES = {
    "AReaL, 1.5B, 16 nodes": Published(
        QWEN2_1B, 128, hours_of_thousand(41.0), hours_of_thousand(14.8), most=27_648, prompts=512
    ),
    "AReaL, 7B, 24 nodes": Published(
        MODELS["qwen2.5-7b"], 192, hours_of_thousand(57.7), hours_of_thousand(25.4), most=27_648, prompts=512
    ),
    "partial rollout, Qwen3-4B, 16 H20, DAPO-math": Published(
        QWEN3_4B, 16, 3600 * 67.57 / 200, 3600 * 33.03 / 110, most=18_384, prompts=128, shared=True, device=H20
    ),
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    head = ["setting", "published, s a step", "times the synchronous rate", "spread, median", "predicted, by bound"]
    lines = []
    for name, case in CASES.items():
        for spread in SPREADS:
            median = case.median_for(spread)
            reached = case.synchronous(median, spread)
            said = [f"{bound}: {reached / case.other(median, spread, bound):.2f}" for bound in case.bounds]
            published = f"{case.synchronous_s:.0f} -> {case.other_s:.0f}"
            ratio = f"{case.synchronous_s / case.other_s:.2f}"
            fit = f"{spread}, {median:.0f}" + (
                "" if abs(reached / case.synchronous_s - 1) < 0.05 else f" ({reached:.0f} s)"
            )
            lines.append([name, published, ratio, fit, ", ".join(said)])
    print(table(head, lines))


if __name__ == "__main__":
    main()
