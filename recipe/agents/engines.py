# SPDX-License-Identifier: Apache-2.0
"""Uses vLLM's reasoning parsers and, to try an agent without a trainer, vLLM's server."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from openai import AsyncOpenAI, OpenAIError
from verl.workers.rollout.replica import TokenOutput

from recipe.agents.errors import AgentFailed

STARTED_S = 600.0


@cache
def reasoning_splitter(name: str, tokenizer: Any) -> Callable[[str], tuple[str | None, str]]:
    """Return a function that splits an answer into reasoning and text with vLLM's reasoning parser ``name``."""
    from vllm.reasoning import ReasoningParserManager

    parser = ReasoningParserManager.get_reasoning_parser(name)(tokenizer)

    def split(text: str) -> tuple[str | None, str]:
        reasoning, content = parser.extract_reasoning(text, None)
        return reasoning, content or ""

    return split


class ServerClient:
    """Replaces the client of verl's agent loops; sends the tokens of prompts to a vLLM server's ``/v1/completions``."""

    def __init__(self, server: AsyncOpenAI, model: str) -> None:
        self._server, self._model = server, model

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **media: Any
    ) -> TokenOutput:
        """Return the tokens that the server samples after ``prompt_ids``, and their log-probs."""
        if media:
            raise AgentFailed("images are supported only in a training run, not with a server's /v1/completions")
        parameters = {name: value for name, value in sampling_params.items() if name != "logprobs"}
        reply = await self._server.completions.create(
            model=self._model, prompt=prompt_ids, logprobs=0, extra_body={**parameters, "return_token_ids": True}
        )
        choice: Any = reply.choices[0]
        return TokenOutput(token_ids=choice.token_ids, log_probs=choice.logprobs.token_logprobs)


@asynccontextmanager
async def server(model: str, arguments: Sequence[str], address: str | None) -> AsyncIterator[ServerClient]:
    """Provide a client of the server at ``address``. If that is None, start a server, and end it afterwards.

    Args:
        model: folder or name of the model.
        arguments: further command-line arguments of a server that is started.
    """
    if address is not None:
        async with AsyncOpenAI(base_url=address, api_key=os.environ.get("OPENAI_API_KEY", "none")) as found:
            yield ServerClient(found, (await found.models.list()).data[0].id)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port, key = free.getsockname()[1], secrets.token_urlsafe(32)
    bound = ["--model", model, "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "policy"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", *bound, *arguments),
        env={**os.environ, "VLLM_API_KEY": key},
        stdout=sys.stderr,
    )
    try:
        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0) as started:
            await _answers(started, process)
            yield ServerClient(started, "policy")
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _answers(started: AsyncOpenAI, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(STARTED_S):
        while process.returncode is None:
            try:
                await started.models.list()
                return
            except OpenAIError:
                await asyncio.sleep(0.5)
    raise AgentFailed(f"vLLM's server ended with exit status {process.returncode}; its output says why")
