# SPDX-License-Identifier: Apache-2.0
"""Swaps weights repeatedly under requests whose tokens show which version sampled them.

``python -m swap_scenario MODEL RAY_FOLDER FORKS RESULT SECONDS ENGINE CORES``, started by test_swaps.py, runs two real
rollout replicas, or one of SGLang, or one whose engine has two data-parallel cores, with the real publisher and client,
and a sender in place of a trainer. With the weights of version v the next token is always `token_of` (v), whatever
precedes it. The result, as JSON, has each request's answer and the labels of its tokens, for each way to handle running
answers at a swap.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from hydra import compose, initialize_config_module
from omegaconf import open_dict
from transformers import AutoConfig, AutoModelForCausalLM
from verl.utils.config import omega_conf_to_dataclass
from weight_sender import TrainerGroup

from recipe.async_engine.config.sections import Timeouts, Weights
from recipe.async_engine.engines.manager import ReplicaManager
from recipe.async_engine.rollout.client import ResumingClient
from recipe.async_engine.rollout.kept_answers import start_recording
from recipe.async_engine.run.ray_start import start_own
from recipe.async_engine.trainer.verl_settings import tell_servers
from recipe.async_engine.weights.publisher import WeightPublisher
from recipe.laptop.choice import CPU_ENVIRONMENT

WAYS = {
    "interrupt": Weights(at_swap="interrupt"),
    "keep": Weights(at_swap="keep"),
    "in place": Weights(staging="none", at_swap="interrupt"),
}
AT_ONCE = 24
LONGEST = 48
FIRST_TOKEN, TOKENS = 4, 24
CERTAIN = 60.0


def token_of(version: int) -> int:
    return FIRST_TOKEN + version % TOKENS


_models: dict[str, Any] = {}


def weights_of(path: str, dtype: torch.dtype, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights that always predict the version's token: layers add nothing, and its embedding is longest."""
    if path not in _models:
        _models[path] = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype)
    for name, tensor in _models[path].state_dict().items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
        elif "norm" in name:
            tensor.fill_(1.0)
        elif "embed" in name or "lm_head" in name:
            tensor.fill_(1.0 / tensor.shape[1])
            tensor[token_of(version)] *= CERTAIN
        yield name, tensor


class Requests:
    """Keeps `AT_ONCE` requests of various lengths running on a thread of its own, until told to stop."""

    def __init__(self, client: ResumingClient) -> None:
        self.answers: list[dict[str, Any]] = []
        self._client = client
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> list[dict[str, Any]]:
        self._stopped.set()
        self._thread.join(120)
        assert not self._thread.is_alive(), "requests do not end"
        if self._error is not None:
            raise self._error
        return self.answers

    def _run(self) -> None:
        try:
            asyncio.run(self._all())
        except BaseException as error:
            self._error = error

    async def _all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(AT_ONCE):
                tasks.create_task(self._one_after_the_other(random.Random(number)))

    async def _one_after_the_other(self, chance: random.Random) -> None:
        while not self._stopped.is_set():
            prompt = [chance.randrange(FIRST_TOKEN, FIRST_TOKEN + TOKENS) for _ in range(chance.randint(1, 30))]
            asked = chance.randint(4, LONGEST)
            recorder = start_recording()
            sampling = {"max_tokens": asked, "temperature": 1.0, "logprobs": True, "ignore_eos": True}
            answer = await self._client.generate(f"{id(recorder)}", prompt_ids=prompt, sampling_params=sampling)
            self.answers.append(
                {
                    "asked": asked,
                    "prompt": len(prompt),
                    "tokens": list(answer.token_ids),
                    "runs": [(version, len(tokens)) for version, tokens in recorder.segments],
                    "log_probs": min(answer.log_probs),
                    "interruptions": recorder.interruptions,
                    "computed_again": recorder.reprefilled_tokens,
                }
            )


def start(path: str, overrides: list[str], replicas: int = 1) -> tuple[ReplicaManager, WeightPublisher]:
    """Start replicas on a running Ray, and a publisher whose weights are made for each version."""
    with initialize_config_module("recipe.fully_async.config", version_base=None):
        overrides = [f"actor_rollout_ref.model.path={path}", "data.max_response_length=64", *overrides]
        config = compose("fully_async_ppo_trainer", overrides=["preset=tiny_cpu", *overrides])
    rollout = config.actor_rollout_ref.rollout
    with open_dict(config):
        rollout.nnodes, rollout.n_gpus_per_node = 1, replicas
        tell_servers(rollout, Timeouts(weight_sync=60.0))
    manager = ReplicaManager(config)
    manager.launch()
    checkpoint_engine = omega_conf_to_dataclass(rollout.checkpoint_engine)
    megabytes = rollout.checkpoint_engine.update_weights_bucket_megabytes
    stream = partial(weights_of, path, getattr(torch, rollout.dtype))
    publisher = WeightPublisher(
        checkpoint_engine,
        TrainerGroup(stream, bucket_size=megabytes << 20, timeout_s=60.0),
        manager.get_replicas(),
        manager.global_load_balancer,
        60.0,
        WAYS["interrupt"],
    )
    return manager, publisher


def play(path: str, seconds: float, engine: str, cores: int) -> dict[str, Any]:
    extension = "engine_kwargs.vllm.worker_extension_cls=benchmarks.emulation.engine.EmulatedExtension"
    settings = (extension, f"name={engine}", f"data_parallel_size={cores}")
    overrides = [f"actor_rollout_ref.rollout.{each}" for each in settings]
    manager, publisher = start(path, overrides, replicas=2 if engine == "vllm" else 1)
    versions = itertools.count()
    publisher.publish(next(versions))
    seen: dict[str, Any] = {}
    for way, weights in WAYS.items():
        publisher.weights = weights
        requests = Requests(manager.get_client(ResumingClient))
        end, syncs = time.monotonic() + seconds, []
        while time.monotonic() < end:
            syncs.append(publisher.publish(next(versions)))
            time.sleep(0.1)
        seen[way] = {"answers": requests.stop(), "syncs": syncs}
    return seen


def main(path: str, folder: str, forks: str, result: str, seconds: str, engine: str, cores: str) -> None:
    os.environ.update(CPU_ENVIRONMENT)
    runtime = {"py_executable": forks, "env_vars": dict(CPU_ENVIRONMENT)}
    start = {"num_cpus": 20, "num_gpus": 3, "include_dashboard": False, "log_to_driver": False}
    start_own({**start, "_temp_dir": folder, "runtime_env": runtime}, 300.0)
    try:
        Path(result).write_text(json.dumps(play(path, float(seconds), engine, int(cores))))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
