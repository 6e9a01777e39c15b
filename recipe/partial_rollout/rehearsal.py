# SPDX-License-Identifier: Apache-2.0
"""The rehearsal where trainer and rollout share their accelerators: one turn of each.

Contract: that of `recipe.async_engine.trainer.rehearsal`. The engines are interrupted, give their memory to the
trainer, whose ranks work and compute log-probs meanwhile, and wake with the version, handed over by the rank beside
them. There is no other way, so nothing falls back. Shown by tests/e2e/test_rehearsal.py.
"""

from __future__ import annotations

from recipe.async_engine.trainer.probe import Answer, RehearsalFailed
from recipe.async_engine.trainer.rehearsal import Rehearsal
from recipe.async_engine.weights.publisher import PublishFailed
from recipe.partial_rollout.publisher import TurnPublisher


class TurnRehearsal(Rehearsal):
    """See the module's contract."""

    publisher: TurnPublisher

    def rehearse(self) -> None:
        """As every mode's, within a generation turn."""
        self.publisher.begin_generation()
        super().rehearse()
        self.publisher.pause()

    def send_again(self, before: list[Answer]) -> None:
        """A turn of the trainer, under a request at each engine."""
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
            raise RehearsalFailed(f"{', '.join(dead)} did not ({self.publisher.known.errors})")
