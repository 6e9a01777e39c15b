# SPDX-License-Identifier: Apache-2.0
"""The rehearsal of hybrid replicas: they wake, sleep and wake again before the first step.

Contract: the contract of `recipe.async_engine.trainer.rehearsal` holds here too. The engines are interrupted and free
their memory for the trainer, whose ranks do forward and backward passes and compute log-probs. Then the engines
allocate their memory again and load the weights; each engine gets them from the trainer ranks on its own accelerators.
If this fails, the run ends, because there is no other way to pass weights. Shown by tests/e2e/test_rehearsal.py.
"""

from __future__ import annotations

from recipe.async_engine.trainer.probe import Answer, RehearsalFailed
from recipe.async_engine.trainer.rehearsal import Rehearsal
from recipe.async_engine.weights.hybrid_publisher import HybridPublisher
from recipe.async_engine.weights.publisher import NoReplicaLeft, PublishFailed


class HybridRehearsal(Rehearsal):
    """Rehearses that hybrid replicas generate, give their accelerators to the trainer, and generate again."""

    publisher: HybridPublisher

    def rehearse(self) -> None:
        with self.checking("engines wake with the weights"):
            self._wake()
        super().rehearse()
        self.publisher.sleep(others_serve=True)

    def send_again(self, before: list[Answer]) -> None:
        """Interrupt the engines while each has a request, let the trainer compute, and check that requests continue.

        While the engines are interrupted, compare the trainer's log-probs with those of the answers ``before``.
        """
        with self.checking("requests go on after a turn of the trainer") as check, self.in_haste():
            self.under_requests(lambda: self._turn(before), check)

    def _turn(self, before: list[Answer]) -> None:
        with self.checking("engines stop and give their memory back"):
            self.publisher.sleep(others_serve=True)
            self._see_alive()
        with self.checking("the trainer works beside sleeping engines"):
            self.work()
        self.compare(before)
        with self.checking("engines wake with the weights"):
            self._wake()

    def _wake(self) -> None:
        try:
            with self.published():
                self.publisher.wake(self.version)
        except (NoReplicaLeft, PublishFailed) as error:
            raise RehearsalFailed(str(error)) from error
        self._see_alive()

    def _see_alive(self) -> None:
        if dead := [record.name for record in self.publisher.known.records if record.dead]:
            raise RehearsalFailed(f"{', '.join(dead)} failed ({self.publisher.known.errors})")
