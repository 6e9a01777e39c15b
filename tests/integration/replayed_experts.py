# SPDX-License-Identifier: Apache-2.0
"""The experts that verl's Megatron engine replays for trajectories of routed_answers.py, with other weights.

It is a separate process, started by test_router_replay.py, because it patches what it imports. It prints its results as
one line of JSON. verl's functions make the batch: they pad each trajectory, join them, and remove the padding again. The
experts are those with which the engine's layers compute.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron_on_cpu
import numpy as np
import torch
import torch.distributed as dist
from cut_cases import make_tokenizer
from megatron.core.transformer.moe.router import TopKRouter
from routed_model import CHOSEN, LAYERS, weights_of
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker
from verl.utils import tensordict_utils as tu
from verl.workers.config import EngineRouterReplayConfig, HFModelConfig, McoreEngineConfig, RolloutConfig
from verl.workers.utils.padding import left_right_2_no_padding

from recipe.async_engine.log_prob_servers.adapter import ModelEngineServerAdapter, WorkerSettings
from recipe.async_engine.rollout.loop_output import plain_output

# A version that sampled none of the tokens.
OTHER_WEIGHTS = 1000


class Packing(AgentLoopWorker):
    """What verl's agent-loop worker needs to pad a trajectory; there are no rewards."""

    def __init__(self, rollout: Any) -> None:
        self.tokenizer, self.processor, self.rollout_config = make_tokenizer(), None, rollout
        self.distillation_enabled = False

    async def _compute_score(self, outputs: Any, kwargs: Any) -> None:
        for output in outputs:
            output.reward_score = 0.0

    async def _compute_teacher_logprobs(self, *_: Any, **__: Any) -> None: ...


def batch_of(trajectories: list[dict[str, Any]], rollout: Any) -> TensorDict:
    """Return verl's batch of the trajectories, as its trainer gives it to the engine."""
    worker = Packing(rollout)
    outputs = [
        plain_output(
            AgentLoopOutput(
                **trajectory,
                response_logprobs=[-1.0] * len(trajectory["response_ids"]),
                num_turns=2,
                metrics=AgentLoopMetrics(),
            ),
            rollout,
            vocabulary=288,
        )
        for trajectory in trajectories
    ]
    padded = [asyncio.run(worker._agent_loop_postprocess(output, validate=False)) for output in outputs]
    batch = worker._postprocess(padded)
    batch.batch["temperature"] = torch.ones(len(batch))
    unpadded = left_right_2_no_padding(batch.to_tensordict())
    tu.assign_non_tensor(unpadded, calculate_entropy=False, compute_loss=False, enable_routing_replay=True)
    return unpadded


def make_worker(path: str) -> Any:
    """Return verl's training worker with its Megatron engine in replay mode R3."""
    config = McoreEngineConfig(
        vanilla_mbridge=True,
        forward_only=True,
        override_transformer_config=megatron_on_cpu.TRANSFORMER_CONFIG | {"sequence_parallel": False},
        router_replay=EngineRouterReplayConfig(mode="R3"),
        use_dynamic_bsz=False,
        infer_micro_batch_size_per_gpu=1,
    )
    object.__setattr__(config, "dtype", "float32")
    model = HFModelConfig(path=path, enable_gradient_checkpointing=False, use_remove_padding=True)
    return ModelEngineServerAdapter(RolloutConfig(name="vllm"), model, WorkerSettings(config)).worker


class Computed:
    """Collects the experts with which the layers of an engine compute, in the order of its sequences."""

    def __init__(self, worker: Any) -> None:
        self._chosen: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(1, LAYERS + 1)}
        for chunk in worker.engine.module:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(self._note)

    def _note(self, router: TopKRouter, inputs: Any, outputs: Any) -> None:
        _, chosen = outputs
        assert (chosen.sum(-1) == CHOSEN).all()
        self._chosen[router.layer_number].append(chosen.nonzero()[:, 1].view(len(chosen), CHOSEN).clone())

    def take(self) -> list[np.ndarray]:
        """Return the experts (tokens, layers, chosen) of each sequence since the last call, in increasing order."""
        layers = [self._chosen[layer] for layer in sorted(self._chosen)]
        found = [torch.stack(of_layers, dim=1).numpy() for of_layers in zip(*layers, strict=True)]
        for of_layer in layers:
            of_layer.clear()
        return found


def differences(found: list[np.ndarray], trajectories: list[dict[str, Any]]) -> int:
    """Return the number of tokens that were computed with other experts than the rollout engine's, without the last."""
    wrong = 0
    for experts, trajectory in zip(found, trajectories, strict=True):
        right = np.sort(trajectory["routed_experts"], -1)
        assert len(experts) == len(right) + 1
        wrong += int((experts[:-1] != right).any((1, 2)).sum())
    return wrong


def main(folder: Path) -> dict[str, Any]:
    trajectories = pickle.loads((folder / "trajectories").read_bytes())
    rollout = SimpleNamespace(
        enable_rollout_routing_replay=True, calculate_log_probs=True, prompt_length=128, response_length=448
    )
    weights_of(OTHER_WEIGHTS).save_pretrained(folder / "other")
    make_tokenizer().save_pretrained(folder / "other")
    worker = make_worker(str(folder / "other"))
    computed = Computed(worker)
    seen = {"tokens": sum(len(trajectory["routed_experts"]) for trajectory in trajectories)}

    def replayed(of: list[dict[str, Any]], replay: bool = True) -> int:
        batch = batch_of(of, rollout)
        tu.assign_non_tensor(batch, enable_routing_replay=replay)
        worker.infer_batch(batch)
        return differences(computed.take(), trajectories)

    shifted = copy.deepcopy(trajectories)
    for trajectory in shifted:
        trajectory["routed_experts"] = np.roll(trajectory["routed_experts"], 1, 0)
    seen["differences"] = replayed(trajectories)
    seen["shifted"] = replayed(shifted)
    seen["without"] = replayed(trajectories, replay=False)
    return seen


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        # verl registers its Megatron engine for accelerators only. The ranks meet in a file.
        os.environ |= {"VERL_ENGINE_DEVICE": "cuda", "MASTER_PORT": "0"}
        megatron_on_cpu.install()
        folder = Path(sys.argv[2])
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        found = main(folder)
    sys.stdout.write(json.dumps(found) + "\n")
