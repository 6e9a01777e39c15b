# SPDX-License-Identifier: Apache-2.0
"""One trajectory's conversations with the policy: turns requests into tokens, and sampled tokens into answers.

Contract: if a request continues an earlier answer (`History`), its prompt repeats the answer's tokens as they were
sampled, and verl's Continuous-Token builder adds the tokens of the later messages. The messages of other requests are
rendered anew by the chat template. An earlier answer in such a prompt is context, which is not trained, unless the
rendered tokens are those that were sampled. A request is sent by the client of verl's agent loops, in the context of
its trajectory, so interruptions, versions, pauses between generation turns and deadlines apply as to every agent loop.
An answer is recorded only when it is complete. If the agent stops waiting for an answer, the answer is not trained. If
the engines fail a request, the trajectory fails with their error, even if the agent handles the error. Temperature,
top_p and similar fields of requests are ignored: with other values than the run's, the policy that samples would differ
from the one that is trained. Shown by tests/integration/test_agents.py.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any
from uuid import uuid4

from PIL import Image
from pydantic import ValidationError
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.workers.rollout.replica import TokenOutput

from recipe.agents.engines import reasoning_splitter
from recipe.agents.errors import Refused
from recipe.agents.history import IMAGE, History, Message, digests, images, to_render
from recipe.agents.tree import TokenTree

ANSWERS = 1024
"""Number of answers that one trajectory may ask for."""
LETTERS, LETTERS_PER_TOKEN = 1 << 20, 16
"""A request may have `LETTERS` letters, and `LETTERS_PER_TOKEN` more for each token of the longest prompt and response.
Longer texts are refused before they are tokenized, because that would take the worker's time and memory."""
PIXELS = 1 << 26
"""Number of pixels that the images of one request may have."""


@dataclass(frozen=True)
class Ask:
    """The fields of a request, except its messages. ``calls`` says whether the answer may call tools, ``parallel``
    whether it may call several at once. ``begun`` is set when the engines are asked.
    """

    tools: list[Any] = field(default_factory=list)
    calls: bool = True
    parallel: bool = True
    n: int = 1
    stop: list[str] = field(default_factory=list)
    max_tokens: int | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Answer:
    """An answer of the policy, from which the reply to the agent is built."""

    number: int
    text: str
    reasoning: str | None
    calls: list[dict[str, Any]]
    finish: str
    tokens: list[int]
    log_probs: list[float]
    prompt_tokens: int

    def message(self) -> dict[str, Any]:
        """Return the message by which an agent sends this answer back."""
        return {"role": "assistant", "content": self.text, "tool_calls": self.calls}


