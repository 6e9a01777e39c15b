# SPDX-License-Identifier: Apache-2.0
"""Errors of agents: what a request is refused with, and why a trajectory's agent failed."""

from __future__ import annotations

from openai.types.shared.error_object import ErrorObject


class AgentFailed(RuntimeError):
    """A trajectory's agent failed; the message says how, with its last words."""


class Refused(Exception):
    """A request that is not answered.

    Attributes:
        status: the HTTP status.
        error: what the client is told, in OpenAI's form.
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.status, self.error = status, ErrorObject(message=message, type=kind, code=code, param=param)

    def body(self) -> dict[str, object]:
        told = self.error
        return {"error": {"message": told.message, "type": told.type, "param": told.param, "code": told.code}}
