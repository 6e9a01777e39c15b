# SPDX-License-Identifier: Apache-2.0
"""verl's single-turn agent loop with a sampling seed for each request, so that two runs sample the same answers."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

_uids: dict[int, list[str]] = {}
_answers: Counter[str] = Counter()


class SeededAgentLoop(SingleTurnAgentLoop):
    """The seed depends on the prompt, how often it came before, and which of its answers this is."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        index, uid = int(kwargs["extra_info"]["index"]), str(kwargs["uid"])
        uids = _uids.setdefault(index, [])
        if uid not in uids:
            uids.append(uid)
        name = f"{index} {uids.index(uid)} {_answer(uid)}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
        return await super().run({**sampling_params, "seed": seed}, **kwargs)


def _answer(uid: str) -> int:
    """Return this task's answer number, from its name or, in stock verl, from the order of starts."""
    task = asyncio.current_task()
    assert task is not None
    named = re.fullmatch(r"trajectory \d+-(\d+)-\d+", task.get_name())
    _answers[uid] += 1
    return int(named[1]) if named else _answers[uid] - 1
