# SPDX-License-Identifier: Apache-2.0
"""The fully-asynchronous trainer: generation and training stream past each other under a hard staleness bound."""

from recipe.async_engine.trainer.base import AsyncPPOTrainer


class FullyAsyncTrainer(AsyncPPOTrainer):
    """Batches are the oldest ready groups, whichever they are; ``async_training`` says how far the sides may part."""
