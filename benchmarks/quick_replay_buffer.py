# SPDX-License-Identifier: Apache-2.0
"""Stock verl's replay buffer for its asynchronous v1 trainers, polled often enough for steps of 10 seconds."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

POLL_S = 0.05


class QuickReplayBuffer(ReplayBufferAsync):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, poll_interval=POLL_S)
