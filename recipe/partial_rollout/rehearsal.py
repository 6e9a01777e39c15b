# SPDX-License-Identifier: Apache-2.0
"""The rehearsal of partial rollout: one turn of the rollout and one turn of the trainer before the first step.

Contract: that of `recipe.async_engine.trainer.rehearsal`. The engines are interrupted and free their memory for the
trainer, whose ranks train and compute log-probs. Then the engines allocate their memory again and load the version that
the trainer ranks on their accelerators pass to them. If this fails, the run ends, since no other way to pass weights
exists to which it could fall back. Shown by tests/e2e/test_rehearsal.py.
"""

from __future__ import annotations

from recipe.async_engine.trainer.probe import Answer, RehearsalFailed
from recipe.async_engine.trainer.rehearsal import Rehearsal
from recipe.async_engine.weights.hybrid_publisher import HybridPublisher
from recipe.async_engine.weights.publisher import PublishFailed


class TurnRehearsal(Rehearsal):
    """Rehearses one turn of the rollout and one turn of the trainer."""

    publisher: HybridPublisher

    def rehearse(self) -> None:
        self.publisher.begin_generation()
        super().rehearse()
        self.publisher.pause()

    def send_again(self, before: list[Answer]) -> None:
        """Interrupt the engines for a turn of the trainer while each has a request, and check that requests go on."""
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
