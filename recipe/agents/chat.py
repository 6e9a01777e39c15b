# SPDX-License-Identifier: Apache-2.0
"""Reads requests to OpenAI's ``chat/completions`` and ``completions``, and builds the replies, with OpenAI's own types.

A request that asks for what the policy cannot do (another output format, biased tokens, top log-probs) is refused with
an error that names the field. Fields that only steer sampling (temperature, seed, penalties) are ignored, because the
run's settings decide about sampling. Fields without a meaning here (user, store, metadata) are ignored too. A streamed
reply is sent only after the whole answer is sampled, because the answer may be interrupted until then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionMessageParam,
    ChatCompletionTokenLogprob,
)
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_function_tool_param import ChatCompletionFunctionToolParam
from openai.types.completion_choice import Logprobs
from pydantic import TypeAdapter, ValidationError

from recipe.agents.errors import Refused
from recipe.agents.session import Answer, Ask

MOST_ANSWERS = 128
MOST_STOPS = 16
UNAVAILABLE = (
    *("audio", "chat_template_kwargs", "echo", "function_call", "functions", "logit_bias", "prediction", "suffix"),
    "top_logprobs",
)
Decode = Callable[[Sequence[int]], str]


def ask_of(body: Mapping[str, Any]) -> Ask:
    """Return the fields of a request's body as an `Ask`, except its messages or prompt.

    Raises:
        Refused: a field has an invalid value, or asks for something that is not supported.
    """
    for name in UNAVAILABLE:
        if body.get(name):
            raise Refused(400, f"the field {name} is not supported", code="unsupported_parameter", param=name)
    kind = (body.get("response_format") or {"type": "text"}).get("type")
    if kind != "text":
        raise Refused(400, f"the output format {kind!r} is not supported", "unsupported_value", "response_format")
    stop = body.get("stop") or []
    stop = checked("stop", list[str], [stop] if isinstance(stop, str) else stop)
    if len(stop) > MOST_STOPS:
        raise Refused(400, f"stop: at most {MOST_STOPS} texts are supported", "invalid_value", "stop")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return Ask(
        tools=checked("tools", list[ChatCompletionFunctionToolParam], body.get("tools") or []),
        calls=body.get("tool_choice") != "none",
        parallel=body.get("parallel_tool_calls") is not False,
        n=within("n", body.get("n") or 1, MOST_ANSWERS),
        stop=stop,
        max_tokens=None if limit is None else within("max_tokens", limit),
    )


def within(name: str, value: Any, most: int = 2**31) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise Refused(400, f"{name}={value!r} is not a whole number from 1 to {most}", "invalid_value", name)
    return value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def checked(name: str, kind: Any, value: Any) -> Any:
    """Return ``value`` if it is a valid ``kind``.

    Raises:
        Refused: it is not valid. The message has the first validation error.
    """
    try:
        _read([_adapter(kind).validate_python(value)])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, (name, *first["loc"])))
        raise Refused(400, f"{where}: {first['msg']}", "invalid_value", name) from None
    return value


def _read(value: Any) -> None:
    """Iterate over all of a validated value, because pydantic validates the items of an ``Iterable`` only then."""
    for each in value.values() if isinstance(value, dict) else value:
        if not isinstance(each, str | bytes) and hasattr(each, "__iter__"):
            _read(each)


def messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat request; raise Refused if there are none, or if one is invalid."""
    messages = body.get("messages")
    if isinstance(messages, list):
        # OpenAI's API accepts null for an omitted field, although OpenAI's types do not allow it.
        messages = [
            {name: value for name, value in message.items() if value is not None}
            if isinstance(message, dict)
            else message
            for message in messages
        ]
    checked("messages", list[ChatCompletionMessageParam], messages)
    if not messages:
        raise Refused(400, "messages: at least one is required", "invalid_value", "messages")
    found: list[dict[str, Any]] = messages
    return found


def usage(answers: Sequence[Answer]) -> CompletionUsage:
    prompt, sampled = answers[0].prompt_tokens, sum(len(answer.tokens) for answer in answers)
    return CompletionUsage(prompt_tokens=prompt, completion_tokens=sampled, total_tokens=prompt + sampled)


