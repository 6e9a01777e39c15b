# SPDX-License-Identifier: Apache-2.0
"""Finds the policy's earlier answers in the messages of a request, because agents resend the whole conversation.

Contract: `History.match` finds the longest beginning of a request's messages that consists of an earlier request's
messages and the policy's answer to it. Messages are compared by role, text, tool calls and images. Spaces around a
text, the layout of a call's arguments, ids of calls, reasoning and fields without a value may differ, because client
libraries change them. `to_render` gives messages the form that chat templates expect. Shown by
tests/core/test_agent_history.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

Message = Mapping[str, Any]
IMAGE = "image_url"


class History:
    """Maps a digest of each earlier request of one trajectory with its answer to the number of their `Exchange`."""

    def __init__(self) -> None:
        self._known: dict[bytes, int] = {}

    def match(self, beginnings: Sequence[bytes]) -> tuple[int, int] | None:
        """Return the number of the exchange that a request continues, and how many of the request's messages repeat
        that exchange (its request and answer). If the request continues no exchange, return None.

        ``beginnings`` are the request's `digests`.
        """
        # A request has at least one message after the answer that it continues, so its last message is never covered.
        for covered in range(len(beginnings) - 2, 0, -1):
            if (number := self._known.get(beginnings[covered])) is not None:
                return number, covered
        return None

    def remember(self, beginnings: Sequence[bytes], answer: Message, number: int) -> None:
        """Remember that ``answer``, of exchange ``number``, answers the request whose `digests` are ``beginnings``."""
        self._known[_digest(beginnings[-1], meaning(to_render(answer)))] = number


def digests(tools: Sequence[Any], messages: Sequence[Message]) -> list[bytes]:
    """Return a digest of each prefix of ``messages``, from the empty one to the whole. Each includes ``tools``.

    The messages are those that `to_render` returned.
    """
    return list(accumulate(map(meaning, messages), _digest, initial=_digest(b"", list(tools))))


def _digest(before: bytes, value: Any) -> bytes:
    return hashlib.blake2b(before + _dumped(value).encode(), digest_size=16).digest()


def _dumped(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def meaning(said: Message) -> dict[str, Any]:
    """Return the parts of a rendered message that `History` compares; client libraries may change the other parts."""
    role = said["role"]
    content = said["content"].strip() if isinstance(said["content"], str) else said["content"]
    calls = [call["function"] for call in said.get("tool_calls", ())]
    return {"role": role, "content": content, "calls": calls}


def to_render(message: Message) -> dict[str, Any]:
    """Return a message in the form that chat templates expect: text as one string, and arguments as mappings."""
    role = "system" if message["role"] == "developer" else message["role"]
    rendered: dict[str, Any] = {"role": role, "content": _content(message.get("content"))}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.get(name):
            rendered[name] = message[name]
    if calls := message.get("tool_calls"):
        rendered["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": arguments(call["function"]["arguments"])},
            }
            for call in calls
        ]
    return rendered


def _content(content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    parts = list(content)
    if any(part["type"] == IMAGE for part in parts):
        return [
            {"type": "image", "image": part[IMAGE]["url"]}
            if part["type"] == IMAGE
            else {"type": "text", "text": _text(part)}
            for part in parts
        ]
    return "".join(map(_text, parts))


def _text(part: Message) -> str:
    text: str = part.get("text") or part.get("refusal") or ""
    return text


def arguments(text: Any) -> Any:
    """Return a tool call's arguments as a mapping, or unchanged if they are not the JSON text of an object."""
    if not isinstance(text, str):
        return text
    try:
        parsed = json.loads(text)
    except ValueError:
        return text
    return parsed if isinstance(parsed, dict) else text


def images(messages: Sequence[Message]) -> list[str]:
    """Return, in order, the addresses of all images in messages that `to_render` returned."""
    return [
        part["image"]
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] == "image"
    ]
