# SPDX-License-Identifier: Apache-2.0
"""An agent loop that rewrites its context after each answer, so that a trajectory has one to three outputs.

``ASKED`` in the environment is a file that gets a line for each answer: the texts of its prompt and of its tokens, and
the versions that sampled these by this package's client, if it has one.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from recipe.async_engine.rollout.kept_answers import current_recorder
from recipe.laptop.task import TaskPaths

MOST = 3
KEPT = 2


def count_of(index: int, session: int) -> int:
    """Return how many outputs the trajectory of this number has, of a prompt at ``index`` in the data."""
    return 1 + (index + session * (index // 9)) % MOST


def trajectories_of(index: int) -> int:
    """Return how many trajectories a prompt has: with their outputs, a group has 1 to 9 rows."""
    return 1 + index // MOST % MOST


def with_rollout_n(data: str | Path, to: Path) -> Path:
    """Write a copy of a data file in which each prompt says its number of trajectories."""
    table = pandas.read_parquet(data)
    table["__rollout_n__"] = [trajectories_of(index) for index in range(len(table))]
    table.to_parquet(to)
    return to


def lists(task: TaskPaths, folder: Path) -> list[str]:
    """Overrides for `SplittingLoop` on data that say each prompt's number of trajectories."""
    loops = folder / "agent_loops.yaml"
    loops.write_text("- name: splitting\n  _target_: splitting_loop.SplittingLoop\n")
    rollout = "actor_rollout_ref.rollout"
    return [
        f"data.train_files={with_rollout_n(task.train, folder / 'train.parquet')}",
        f"{rollout}.agent.agent_loop_config_path={loops}",
        f"{rollout}.agent.default_agent_loop=splitting",
        f"{rollout}.n=2",
    ]


class SplittingLoop(AgentLoopBase):
    """Each answer's context is the prompt, two digits that tell it from all others, and the answer before."""

    def outputs_of(self, index: int, session: int) -> int:
        return count_of(index, session)

    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> list[AgentLoopOutput]:
        index, session = int(sample["extra_info"]["index"]), int(sample["session_id"])
        prompt = await self.ct_build_initial_tokens(list(sample["raw_prompt"]))
        outputs: list[AgentLoopOutput] = []
        kept: list[int] = []
        for number in range(self.outputs_of(index, session)):
            context = [*prompt, *self.tokenizer.encode(f"{session}{number}", add_special_tokens=False), *kept]
            digest = hashlib.sha256(str(context).encode()).digest()
            recorder = current_recorder()
            before = 0 if recorder is None else len(recorder.segments)
            answer = await self.server_manager.generate(
                request_id=f"{sample['uid']}-{session}",
                prompt_ids=context,
                sampling_params={**sampling_params, "seed": int.from_bytes(digest[:4]), "max_tokens": 6},
            )
            outputs.append(
                AgentLoopOutput(
                    prompt_ids=context,
                    response_ids=answer.token_ids,
                    response_mask=[1] * len(answer.token_ids),
                    response_logprobs=answer.log_probs,
                    num_turns=2,
                    metrics=AgentLoopMetrics(),
                    extra_fields={
                        name: value for name, value in answer.extra_fields.items() if name.endswith("_global_steps")
                    },
                )
            )
            self.note(outputs[-1], [] if recorder is None else recorder.segments[before:])
            kept = answer.token_ids[:KEPT]
        return outputs

    def note(self, output: AgentLoopOutput, segments: list[Any]) -> None:
        line = {
            "input": self.tokenizer.decode(output.prompt_ids, skip_special_tokens=True),
            "output": self.tokenizer.decode(output.response_ids, skip_special_tokens=True),
            "tokens": len(output.response_ids),
            "runs": [(version, len(tokens)) for version, tokens in segments],
        }
        if "ASKED" in os.environ:
            with Path(os.environ["ASKED"]).open("a") as file:
                file.write(json.dumps(line) + "\n")


class OneOrThree(SplittingLoop):
    """Each second trajectory has three outputs and the others have one."""

    def outputs_of(self, index: int, session: int) -> int:
        return 1 + session % 2 * 2


def token_ages(runs: list[tuple[int, int]], version: int) -> np.ndarray:
    """Return the age of each token, int64 (tokens,), when it is trained at ``version``."""
    return version - np.repeat([each for each, _ in runs], [count for _, count in runs])
