# SPDX-License-Identifier: Apache-2.0
"""A sampler of verl's v1 trainers whose batches are in the order of the prompts, of their trajectories and outputs."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class OrderedReplayBuffer(ReplayBuffer):
    """verl's own leaves a batch in the order in which its answers were stored."""

    def _materialize_batch(self, partition_id: str, selected_prompt_uids: list[str], snapshot: dict[str, dict]) -> Any:
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, snapshot)
        issued = list(self.prompt_global_steps[partition_id])

        def place(row: int) -> tuple[int, int, int]:
            uid, session, output = batch.keys[row].rsplit("_", 2)
            return issued.index(uid), int(session), int(output)

        batch.reorder(sorted(range(len(batch)), key=place))
        return batch
