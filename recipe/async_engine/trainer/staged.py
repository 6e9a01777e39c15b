# SPDX-License-Identifier: Apache-2.0
"""verl's trainer, with what the stages in this room find in it beside verl's own members."""

from typing import Any

from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer

from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.core.skipped import SkippedUpdates
from recipe.async_engine.settings.plan import RunPlan
from recipe.async_engine.settings.sections import Timeouts
from recipe.async_engine.trainer.actor_worker import PublishedWeights
from recipe.async_engine.trainer.fleet import Fleet
from recipe.async_engine.weights.publisher import WeightPublisher


class StagedTrainer(SeparateRayPPOTrainer):
    """Each stage is a subclass that overrides what verl does there; `AsyncPPOTrainer` is all of them.

    From `init_workers` on there are ``publisher``, ``published`` and ``fleet``; ``is_up`` says whether.
    """

    config: Any
    train_dataloader: Any
    reward_extra_infos_dict: dict[str, Any]
    plan: RunPlan
    timeouts: Timeouts
    ledger: SampleLedger
    skipped_updates: dict[str, SkippedUpdates]
    is_up = False
    publisher: WeightPublisher
    published: PublishedWeights
    fleet: Fleet
    # Of the step under way.
    metrics: dict[str, Any]
    timing_raw: dict[str, float]
