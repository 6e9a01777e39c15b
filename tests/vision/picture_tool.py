# SPDX-License-Identifier: Apache-2.0
"""A tool for verl's tool agent loop that returns a picture: that of the prompt, in the next color."""

from __future__ import annotations

import random
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from vision_task import COLORS, NAMES, following, picture


class Turned(BaseTool):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, dict]:
        first = kwargs["agent_data"].image_data[0]
        color = next(name for name, value in COLORS.items() if value == first.getpixel((1, 1)))
        return ToolResponse(image=[picture(following(NAMES, color), 4, random.Random(0))]), 0.0, {}
