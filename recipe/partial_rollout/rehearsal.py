# SPDX-License-Identifier: Apache-2.0
"""The rehearsal of partial rollout: one turn of the rollout and one of the trainer.

Contract: that of `recipe.async_engine.trainer.rehearsal`. The engines are interrupted and free their memory for the
trainer, whose ranks train and compute log-probs; then the engines wake with the version that the rank beside them
passes. There is no alternative to this, so no setting falls back. Shown by tests/e2e/test_rehearsal.py.
"""

from __future__ import annotations

from recipe.async_engine.trainer.probe import Answer, RehearsalFailed
from recipe.async_engine.trainer.rehearsal import Rehearsal
from recipe.async_engine.weights.publisher import PublishFailed
from recipe.partial_rollout.publisher import TurnPublisher


class TurnRehearsal(Rehearsal):
    """Rehearses one turn of the rollout and one of the trainer."""

    publisher: TurnPublisher

    def rehearse(self) -> None:
        """Rehearse as in every mode, within a generation turn."""
        self.publisher.begin_generation()
        super().rehearse()
        self.publisher.pause()

    def send_again(self, before: list[Answer]) -> None:
        """Let the trainer have a turn while each engine has a request."""
        with self.checking("requests go on after a turn of the trainer") as check, self.in_haste():
            self.under_requests(lambda: self._turn(before), check)

    def _turn(self, before: list[Answer]) -> None:
        with self.checking("engines stop and give their memory back"):
            self.publisher.pause()
            self.publisher.release()
            self._see_alive()
        with self.checking("the trainer works beside sleeping engines"):
            self.work()
        self.compare(before)
        with self.checking("engines wake with the weights"):
            self._wake()

    def _wake(self) -> None:
        try:
            with self.published():
                self.publisher.swap(self.publisher.stage(self.version))
        except PublishFailed as error:
            raise RehearsalFailed(str(error)) from error
        self.publisher.begin_generation()
        self._see_alive()

    def _see_alive(self) -> None:
        if dead := [record.name for record in self.publisher.known.records if record.dead]:
            raise RehearsalFailed(f"{', '.join(dead)} failed ({self.publisher.known.errors})")
