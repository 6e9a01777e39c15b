# SPDX-License-Identifier: Apache-2.0
"""Behaviours of users' tools as a table, and as a file of tools for verl's ``multi_turn.function_tool_path``.

verl's tool loop tells the policy what a tool raises or returns, so most of them fail nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from odd_errors import WORDS
from odd_functions import RAISING, RETURNED
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse

RESULTS: dict[str, Any] = {
    "text": "7",
    "nothing": None,
    "a number": 7,
    "a list": [1, 2],
    "a dict": {"text": "7"},
    "a dict of others": {"answer": 7},
    "a response": ToolResponse(text="7"),
    "an empty response": ToolResponse(),
    "a reward beside it": ("7", 0.5),
    "a reward of text": ("7", "much"),
    "a reward that is none": ("7", float("nan")),
    "a reward that is a lock": ("7", lambda: 0, {}),
    "metrics beside it": ("7", 0.5, {"seconds": 1}),
    "four things": (1, 2, 3, 4),
    "an image": ToolResponse(text="7", image=["no image"]),
    "a film": ToolResponse(text="7", video=["no film"]),
    "a megabyte": "x" * 1_000_000,
    "half a character": "\ud800",
    "bytes": b"7",
    "an object": object(),
    "itself in a list": RETURNED["a field in itself"][0]["extra_fields"]["mine"],
    "an exception": ValueError(WORDS),
    "a call of itself": '<tool_call>{"name": "odd", "arguments": {"way": "returns a call of itself"}}</tool_call>',
    "the end of the turn": "<|end|><|user|>",
    "a terminal's commands": "\x1b[2J\x1b[31m",
    "a generator": (number for number in range(3)),
    "a class": ToolResponse,
}
UNUSABLE = {
    "returns an image": "image|processor|multi",
    "returns a film": "video|processor|Multi",
    # No tokenizer accepts it.
    "returns half a character": "TypeError",
    "raises half a character": "TypeError",
    "raises cannot say what it is": WORDS,
    "raises exits when it is asked": WORDS,
    "raises text of its own class": "no text",
    "raises says a number": "__str__ returned non-string",
}
"""Tools for which verl's loop itself raises this error."""
# verl does not truncate the message of a tool's exception: megabytes keep a tokenizer busy for minutes, until the
# deadline.
TOO_LONG = {"ten megabytes of words", "many lines"}

TOOLS: dict[str, Callable[[], Any]] = {
    **{f"raises {name}": function for name, (function, _) in RAISING.items() if name not in TOO_LONG},
    **{f"returns {name}": (lambda given=given: given) for name, given in RESULTS.items()},
}


def words_of(name: str, where: str = "odd") -> str | None:
    """Return the error of a group with such a tool, or None. ``where``: which of the tools below it is."""
    if (name, where) == ("raises StopIteration", "odd_in_a_thread"):
        # No future can hold it, so verl waits for ever.
        return "was not done within"
    if name in UNUSABLE:
        return UNUSABLE[name]
    function, words = RAISING.get(name.removeprefix("raises "), (None, None))
    return None if function is None or _verl_says(function) else words


def _verl_says(function: Callable[[], Any]) -> bool:
    """Return whether verl's tool loop tells the policy what the function raises, if it raises."""
    try:
        function()
    except Exception as error:
        try:
            return isinstance(f"{error}", str)
        except BaseException:
            return False
    except BaseException:
        return False
    return True


def _schema(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"way": {"type": "string"}}, "required": ["way"]}
    return {"type": "function", "function": {"name": name, "description": "a tool", "parameters": parameters}}


@function_tool("odd", schema=_schema("odd"))
async def odd(way: str) -> Any:
    return TOOLS[way]()


@function_tool("odd_in_a_thread", schema=_schema("odd_in_a_thread"))
def odd_in_a_thread(way: str) -> Any:
    return TOOLS[way]()
