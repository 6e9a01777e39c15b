# SPDX-License-Identifier: Apache-2.0
"""The experts that verl's Megatron engine replays for trajectories of routed_answers.py, with other weights.

It is a separate process, started by test_router_replay.py, because it patches what it imports. It prints its results
as one line of JSON: for each layout of ranks, what each rank saw. verl's functions make the batch: they pad each
trajectory, join them, and remove the padding again. The experts are those with which the engine's layers compute.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import multiprocessing
import os
import pickle
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron_on_cpu
import numpy as np
import torch
import torch.distributed as dist
from cut_cases import make_tokenizer
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.router import TopKRouter
from routed_model import CHOSEN, weights_of
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker
from verl.utils import tensordict_utils as tu
from verl.workers.config import EngineRouterReplayConfig, HFModelConfig, McoreEngineConfig, RolloutConfig
from verl.workers.utils.padding import left_right_2_no_padding

from recipe.async_engine.log_prob_servers.adapter import ModelEngineServerAdapter, WorkerSettings
from recipe.async_engine.rollout.loop_output import plain_output
from recipe.async_engine.rollout.trajectory_manager import joined

# A version that sampled none of the tokens.
OTHER_WEIGHTS = 1000
LAYOUTS: dict[str, dict[str, int]] = {
    "one rank": {},
    "expert parallel": {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "tensor and sequence parallel": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
}
RANKS_S = 240


class Packing(AgentLoopWorker):
    """What verl's agent-loop worker needs to pad a trajectory; there are no rewards."""

    def __init__(self, rollout: Any) -> None:
        self.tokenizer, self.processor, self.rollout_config = make_tokenizer(), None, rollout
        self.mm_processor_kwargs = self.reward_loop_worker_handles = None

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
    padded = [asyncio.run(worker._agent_loop_postprocess(output, validate=False, raw_prompt=[])) for output in outputs]
    batch = joined(worker, padded)
    batch.batch["temperature"] = torch.ones(len(batch))
    return left_right_2_no_padding(batch.to_tensordict())


def make_worker(path: str, layout: dict[str, int]) -> Any:
    """Return verl's training worker with its Megatron engine in replay mode R3."""
    parallel = {"sequence_parallel": "tensor_model_parallel_size" in layout}
    config = McoreEngineConfig(
        vanilla_mbridge=True,
        forward_only=True,
        override_transformer_config=megatron_on_cpu.TRANSFORMER_CONFIG | parallel,
        router_replay=EngineRouterReplayConfig(mode="R3"),
        # One sequence at a time, in their order.
        use_dynamic_bsz=False,
        infer_micro_batch_size_per_gpu=1,
        **parallel,
        **layout,
    )
    # verl allows only half precision, for which the stand-ins have no kernels.
    object.__setattr__(config, "dtype", "float32")
    model = HFModelConfig(path=path, enable_gradient_checkpointing=False, use_remove_padding=True)
    return ModelEngineServerAdapter(RolloutConfig(name="vllm"), model, WorkerSettings(config)).worker


class Computed:
    """Collects the experts with which an engine's layers on this rank compute, by layer, for each of its sequences."""

    def __init__(self, worker: Any) -> None:
        self._chosen: dict[int, list[np.ndarray]] = {}
        for chunk in worker.engine.module:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    self._chosen[module.layer_number - 1] = []
                    module.register_forward_hook(self._note)

    def _note(self, router: TopKRouter, inputs: Any, outputs: Any) -> None:
        _, chosen = outputs
        assert (chosen.sum(-1) == CHOSEN).all()
        self._chosen[router.layer_number - 1].append(chosen.nonzero()[:, 1].view(len(chosen), CHOSEN).numpy())

    def differences(self, trajectories: list[dict[str, Any]]) -> tuple[int, int]:
        """Return the numbers of tokens compared, and of those computed with other experts than the rollout engine's.

        The last token is not compared. With sequence parallelism this rank has one part of each sequence.
        """
        part, parts = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
        layers, compared, wrong = sorted(self._chosen), 0, 0
        found = [np.stack(of_layers, axis=1) for of_layers in zip(*self._chosen.values(), strict=True)]
        for experts, trajectory in zip(found, trajectories, strict=True):
            rows = np.sort(trajectory["routed_experts"], -1)[:, layers]
            assert 0 <= parts * len(experts) - (len(rows) + 1) < parts
            right = rows[part * len(experts) : (part + 1) * len(experts)]
            compared += len(right)
            wrong += int((experts[: len(right)] != right).any((1, 2)).sum())
        for of_layer in self._chosen.values():
            of_layer.clear()
        return compared, wrong


def play(folder: Path, layout: dict[str, int]) -> dict[str, Any]:
    trajectories = pickle.loads((folder / "trajectories").read_bytes())
    rollout = SimpleNamespace(
        enable_rollout_routing_replay=True, calculate_log_probs=True, prompt_length=128, response_length=448
    )
    worker = make_worker(str(folder / "other"), layout)
    computed = Computed(worker)
    copies = mpu.get_data_parallel_world_size()
    own = trajectories[mpu.get_data_parallel_rank() : len(trajectories) // copies * copies : copies]

    def replayed(of: list[dict[str, Any]], replay: bool = True) -> tuple[int, int]:
        batch = batch_of(of, rollout)
        tu.assign_non_tensor(batch, calculate_entropy=False, compute_loss=False, enable_routing_replay=replay)
        worker.infer_batch(batch)
        return computed.differences(own)

    shifted = copy.deepcopy(own)
    for trajectory in shifted:
        trajectory["routed_experts"] = np.roll(trajectory["routed_experts"], 1, 0)
    seen: dict[str, Any] = {}
    seen["tokens"], seen["differences"] = replayed(own)
    seen["shifted"], seen["without"] = replayed(shifted)[1], replayed(own, replay=False)[1]
    return seen


def run_rank(rank: int, ranks: int, folder: Path, store: str, layout: dict[str, int], results: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    # verl registers its Megatron engine for accelerators only. The ranks meet in a file.
    os.environ |= {"VERL_ENGINE_DEVICE": "cuda", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.set_num_threads(1)
    megatron_on_cpu.install()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        seen = play(folder, layout)
        dist.barrier()
    except Exception:
        seen = {"traceback": traceback.format_exc()}
    results.put((rank, seen))


def main(folder: Path) -> dict[str, list[dict[str, Any]]]:
    weights_of(OTHER_WEIGHTS).save_pretrained(folder / "other")
    make_tokenizer().save_pretrained(folder / "other")
    context, seen = multiprocessing.get_context("fork"), {}
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        ranks, results = 2 if layout else 1, context.Queue()
        store = str(folder / f"store{number}")
        processes = [
            context.Process(target=run_rank, args=(rank, ranks, folder, store, layout, results))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        of_ranks = dict(results.get(timeout=RANKS_S) for _ in processes)
        for process in processes:
            process.join(10)
            process.kill()
        seen[name] = [of_ranks[rank] for rank in range(ranks)]
    return seen


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = main(Path(sys.argv[2]))
    sys.stdout.write(json.dumps(found) + "\n")
