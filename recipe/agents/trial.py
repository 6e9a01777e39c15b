# SPDX-License-Identifier: Apache-2.0
"""``python -m recipe.agents.try`` runs an agent over data rows without a trainer, and shows what would be trained.

It starts an engine's server with the model on loopback, or uses a running one. As in a training run, the agent gets an
address and a key of its own for each row. Tokens that the policy sampled are printed in bold, and context tokens are
dim. Each line of the file that ``--out`` names is one sequence, as training would see it. Shown by
tests/e2e/test_agents.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.dataset
from omegaconf import OmegaConf
from rich.console import Console
from rich.text import Text
from transformers import AutoConfig
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset

from recipe.agents.engines import ServerClient, server
from recipe.agents.loop import OpenAIAgentLoop

SHOWN = {True: "bold", False: "dim"}


class Trial:
    """Runs an agent over rows, and shows and writes the sequences that training would see."""

    def __init__(self, options: argparse.Namespace, client: ServerClient) -> None:
        lengths = {"prompt_length": options.prompt_length, "response_length": options.response_length}
        rollout = {**lengths, "multi_turn": {"format": options.tools}}
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
        self.tokenizer = hf_tokenizer(options.model)
        self._made = {
            "trainer_config": DictConfigWrap(config),
            "server_manager": client,
            "tokenizer": self.tokenizer,
            "processor": hf_processor(options.model),
            "dataset_cls": RLHFDataset,
            "data_config": DictConfigWrap(config.data),
            "hf_model_type": AutoConfig.from_pretrained(options.model).model_type,
            "agent": options.agent,
            "command": options.command,
            "at_once": options.at_once,
            "deadline_s": options.deadline,
            "reasoning": options.reasoning,
        }
        self._sampling = {"temperature": options.temperature, "logprobs": True}
        self._console = Console(highlight=False)

    async def run(self, number: int, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Run the agent for a row, show the trajectory, and return its sequences for ``--out`` ([] on failure)."""
        try:
            returned = await OpenAIAgentLoop(**self._made).run(dict(self._sampling), **row)
        except Exception as error:  # a user's agent may raise anything
            self._console.print(Text(f"row {number} failed: {type(error).__name__}: {error}", "red"))
            return []
        outputs = returned if isinstance(returned, list) else [returned]
        self._show(number, outputs)
        return [{"row": number, **output.model_dump(exclude={"metrics", "multi_modal_data"})} for output in outputs]

    def _show(self, number: int, outputs: list[AgentLoopOutput]) -> None:
        sampled = sum(sum(output.response_mask) for output in outputs)
        told = [
            f"row {number}",
            f"reward {outputs[-1].reward_score}",
            f"{sampled} tokens sampled",
            f"sequences to train: {len(outputs)}",
            f"answers sent back changed: {outputs[-1].extra_fields['agent_unmatched_share']:.0%}",
        ]
        self._console.rule(", ".join(told))
        for output in outputs:
            text = Text(self.tokenizer.decode(output.prompt_ids), "dim")
            tokens = zip(output.response_mask, output.response_ids, strict=True)
            for is_sampled, run in groupby(tokens, key=lambda token: bool(token[0])):
                text.append(self.tokenizer.decode([token for _, token in run]), SHOWN[is_sampled])
            self._console.print(text, end="\n\n")


def rows_of(path: Path, most: int | None) -> list[dict[str, Any]]:
    """Return up to ``most`` rows of a Parquet or JSON lines file. verl's column ``prompt`` becomes ``raw_prompt``."""
    kind = "parquet" if path.suffix == ".parquet" else "json"
    table = pyarrow.dataset.dataset(path, format=kind)
    rows = (table.head(most) if most is not None else table.to_table()).to_pylist()
    return [{**row, "raw_prompt": row.get("raw_prompt") or row.get("prompt")} for row in rows]


async def tried(options: argparse.Namespace) -> int:
    """Run the agent over all rows; return how many of them failed."""
    rows = rows_of(options.rows, options.most)
    async with server(options.model, options.server, options.address) as client:
        trial = Trial(options, client)
        results = await asyncio.gather(*[trial.run(number, row) for number, row in enumerate(rows)])
    if options.out is not None:
        options.out.write_text("".join(json.dumps(line, default=str) + "\n" for lines in results for line in lines))
    return sum(not lines for lines in results)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit status 0 if the agent succeeded for each row, else 1."""
    parser = argparse.ArgumentParser(prog="python -m recipe.agents.try", description=__doc__)
    parser.add_argument("--model", required=True, help="folder or name of the model")
    parser.add_argument("--rows", required=True, type=Path, help="Parquet file as for training, or JSON lines")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--agent", help="name of an `async def run(client, row)`")
    what.add_argument("--command", help="a command line")
    parser.add_argument("--address", help="URL of an engine's running server, with /v1; OPENAI_API_KEY has its key")
    parser.add_argument("--most", type=int, help="largest number of rows")
    parser.add_argument("--out", type=Path, help="file for the sequences, one JSON object per line")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds that an agent may take")
    parser.add_argument("--prompt-length", type=int, default=1024, help="data.max_prompt_length")
    parser.add_argument("--response-length", type=int, default=3072, help="data.max_response_length")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tools", default="hermes", help="actor_rollout_ref.rollout.multi_turn.format")
    parser.add_argument("--reasoning", help="name of the engine's reasoning parser")
    parser.add_argument("server", nargs="*", help="arguments of the engine's server to start, after --")
    return int(asyncio.run(tried(parser.parse_args(arguments))) > 0)
