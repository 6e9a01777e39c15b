# SPDX-License-Identifier: Apache-2.0
"""verl's client of rollout servers, extended by a method that is called with the engine's id of each request."""

from __future__ import annotations

from verl.workers.rollout.llm_server import LLMServerClient


class NamingClient(LLMServerClient):
    """A client that calls its method `name_request` with the id of each request before it sends the request."""

    def name_request(self, engine_request_id: str) -> None:
        """Do nothing. A subclass may store the id of the request that is about to be sent."""

    def _vllm_request_id(self, request_id: str) -> str:
        # verl calls this method for requests to any engine, in spite of the method's name.
        engine_request_id: str = super()._vllm_request_id(request_id)
        self.name_request(engine_request_id)
        return engine_request_id
