# SPDX-License-Identifier: Apache-2.0
"""Makes requests to a rollout server wait until the server holds complete weights.

Contract: a request passes the gate only while a complete set of weights is loaded. An interrupted load leaves the gate
closed. Shown by tests/integration/test_server_gate.py.
"""

import asyncio

from recipe.async_engine.core.errors import RecipeError


class RolloutServerError(RecipeError):
    """A rollout server cannot start with its configuration, or cannot accept a request at present."""


class WeightsGate:
    """A gate for requests that is open while a server holds a complete set of weights.

    The methods may be called only on the server's event loop.
    """

    def __init__(self, opened: bool) -> None:
        self._complete = asyncio.Event()
        if opened:
            self._complete.set()
        self.loading: int | None = None
        self.refusing = False

    @property
    def is_open(self) -> bool:
        return self._complete.is_set()

    def begin_load(self, version: int | None) -> None:
        """Close the gate until :meth:`commit` is called, because the live weights are about to be overwritten."""
        self.loading = version
        self.refusing = False
        self._complete.clear()

    def commit(self) -> None:
        """Open the gate, because the load is complete."""
        self.loading = None
        self.refusing = False
        self._complete.set()

    def refuse(self) -> None:
        """Refuse waiting and later requests until the next load, because the server has left the load balancer."""
        self.refusing = True
        self._complete.set()
        self._complete.clear()

    async def wait_open(self, timeout_s: float) -> bool:
        """Wait for complete weights and return True; return False if `refuse` has been called since the last load.

        Raises:
            RolloutServerError: the server got no complete weights within ``timeout_s`` seconds.
        """
        if self._complete.is_set() or self.refusing:
            return not self.refusing
        try:
            async with asyncio.timeout(timeout_s):
                await self._complete.wait()
            return not self.refusing
        except TimeoutError:
            what = "no weights were ever published" if self.loading is None else f"version {self.loading} never arrived"
            raise RolloutServerError(
                f"the rollout server refused a request after {timeout_s:g} s: the server has no complete weights "
                f"({what}). "
                "Raise async_training.timeouts.first_weights if the trainer needs longer to start, otherwise look for "
                "the error of the trainer or of the weight sync."
            ) from None
