# SPDX-License-Identifier: Apache-2.0
"""The one-step-off trainer: while it trains batch k, batch k+1 is generated with the weights that batch k-1 made."""

from recipe.async_engine.trainer.base import AsyncPPOTrainer


class OneStepOffTrainer(AsyncPPOTrainer):
    """Batches are whole and in the order of the data; ``async_training.whole_batches`` is what tells them apart."""
