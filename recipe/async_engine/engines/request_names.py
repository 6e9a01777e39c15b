# SPDX-License-Identifier: Apache-2.0
"""verl's client of rollout servers, with a method that learns under which id an engine knows each request."""

from __future__ import annotations

from verl.workers.rollout.llm_server import LLMServerClient


class NamingClient(LLMServerClient):
    """A client whose method `name_request` gets the id of each request that it sends."""

    def name_request(self, engine_request_id: str) -> None:
        """Take the id of the request that is about to be sent. This method does nothing."""

    def _vllm_request_id(self, request_id: str) -> str:
        # Despite its name, verl calls this method for requests to any engine.
        engine_request_id: str = super()._vllm_request_id(request_id)
        self.name_request(engine_request_id)
        return engine_request_id