def chat_completion(body: Mapping[str, Any], answers: Sequence[Answer], decode: Decode) -> ChatCompletion:
    """Return the reply to a chat request, with one choice for each answer."""
    return ChatCompletion(
        id=f"chatcmpl-{answers[0].number}",
        choices=[
            Choice(
                index=index,
                finish_reason=answer.finish,  # type: ignore[arg-type]
                message=_message(answer),
                logprobs=ChoiceLogprobs(content=_log_probs(answer, decode)) if body.get("logprobs") else None,
            )
            for index, answer in enumerate(answers)
        ],
        created=int(time.time()),
        model=str(body.get("model")),
        object="chat.completion",
        usage=usage(answers),
    )


def _message(answer: Answer) -> ChatCompletionMessage:
    more: dict[str, Any] = {"tool_calls": answer.calls} if answer.calls else {}
    if answer.reasoning is not None:
        more["reasoning_content"] = answer.reasoning
    content = answer.text if answer.text or not answer.calls else None
    return ChatCompletionMessage(role="assistant", content=content, refusal=None, **more)


def _log_probs(answer: Answer, decode: Decode) -> list[ChatCompletionTokenLogprob]:
    return [
        ChatCompletionTokenLogprob(
            token=(text := decode([token])), bytes=list(text.encode()), logprob=log_prob, top_logprobs=[]
        )
        for token, log_prob in zip(answer.tokens, answer.log_probs, strict=True)
    ]


def chat_chunks(body: Mapping[str, Any], answers: Sequence[Answer], decode: Decode) -> Iterator[ChatCompletionChunk]:
    """Yield the chunks of the streamed reply to a chat request. The text of each answer is a single chunk."""
    whole = chat_completion(body, answers, decode)
    options = body.get("stream_options") or {}

    def chunk(*choices: ChunkChoice, **more: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=whole.id,
            choices=list(choices),
            created=whole.created,
            model=whole.model,
            object="chat.completion.chunk",
            **more,
        )

    for choice, answer in zip(whole.choices, answers, strict=True):
        said = choice.message
        yield chunk(ChunkChoice(index=choice.index, delta=ChoiceDelta(role="assistant", content="")))
        if answer.reasoning:
            thought: dict[str, Any] = {"reasoning_content": answer.reasoning}
            yield chunk(ChunkChoice(index=choice.index, delta=ChoiceDelta(**thought)))
        if said.content:
            logprobs = None if choice.logprobs is None else ChunkLogprobs(content=choice.logprobs.content)
            yield chunk(ChunkChoice(index=choice.index, delta=ChoiceDelta(content=said.content), logprobs=logprobs))
        for number, call in enumerate(answer.calls):
            delta = ChoiceDelta.model_validate({"tool_calls": [{"index": number, **call}]})
            yield chunk(ChunkChoice(index=choice.index, delta=delta))
        yield chunk(ChunkChoice(index=choice.index, delta=ChoiceDelta(), finish_reason=choice.finish_reason))
    if options.get("include_usage"):
        yield chunk(usage=whole.usage)


def prompt_of(body: Mapping[str, Any]) -> str | list[int]:
    """Return the only prompt of a completion request, as a text or a list of tokens."""
    prompt = checked("prompt", str | list[str] | list[int] | list[list[int]], body.get("prompt"))
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) != 1:
            raise Refused(400, "prompt: only one per request is supported", "unsupported_value", "prompt")
        prompt = prompt[0]
    if not prompt:
        raise Refused(400, "prompt: it must not be empty", "invalid_value", "prompt")
    found: str | list[int] = prompt
    return found


def completion(body: Mapping[str, Any], answers: Sequence[Answer], decode: Decode) -> Completion:
    """Return the reply to a completion request, with one choice for each answer."""
    return Completion(
        id=f"cmpl-{answers[0].number}",
        choices=[
            CompletionChoice(
                index=index,
                finish_reason=answer.finish,  # type: ignore[arg-type]
                text=answer.text,
                logprobs=Logprobs(tokens=[decode([token]) for token in answer.tokens], token_logprobs=answer.log_probs)
                if body.get("logprobs") is not None
                else None,
            )
            for index, answer in enumerate(answers)
        ],
        created=int(time.time()),
        model=str(body.get("model")),
        object="text_completion",
        usage=usage(answers),
    )
