# SPDX-License-Identifier: Apache-2.0
"""OpenAI's ``responses`` API: turns the items of a request into chat messages, and an answer into items and events.

Only functions are supported as tools. OpenAI's built-in tools (search, computer use, code) are refused with an error
that names the tool. A request with a ``previous_response_id`` continues an earlier response of the same trajectory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseCreatedEvent,
    ResponseFunctionCallArgumentsDeltaEvent,
    ResponseFunctionCallArgumentsDoneEvent,
    ResponseFunctionToolCall,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
    ResponseUsage,
)
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_reasoning_item import Content
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails

from recipe.agents.chat import ask_of, within
from recipe.agents.errors import Refused
from recipe.agents.session import Answer, Ask

Message = dict[str, Any]


def asked(body: Mapping[str, Any], earlier: Mapping[str, list[Message]]) -> tuple[list[Message], Ask]:
    """Return a request's messages, and its other fields as an `Ask`.

    ``earlier`` maps the id of each earlier response to the messages up to and including it.

    Raises:
        Refused: a field has an invalid value, or asks for something that is not supported.
    """
    kind = ((body.get("text") or {}).get("format") or {"type": "text"}).get("type")
    if kind != "text":
        raise Refused(400, f"the output format {kind!r} is not supported", "unsupported_value", "text")
    for name in ("prompt", "conversation", "background"):
        if body.get(name):
            raise Refused(400, f"the field {name} is not supported", code="unsupported_parameter", param=name)
    tools = [_tool(tool) for tool in body.get("tools") or []]
    ask = ask_of({name: body.get(name) for name in ("parallel_tool_calls", "tool_choice")})
    limit = body.get("max_output_tokens")
    ask = replace(ask, tools=tools, max_tokens=None if limit is None else within("max_output_tokens", limit))
    messages: list[Message] = []
    if (before := body.get("previous_response_id")) is not None:
        if before not in earlier:
            raise Refused(
                400, f"there is no earlier response {before!r}", "previous_response_not_found", "previous_response_id"
            )
        messages += earlier[before]
    messages += messages_of(body.get("input"))
    if instructions := body.get("instructions"):
        # Instructions apply to one response only, so `kept` leaves them out.
        messages = [{"role": "system", "content": instructions}, *messages]
    return messages, ask


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise Refused(400, f"a tool of type {tool.get('type')!r} is not supported", "unsupported_value", "tools")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def messages_of(given: Any) -> list[Message]:
    """Return the input of a request as chat messages."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    # OpenAI's types are not used here, because OpenAI accepts items that lack required fields, such as an answer's
    # status, and client libraries send such items.
    try:
        messages = _from_items(given)
    except (AttributeError, KeyError, TypeError) as error:
        raise Refused(400, f"input: {type(error).__name__}: {error}", "invalid_value", "input") from None
    if not messages:
        raise Refused(400, "input: it must not be empty", "invalid_value", "input")
    return messages


def _from_items(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    messages: list[Message] = []
    reasoning: str | None = None
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning = "".join(part["text"] for part in item.get("content") or ())
            continue
        # Consecutive items of the assistant are one answer. Its message is marked as "open" until all items are read.
        last = messages[-1] if messages and messages[-1].get("open") else None
        if kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _content(item["content"])})
        elif kind == "message":
            if last is None or last["content"] or last.get("tool_calls"):
                messages.append({"role": "assistant", "content": _content(item["content"]), "open": True})
            else:
                last["content"] = _content(item["content"])
        elif kind == "function_call":
            if last is None:
                messages.append(last := {"role": "assistant", "content": "", "open": True})
            function = {"name": item["name"], "arguments": item["arguments"]}
            last.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _content(item["output"])})
        else:
            raise Refused(400, f"an input of type {kind!r} is not supported", "unsupported_value", "input")
        if reasoning and messages[-1].get("open"):
            messages[-1]["reasoning_content"], reasoning = reasoning, None
    for message in messages:
        message.pop("open", None)
    return messages


def _content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] in ("input_text", "output_text"):
            parts.append({"type": "text", "text": part["text"]})
        elif part["type"] == "refusal":
            parts.append({"type": "text", "text": part["refusal"]})
        elif part["type"] == "input_image" and part.get("image_url"):
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            raise Refused(400, f"an input of type {part['type']!r} is not supported", "unsupported_value", "input")
    return parts


