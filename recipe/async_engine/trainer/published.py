# SPDX-License-Identifier: Apache-2.0
"""The weights that were published last, kept by the training workers while they train on.

Contract: where a version has several batches, the rollout goes on with its weights while the trainer's change. They are
kept from each publication to the next, so that every batch's log-probs can be computed by the version that they name,
and so that a run that resumes within a version publishes that version's weights under its number, and no others. They
are saved beside a checkpoint that is written within a version. Shown by tests/integration/test_published_weights.py and
tests/e2e/test_published_weights.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipe.async_engine.core.config import RunPlan
from recipe.async_engine.core.server_settings import Proximal

PUBLISHED = "published"
TRAINED = "trained"


class PublishedWeights:
    """See the module's contract.

    Args:
        workers: the group of training workers (`ActorWorker`).
        plan: of the run.
        saves: whether the run writes checkpoints.
    """

    def __init__(self, workers: Any, plan: RunPlan, saves: bool) -> None:
        self._workers = workers
        computes = plan.proximal in (Proximal.RECOMPUTE, Proximal.SERVER)
        self._are_kept = plan.batches_per_version > 1 and (computes or saves)

    def keep(self) -> None:
        """The workers' present weights have been published."""
        if self._are_kept:
            self._workers.save_model_to_cpu(PUBLISHED)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The workers have the published weights within it, and afterwards those that they had before."""
        self._workers.save_model_to_cpu(TRAINED)
        try:
            self._workers.restore_model_from_cpu(PUBLISHED)
            yield
        finally:
            self._workers.restore_model_from_cpu(TRAINED)
            self._workers.clear_cpu_model(TRAINED)

    def save(self, checkpoint: str | Path) -> None:
        """Write them into the folder of a checkpoint."""
        self._workers.write_copy(PUBLISHED, str(Path(checkpoint) / PUBLISHED))

    def load(self, checkpoint: str | Path) -> None:
        """Have those that :meth:`save` wrote."""
        self._workers.read_copy(PUBLISHED, str(Path(checkpoint) / PUBLISHED))
