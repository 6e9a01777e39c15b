# SPDX-License-Identifier: Apache-2.0
"""The errors of this package: a request that is refused, and an agent that failed."""

from __future__ import annotations

from openai.types.shared.error_object import ErrorObject


class AgentFailed(RuntimeError):
    """A trajectory's agent failed. The message says how, and has the end of the output of a command that failed."""


class Refused(Exception):
    """A request of an agent is refused with an HTTP error.

    Attributes:
        status: the HTTP status.
        error: the error object that the client receives, in OpenAI's form.
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.status, self.error = status, ErrorObject(message=message, type=kind, code=code, param=param)

    def body(self) -> dict[str, object]:
        told = self.error
        return {"error": {"message": told.message, "type": told.type, "param": told.param, "code": told.code}}