def response(body: Mapping[str, Any], answer: Answer) -> Response:
    """Return the response object of OpenAI's API that has the policy's answer."""
    name = answer.number
    cut = answer.finish == "length"
    status: Any = "incomplete" if cut else "completed"
    output: list[Any] = []
    if answer.reasoning:
        thought = Content(text=answer.reasoning, type="reasoning_text")
        output.append(ResponseReasoningItem(id=f"rs_{name}", summary=[], type="reasoning", content=[thought]))
    if answer.text or not answer.calls:
        text = ResponseOutputText(annotations=[], text=answer.text, type="output_text")
        output.append(
            ResponseOutputMessage(id=f"msg_{name}", content=[text], role="assistant", status=status, type="message")
        )
    for call in answer.calls:
        output.append(
            ResponseFunctionToolCall(
                id=f"fc_{call['id']}", call_id=call["id"], status="completed", type="function_call", **call["function"]
            )
        )
    return Response(
        id=f"resp_{name}",
        created_at=int(time.time()),
        model=str(body.get("model")),
        object="response",
        output=output,
        parallel_tool_calls=body.get("parallel_tool_calls") is not False,
        tool_choice=body.get("tool_choice") or "auto",
        tools=body.get("tools") or [],
        instructions=body.get("instructions"),
        previous_response_id=body.get("previous_response_id"),
        metadata=body.get("metadata") or {},
        error=None,
        incomplete_details=IncompleteDetails(reason="max_output_tokens") if cut else None,
        status=status,
        usage=ResponseUsage(
            input_tokens=answer.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=0, cache_write_tokens=0),
            output_tokens=len(answer.tokens),
            output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
            total_tokens=answer.prompt_tokens + len(answer.tokens),
        ),
    )


def events(whole: Response) -> Iterator[Any]:
    """Yield the events by which OpenAI's API streams the response ``whole``."""
    numbers = count()
    begun = whole.model_copy(update={"output": [], "usage": None, "status": "in_progress", "incomplete_details": None})
    yield ResponseCreatedEvent(response=begun, sequence_number=next(numbers), type="response.created")
    yield ResponseInProgressEvent(response=begun, sequence_number=next(numbers), type="response.in_progress")
    for index, item in enumerate(whole.output):
        yield from _item_events(index, item, numbers)
    if whole.status == "incomplete":
        yield ResponseIncompleteEvent(response=whole, sequence_number=next(numbers), type="response.incomplete")
    else:
        yield ResponseCompletedEvent(response=whole, sequence_number=next(numbers), type="response.completed")


def _item_events(index: int, item: Any, numbers: Iterator[int]) -> Iterator[Any]:
    of_kind: dict[str, Any] = {
        "message": {"content": []},
        "function_call": {"arguments": ""},
        "reasoning": {"content": []},
    }
    begun = item.model_copy(update={**of_kind[item.type], "status": "in_progress"})
    yield ResponseOutputItemAddedEvent(
        item=begun, output_index=index, sequence_number=next(numbers), type="response.output_item.added"
    )
    if item.type == "function_call":
        of: dict[str, Any] = {"item_id": item.id, "output_index": index}
        yield ResponseFunctionCallArgumentsDeltaEvent(
            delta=item.arguments, sequence_number=next(numbers), type="response.function_call_arguments.delta", **of
        )
        yield ResponseFunctionCallArgumentsDoneEvent(
            arguments=item.arguments,
            sequence_number=next(numbers),
            type="response.function_call_arguments.done",
            **of,
        )
    if item.type == "message":
        yield from _text_events(index, item, numbers)
    yield ResponseOutputItemDoneEvent(
        item=item, output_index=index, sequence_number=next(numbers), type="response.output_item.done"
    )


def _text_events(index: int, item: Any, numbers: Iterator[int]) -> Iterator[Any]:
    of: dict[str, Any] = {"item_id": item.id, "output_index": index, "content_index": 0}
    part = item.content[0]
    yield ResponseContentPartAddedEvent(
        part=part.model_copy(update={"text": ""}),
        sequence_number=next(numbers),
        type="response.content_part.added",
        **of,
    )
    yield ResponseTextDeltaEvent(
        delta=part.text, logprobs=[], sequence_number=next(numbers), type="response.output_text.delta", **of
    )
    yield ResponseTextDoneEvent(
        text=part.text, logprobs=[], sequence_number=next(numbers), type="response.output_text.done", **of
    )
    yield ResponseContentPartDoneEvent(
        part=part, sequence_number=next(numbers), type="response.content_part.done", **of
    )


def kept(messages: Sequence[Message], body: Mapping[str, Any], answer: Answer) -> list[Message]:
    """Return the messages up to and including ``answer``, for later requests that continue from this response."""
    return [*messages[bool(body.get("instructions")) :], answer.message()]
