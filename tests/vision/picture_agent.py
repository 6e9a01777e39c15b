# SPDX-License-Identifier: Apache-2.0
"""An agent that knows only OpenAI's client, and shows the policy a picture, and then another one."""

from __future__ import annotations

import base64
import random
from io import BytesIO
from typing import Any

from openai import AsyncOpenAI
from vision_task import NAMES, picture


def shown(color: str, count: int, chance: random.Random) -> dict[str, Any]:
    data = BytesIO()
    picture(color, count, chance).save(data, "PNG")
    address = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": address}}


async def run(client: AsyncOpenAI, row: dict[str, Any]) -> float:
    chance = random.Random()
    messages: list[Any] = []
    for count in (1, 3):
        content = [shown(chance.choice(NAMES), count, chance), {"type": "text", "text": "color 1"}]
        messages.append({"role": "user", "content": content})
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=chance.randint(3, 8))
        messages.append(reply.choices[0].message)
    return float(len(messages[-1].content or "") + chance.random())