class Session:
    """The conversations of one trajectory.

    Attributes:
        failure: the first error with which the engines failed a request, or None.
        overlong: whether a request was refused because its conversation left no room for an answer.
        matched: number of requests whose prompt contains an earlier answer's tokens as they were sampled.
        received: number of bytes of all requests.
        unmatched: number of answers that the agent sent back in later requests, but whose sampled tokens could not be
            used again, so that they became context. A later text prompt that repeats no earlier prompt and answer
            counts as one such answer.
    """

    def __init__(
        self, loop: AgentLoopBase, sampling_params: dict[str, Any], context: Context, reasoning: str | None = None
    ) -> None:
        rollout = loop.rollout_config
        self.tree = TokenTree(rollout.prompt_length, rollout.response_length)
        self.outputs: dict[int, TokenOutput] = {}
        self.pictures: dict[int, list[Any]] = {}
        self.failure: BaseException | None = None
        self.overlong = False
        self.matched = self.unmatched = 0
        self.context = context
        self.tokenizer = loop.tokenizer
        self._loop, self._sampling = loop, sampling_params
        self._parser = ToolParser.get_tool_parser(rollout.multi_turn.format, loop.tokenizer)
        self._split_reasoning = reasoning_splitter(reasoning, loop.tokenizer) if reasoning else None
        self._history = History()
        self._request_id = uuid4().hex
        self._calls = count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._texts: list[tuple[str, int]] = []
        self.received = 0
        self._begun = 0
        self._letters = LETTERS + LETTERS_PER_TOKEN * (rollout.prompt_length + rollout.response_length)

    def in_context(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start ``work`` in the trajectory's context; cancel it if the session is closed."""
        # Each request gets a copy of the context, because concurrent requests must not see each other's variables.
        task = asyncio.create_task(work, context=self.context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel the requests that are still open."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def chat(self, messages: Sequence[Message], ask: Ask) -> list[Answer]:
        """Return ``ask.n`` answers to ``messages``, which have OpenAI's form.

        Raises:
            Refused: the request cannot be answered.
        """
        self._check_letters([ask.tools, messages])
        rendered = [to_render(message) for message in messages]
        beginnings = digests(ask.tools, rendered)
        found = self._history.match(beginnings)
        answers_sent = [message["role"] == "assistant" for message in messages]
        if found is not None or self.tree.exchanges:
            self.matched += found is not None
            self.unmatched += sum(answers_sent[found[1] if found else 0 :])
        media, pictures = await self._shown(rendered)
        prompt = await self._prompt(rendered, pictures, found, ask.tools)
        answers = await self._answers(prompt, ask, media, pictures)
        for answer in answers:
            self._history.remember(beginnings, answer.message(), answer.number)
        return answers

    async def complete(self, prompt: str | list[int], ask: Ask) -> list[Answer]:
        """Return ``ask.n`` answers that continue ``prompt``, a text or a list of tokens."""
        self._check_letters(prompt)
        tokens = prompt if isinstance(prompt, list) else self._continued(prompt)
        answers = await self._answers(tokens, ask, [], [])
        if isinstance(prompt, str):
            self._texts += [(prompt, answer.number) for answer in answers]
        return answers

    def _check_letters(self, said: Any) -> None:
        if self.received > self._letters and letters(said) > self._letters:
            raise self._too_long(f"more than {self._letters} letters")

    def _too_long(self, what: str) -> Refused:
        self.overlong = True
        return Refused(
            400,
            f"the conversation has {what}, which leaves no room for an answer "
            f"(data.max_prompt_length, data.max_response_length)",
            code="context_length_exceeded",
            param="messages",
        )

    def _continued(self, text: str) -> list[int]:
        """Return the tokens of a text. If it repeats an earlier prompt and answer, their tokens are used unchanged."""
        best, rest = (0, 0), text
        tokens: list[int] = []
        for before, number in self._texts:
            exchange = self.tree.exchanges[number]
            repeated = self._repeated(text, before, exchange.sampled)
            if repeated and (len(before), repeated) >= best:
                best = (len(before), repeated)
                tokens = [*exchange.prompt, *exchange.sampled[:repeated]]
                rest = text[len(before + self._decoded(exchange.sampled[:repeated])) :]
        if tokens:
            self.matched += 1
        elif self.tree.exchanges:
            self.unmatched += 1
        return tokens + self.tokenizer.encode(rest, add_special_tokens=not tokens)

    def _repeated(self, text: str, before: str, sampled: Sequence[int]) -> int:
        """Return how many tokens of an earlier answer follow ``before`` in ``text``, not counting the end token.

        ``sampled`` are the answer's tokens, and ``before`` is the text of its prompt.
        """
        if not text.startswith(before):
            return 0
        told = len(sampled) - (sampled[-1] == self.tokenizer.eos_token_id)
        ends = range(1, told + 1)
        return bisect_left(ends, True, key=lambda end: not text.startswith(before + self._decoded(sampled[:end])))

    async def _shown(self, rendered: list[dict[str, Any]]) -> tuple[list[str], list[Any]]:
        """Read the images of rendered messages; return the digests of their addresses, and the images."""
        addresses = images(rendered)
        if not addresses:
            return [], []
        if self._loop.processor is None:
            raise Refused(400, "the model does not support images", param="messages")
        left = PIXELS
        for message in rendered:
            for part in message["content"] if isinstance(message["content"], list) else ():
                if part["type"] == "image":
                    part["image"] = pixels(part["image"], left)
                    left -= part["image"].width * part["image"].height
        shown = (await self._loop.process_multi_modal_info(rendered))["images"]
        return [hashlib.sha256(address.encode()).hexdigest() for address in addresses], shown

    async def _prompt(
        self, messages: list[dict[str, Any]], pictures: list[Any], found: tuple[int, int] | None, tools: list[Any]
    ) -> list[int]:
        builder = self._loop.continuous_token_builder
        if found is not None:
            exchange, covered = self.tree.exchanges[found[0]], found[1]
            try:
                merged = await in_thread(
                    builder.merge_context_tokens,
                    messages[:covered],
                    messages,
                    list(exchange.tokens),
                    tools=tools or None,
                )
            except Exception:  # a template that cannot continue the answer by these messages may raise anything
                self.matched, self.unmatched = self.matched - 1, self.unmatched + 1
            else:
                return list(merged.token_ids)
        try:
            return await in_thread(builder.build_initial_tokens, messages, tools=tools or None, images=pictures or None)
        except Exception as error:  # a chat template may raise anything for messages that it does not support
            raise Refused(400, f"the chat template cannot render these messages: {error}", param="messages") from error

    async def _answers(self, prompt: list[int], ask: Ask, media: list[str], pictures: list[Any]) -> list[Answer]:
        room = self.tree.room(prompt, media) if prompt else 0
        if room < 1:
            raise self._too_long(f"{len(prompt)} tokens")
        self._begun += ask.n
        if self._begun > ANSWERS:
            raise Refused(429, f"the trajectory has asked for {ANSWERS} answers", code="rate_limit_exceeded")
        limit = min(room, ask.max_tokens or room)
        ask.begun.set()
        if ask.n == 1:
            return [await self._answer(prompt, ask, limit, media, pictures)]
        async with asyncio.TaskGroup() as tasks:
            each = [tasks.create_task(self._answer(prompt, ask, limit, media, pictures)) for _ in range(ask.n)]
        return [task.result() for task in each]

    async def _answer(self, prompt: list[int], ask: Ask, limit: int, media: list[str], pictures: list[Any]) -> Answer:
        sampling = {**self._sampling, "max_tokens": limit}
        if ask.stop:
            sampling["stop"] = ask.stop
        if ask.tools and self._parser.stop_token_ids:
            sampling["stop_token_ids"] = self._parser.stop_token_ids
        shown = {"image_data": pictures} if pictures else {}
        try:
            output = await self._loop.server_manager.generate(
                request_id=self._request_id, prompt_ids=prompt, sampling_params=sampling, **shown
            )
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.failure = self.failure or error
            raise
        sampled = output.token_ids
        log_probs = output.log_probs or [0.0] * len(sampled)
        number = self.tree.add(prompt, sampled, log_probs, media).number
        self.outputs[number], self.pictures[number] = output, pictures
        text, reasoning, calls, stopped = await self._told(sampled, ask)
        finish = "tool_calls" if calls else "stop"
        if len(sampled) >= limit and not stopped and not calls and sampled[-1] != self.tokenizer.eos_token_id:
            finish = "length"
        return Answer(number, text, reasoning, calls, finish, list(sampled), list(log_probs), len(prompt))

    async def _told(self, sampled: Sequence[int], ask: Ask) -> tuple[str, str | None, list[dict[str, Any]], bool]:
        """Return the text of an answer, its reasoning, its tool calls, and whether a stop string ended it."""
        ended = len(sampled) - 1 if sampled[-1] == self.tokenizer.eos_token_id else len(sampled)
        text, calls = "", list[FunctionCall]()
        if ask.tools and ask.calls:
            text, calls = await self._parser.extract_tool_calls(list(sampled[:ended]), schemas(ask.tools))
        if not calls:
            text = self._decoded(sampled)
        reasoning = None
        if self._split_reasoning is not None:
            reasoning, text = self._split_reasoning(text)
        places = [place for word in ask.stop if not calls and (place := text.find(word)) >= 0]
        told = [
            {
                # Mistral's templates need ids of nine letters and digits. A resumed run makes the same ids again.
                "id": f"call{next(self._calls):05d}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in (calls if ask.parallel else calls[:1])
        ]
        return text[: min(places)] if places else text, reasoning, told, bool(places)

    def _decoded(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


async def in_thread(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, partial(function, *arguments, **named))


def schemas(tools: Sequence[Any]) -> list[OpenAIFunctionToolSchema]:
    """Return the tools that verl's types can describe. For other tools, parsers have to do without argument types."""
    described = []
    for tool in tools:
        try:
            described.append(OpenAIFunctionToolSchema(**tool))
        except ValidationError:
            continue
    return described


def letters(said: Any) -> int:
    """Return the length of all texts in a JSON value, except images, which have a limit of their own."""
    if isinstance(said, str):
        return len(said)
    if isinstance(said, dict):
        return sum(letters(each) for name, each in said.items() if name != IMAGE)
    return sum(map(letters, said)) if isinstance(said, list | tuple) else 1


def pixels(address: str, most: int = PIXELS) -> Image.Image:
    """Return the image in a ``data:`` URL. Other URLs are refused: an agent could make the worker contact any server.

    An image of more than ``most`` pixels is refused before it is decoded.
    """
    head, _, data = address.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64"):
        raise Refused(400, "images have to be data: URLs in base64", param="messages")
    try:
        image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
        if image.width * image.height > most:
            raise ValueError(f"the images of a request have more than {PIXELS} pixels")
        return image.convert("RGB")
    except Exception as error:  # Pillow raises errors of many classes for data that is not an image
        raise Refused(400, f"an image cannot be read: {error}", param="messages") from error
